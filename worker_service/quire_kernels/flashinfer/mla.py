"""`BatchMLAPagedAttentionWrapper`: FlashInfer's name and arguments over `mla_paged`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire_kernels.flashinfer.arguments import MLA_CONSTRUCTOR, MLA_PLAN, MLA_RUN, check_others
from quire_kernels.flashinfer.common import (
    DType,
    PlannedTable,
    as_dtype,
    check_planned,
    fixed_tensors,
    planned_dtypes,
    result_of,
    workspace_bytes,
)
from quire_kernels.ops.mla_paged import mla_paged
from quire_kernels.shared.mla_work import MlaWork, divide_mla
from quire_kernels.shared.numbers import require_finite, require_sizes
from quire_kernels.shared.paged_cache import check_index_tensor, check_page_table

# Latents and their positional part: two tensors, or one tensor with both concatenated in the last dimension.
Parts = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Shape:
    """The properties that later plans of a CUDA graph must not change."""

    heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    causal: bool
    dtype: torch.dtype
    is_decode: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    shape: _Shape
    sm_scale: float
    qo_indptr: torch.Tensor
    table: PlannedTable  # last_page_len holds the lengths in tokens
    token_count: int
    division: MlaWork


class BatchMLAPagedAttentionWrapper:
    """Computes multi-head latent attention with absorbed queries, for decode and prefill.

    Lifecycle: 1. The wrapper is made. 2. `plan` runs once per forward pass: it checks the page table and divides the
    work, by keys if every request has one query, otherwise by query rows. 3. `run` runs once per layer, and only
    launches kernels. With `use_cuda_graph` the first plan fixes the batch size, the maximum of query tokens, and
    whether it is decode.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Takes the workspace, and reads only its device.

        Args:
            float_workspace_buffer: uint8 vector; everything runs on its device.
            use_cuda_graph: whether tensors keep their addresses from plan to plan; this requires the four buffers.
            qo_indptr: int32 `[batch + 1]`.
            kv_indptr: int32 `[batch + 1]`.
            kv_indices: int32, as long as the most pages of any plan.
            kv_len_arr: int32 `[batch]`.
            **others: see `flashinfer.arguments.MLA_CONSTRUCTOR`.

        Raises:
            ValueError: a buffer is missing, on another device, or of another batch size, the workspace is not a vector
                of bytes, or one of the others cannot be honored; the message names the argument.
        """
        check_others(type(self).__name__, MLA_CONSTRUCTOR, others)
        given = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_len_arr": kv_len_arr}
        self._use_cuda_graph = use_cuda_graph
        self._tensors = fixed_tensors(workspace_bytes(float_workspace_buffer), use_cuda_graph, given)
        self._batch: int | None = None
        if use_cuda_graph:
            assert qo_indptr is not None  # `fixed_tensors` has checked that these tensors were given.
            assert kv_indptr is not None
            assert kv_len_arr is not None
            self._batch = kv_len_arr.shape[0]
            check_index_tensor("qo_indptr", qo_indptr, length=self._batch + 1)
            check_index_tensor("kv_indptr", kv_indptr, length=self._batch + 1)
        self._planned: _Plan | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: DType,
        kv_data_type: DType,
        *,
        output_dtype: DType | None = None,
        **others: Any,
    ) -> None:
        """Checks the batch and divides its work. The index tensors may be on any device.

        Args:
            qo_indptr: int32 `[batch + 1]`, query tokens of each request.
            kv_indptr: int32 `[batch + 1]`, pages of each request.
            kv_indices: int32 `[kv_indptr[batch]]` or longer.
            kv_len_arr: int32 `[batch]`, tokens of each request; the last token must be in the request's last page.
            num_heads: query heads.
            head_dim_ckv: dims of a latent, a power of two, such as 512.
            head_dim_kpe: dims of the positional part, a power of two, such as 64.
            page_size: tokens per page.
            causal: whether masks are causal; the last query of a request sees its last key.
            sm_scale: factor of the dot products: 1 / sqrt(head dim before absorption).
            q_data_type: float16, bfloat16 or float32.
            kv_data_type: the same dtype as q_data_type.
            output_dtype: the same dtype as q_data_type.
            **others: see `flashinfer.arguments.MLA_PLAN`.

        Raises:
            ValueError: an argument is out of range, does not fit, or cannot be honored; the message names it.
        """
        check_others("plan", MLA_PLAN, others)
        num_heads, head_dim_ckv, head_dim_kpe, page_size = require_sizes(
            num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size
        )
        sm_scale = require_finite("sm_scale", sm_scale)
        dtype, kv_dtype = planned_dtypes(q_data_type, kv_data_type)
        check_planned("kv_data_type", kv_dtype, dtype)
        if output_dtype is not None:
            check_planned("output_dtype", as_dtype("output_dtype", output_dtype), dtype)
        check_index_tensor("kv_len_arr", kv_len_arr)
        check_index_tensor("qo_indptr", qo_indptr, length=kv_len_arr.shape[0] + 1)
        check_index_tensor("kv_indptr", kv_indptr, length=kv_len_arr.shape[0] + 1)
        whole = torch.full_like(kv_len_arr, page_size)  # valid in any case: `_check_lengths` checks the real lengths
        check_page_table(kv_indptr, kv_indices, whole, page_count=None, page_size=page_size, prefix="kv_")
        _check_lengths(kv_len_arr.tolist(), kv_indptr.diff().tolist(), page_size)
        is_decode = bool((qo_indptr.diff() == 1).all())
        shape = _Shape(num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, dtype, is_decode)
        before = self._planned if self._use_cuda_graph else None
        if before is not None:
            check_planned("use_cuda_graph: plan", shape, before.shape)
        if self._batch is not None and kv_len_arr.shape[0] != self._batch:
            raise ValueError(
                f"kv_len_arr must have {self._batch} requests, like the CUDA graph, not {kv_len_arr.shape[0]}"
            )
        tokens = int(qo_indptr[-1])
        if before is not None and tokens > before.division.token_count:
            raise ValueError(
                f"qo_indptr must have at most {before.division.token_count} tokens, like the CUDA graph, not {tokens}"
            )
        used = kv_indices[: int(kv_indptr[-1])]
        placed = self._tensors.put(
            {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_indices": used, "kv_len_arr": kv_len_arr}
        )
        table = PlannedTable(
            placed["kv_indptr"], placed["kv_indices"], placed["kv_len_arr"], int(used.max()) if used.numel() else -1
        )
        division = divide_mla(
            placed["qo_indptr"], table.last_page_len, split_keys=is_decode, heads=num_heads, ckv_dim=head_dim_ckv,
            token_count=tokens if before is None else before.division.token_count, element_bytes=dtype.itemsize,
            page_size=page_size, out=None if before is None else before.division,
        )  # fmt: skip
        self._planned = _Plan(shape, sm_scale, placed["qo_indptr"], table, tokens, division)

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        *,
        return_lse_base_on_e: bool = False,
        query: Parts | None = None,
        kv_cache: Parts | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Computes attention of one layer. Does not wait for the device.

        Args:
            q_nope: `[qo_indptr[batch], num_heads, head_dim_ckv]`, absorbed, of q_data_type.
            q_pe: `[qo_indptr[batch], num_heads, head_dim_kpe]`.
            ckv_cache: `[pages, page_size, head_dim_ckv]`.
            kpe_cache: `[pages, page_size, head_dim_kpe]`; both may be slices of one tensor.
            out: tensor for the result, written in place; None allocates it.
            lse: tensor for the result, written in place; None allocates it.
            return_lse: whether lse is returned too.
            return_lse_base_on_e: whether lse is a natural logarithm instead of base 2.
            query: replaces q_nope and q_pe: a pair of them, or one tensor with both concatenated in the last dimension.
            kv_cache: replaces ckv_cache and kpe_cache in the same way.
            **others: see `flashinfer.arguments.MLA_RUN`.

        Returns:
            `[tokens, num_heads, head_dim_ckv]`, and with `return_lse` float32 `[tokens, num_heads]`, in base 2. A query
            that sees no key gives zeros and -inf.

        Raises:
            ValueError: there is no plan, or an argument differs from the plan or cannot be honored; the message names
                it.
        """
        check_others("run", MLA_RUN, others)
        plan = self._planned
        if plan is None:
            raise ValueError("run needs a plan")
        shape = plan.shape
        q_nope, q_pe = _both("query", query, (q_nope, q_pe), shape.head_dim_ckv)
        ckv_cache, kpe_cache = _both("kv_cache", kv_cache, (ckv_cache, kpe_cache), shape.head_dim_ckv)
        for name, tensor, dim in (("q_nope", q_nope, shape.head_dim_ckv), ("q_pe", q_pe, shape.head_dim_kpe)):
            check_planned(
                name, (tuple(tensor.shape), tensor.dtype), ((plan.token_count, shape.heads, dim), shape.dtype)
            )
        for name, tensor, dim in (
            ("ckv_cache", ckv_cache, shape.head_dim_ckv),
            ("kpe_cache", kpe_cache, shape.head_dim_kpe),
        ):
            check_planned(name, (tuple(tensor.shape[1:]), tensor.dtype), ((shape.page_size, dim), shape.dtype))
        plan.table.check_pool("kv_indices", ckv_cache.shape[0])
        result, result_lse = mla_paged(
            q_nope, q_pe, ckv_cache, kpe_cache, plan.qo_indptr, plan.table.indptr, plan.table.indices,
            plan.table.last_page_len, plan.division, sm_scale=plan.sm_scale, causal=shape.causal, out=out, lse=lse,
        )  # fmt: skip
        lse_base = "ln" if return_lse_base_on_e else "log2"
        return result_of(result, result_lse, return_lse=return_lse, lse_base=lse_base)


def _both(
    name: str, together: Parts | None, apart: tuple[torch.Tensor | None, torch.Tensor | None], ckv_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latents and their positional part, given together or as two arguments."""
    if together is not None:
        if any(part is not None for part in apart):
            raise ValueError(f"give {name} or its parts, not both")
        if isinstance(together, torch.Tensor):
            return together[..., :ckv_dim], together[..., ckv_dim:]
        if len(together) != 2:
            raise ValueError(f"{name} must be one tensor or two, not {len(together)}")
        return together[0], together[1]
    if apart[0] is None or apart[1] is None:
        raise ValueError(f"give {name}, or both of its parts")
    return apart[0], apart[1]


def _check_lengths(lengths: list[int], page_counts: list[int], page_size: int) -> None:
    """Refuses a request whose last token is not in its last page.

    Raises:
        ValueError: there is such a request; the message names `kv_len_arr`.
    """
    for request, (length, pages) in enumerate(zip(lengths, page_counts, strict=True)):
        low, high = max(0, (pages - 1) * page_size + 1), pages * page_size
        if not low <= length <= high:
            raise ValueError(f"kv_len_arr of request {request} must be in {low}..{high}, not {length}")
