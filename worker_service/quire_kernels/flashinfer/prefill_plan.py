"""The common parts of both prefill wrappers' plans: shape, queries, masks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire_kernels.flashinfer.common import check_planned
from quire_kernels.shared.fp8 import is_fp8
from quire_kernels.shared.launch import chip_of
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import check_indptr
from quire_kernels.shared.prefill_rows import (
    Masking,
    PrefillWork,
    divide_prefill,
    mask_indptr_of,
    prefill_tiling,
)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The properties that later plans of a CUDA graph must not change."""

    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int  # 0 without pages
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest:
    """The arguments of `plan` that limit the keys of each query."""

    custom_mask: torch.Tensor | None
    packed_custom_mask: torch.Tensor | None
    causal: bool
    chunk_size: int


@dataclass(frozen=True, slots=True, eq=False)
class PlannedQueries:
    """A checked batch of ragged queries on the device."""

    shape: PrefillShape
    options: AttentionOptions
    masking: Masking
    qo_indptr: torch.Tensor  # int32 [batch + 1]
    token_count: int
    division: PrefillWork

    def check_run(self, q: torch.Tensor) -> None:
        """Refuses queries that differ from the plan.

        Raises:
            ValueError: the shape or the dtype differs.
        """
        shape = self.shape
        check_planned(
            "q", (tuple(q.shape), q.dtype), ((self.token_count, shape.heads, shape.head_dim_qk), shape.q_dtype)
        )


@dataclass(frozen=True, slots=True, eq=False)
class CheckedQueries:
    """A checked batch of ragged queries with tensors on any device."""

    shape: PrefillShape
    options: AttentionOptions
    masking: Masking
    token_count: int
    tensors: dict[str, torch.Tensor]  # qo_indptr and the mask, under the names of their buffers
    before: PlannedQueries | None

    def place(self, placed: dict[str, torch.Tensor]) -> PlannedQueries:
        """Divides the work; `placed` is the result of `FixedTensors.put`."""
        masking, qo_indptr, before = self.masking, placed["qo_indptr_buf"], self.before
        if masking.custom_mask is not None:
            masking = replace(masking, custom_mask=placed["custom_mask_buf"], mask_indptr=placed["mask_indptr_buf"])
        group = self.shape.heads // self.shape.kv_heads
        if before is None:
            tiling = prefill_tiling(
                chip_of(qo_indptr.device),
                self.token_count * group // max(1, qo_indptr.shape[0] - 1),
                self.shape.head_dim_qk,
                self.shape.head_dim_vo,
                self.shape.q_dtype.itemsize,
                masked=masking.kind > 0,
                is_fp8=is_fp8(self.shape.kv_dtype),
            )
            division = divide_prefill(qo_indptr, token_count=self.token_count, group=group, tiling=tiling)
        else:
            division = divide_prefill(
                qo_indptr,
                token_count=before.division.token_count,
                group=group,
                tiling=before.division.tiling,
                out=before.division,
            )
        return PlannedQueries(self.shape, self.options, masking, qo_indptr, self.token_count, division)


def check_plan(
    qo_indptr: torch.Tensor,
    kv_lengths: torch.Tensor,
    shape: PrefillShape,
    options: AttentionOptions,
    request: MaskRequest,
    before: PlannedQueries | None,
) -> CheckedQueries:
    """Checks queries and masks. Writes nothing.

    Args:
        qo_indptr: int32 `[batch + 1]`, on any device.
        kv_lengths: int32 `[batch]`, on any device.
        shape: heads, dims, dtypes.
        options: scale, soft cap and so on.
        request: the arguments that limit the keys of each query.
        before: the previous plan of a CUDA graph, if any; the new plan is written to its memory.

    Raises:
        ValueError: an argument does not fit, or differs from a CUDA graph's first plan in shape or masks, or needs more
            query tokens than that plan. The message names the argument.
    """
    check_indptr("qo_indptr", qo_indptr, batch=kv_lengths.shape[0])
    token_count = int(qo_indptr[-1])
    masking = requested_masking(qo_indptr, kv_lengths, request)
    if before is not None:
        was = before.masking
        check_planned(
            "use_cuda_graph: plan",
            (shape, masking.causal, masking.chunk_size > 0, masking.kind, options.window_left >= 0),
            (before.shape, was.causal, was.chunk_size > 0, was.kind, before.options.window_left >= 0),
        )
        if token_count > before.division.token_count:
            raise ValueError(
                f"qo_indptr must have at most {before.division.token_count} tokens, like the CUDA graph, not "
                f"{token_count}"
            )
    tensors = {"qo_indptr_buf": qo_indptr}
    if masking.custom_mask is not None and masking.mask_indptr is not None:
        tensors |= {"custom_mask_buf": masking.custom_mask, "mask_indptr_buf": masking.mask_indptr}
    return CheckedQueries(shape, options, masking, token_count, tensors, before)


def requested_masking(qo_indptr: torch.Tensor, kv_lengths: torch.Tensor, request: MaskRequest) -> Masking:
    """Returns the masking of a request, after checking the size of a custom mask, which replaces `causal`.

    Raises:
        ValueError: both masks are given, or one has another dtype or size; the message names the argument.
    """
    name, mask = "custom_mask", request.custom_mask
    if request.packed_custom_mask is not None:
        if mask is not None:
            raise ValueError("give packed_custom_mask or custom_mask, not both")
        name, mask = "packed_custom_mask", request.packed_custom_mask
    if mask is None:
        return Masking(causal=request.causal, chunk_size=request.chunk_size)
    packed = name == "packed_custom_mask"
    dtype = torch.uint8 if packed else torch.bool
    if mask.dtype != dtype or mask.dim() != 1:
        raise ValueError(f"{name} must be a flat {dtype} tensor, not {mask.dtype} {tuple(mask.shape)}")
    mask_indptr = mask_indptr_of(qo_indptr, kv_lengths.to(qo_indptr.device), packed=packed)
    if mask.shape[0] != int(mask_indptr[-1]):
        raise ValueError(f"{name} must have {int(mask_indptr[-1])} entries, not {mask.shape[0]}")
    return Masking(chunk_size=request.chunk_size, custom_mask=mask.contiguous(), mask_indptr=mask_indptr)
