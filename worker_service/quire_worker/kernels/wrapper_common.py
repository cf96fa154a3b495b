"""What the FlashInfer-named wrappers share: tensors that a CUDA graph finds where they were, and choices of `plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quire_worker.kernels.e4m3 import E4M3
from quire_worker.kernels.launch import QUERY_DTYPES
from quire_worker.kernels.options import AttentionOptions, Scale, scale_per_head
from quire_worker.kernels.paged_cache import check_page_table

POSITION_ENCODINGS = ("NONE", "ALIBI")
DType = torch.dtype | str


def as_dtype(name: str, dtype: DType) -> torch.dtype:
    """A dtype given as such or by name, such as "float16".

    Raises:
        ValueError: no such dtype; names the argument.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} must be a dtype, not {dtype!r}")
    return found


def planned_dtypes(q_data_type: DType, kv_data_type: DType | None) -> tuple[torch.dtype, torch.dtype]:
    """Those of queries and cache; the cache's is the queries' if None.

    Raises:
        ValueError: no such dtype, or one that kernels cannot take; names the argument.
    """
    q_dtype = as_dtype("q_data_type", q_data_type)
    kv_dtype = q_dtype if kv_data_type is None else as_dtype("kv_data_type", kv_data_type)
    if q_dtype not in QUERY_DTYPES:
        raise ValueError(f"q_data_type must be one of {QUERY_DTYPES}, not {q_dtype}")
    if kv_dtype not in (q_dtype, E4M3):
        raise ValueError(f"kv_data_type must be {q_dtype} or {E4M3}, not {kv_dtype}")
    return q_dtype, kv_dtype


def standard_alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The slopes of the ALiBi paper, float32 `[heads]`: 2^(-8 i / n), odd places of the next power filling up."""
    base = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / base) for i in range(base)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / base) for i in range(heads - base)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


class FixedTensors:
    """Tensors on the device by name: replaced at each plan, or, for CUDA graphs, copied to where the first one was.

    Lifecycle: 1. given or empty. 2. `put` copies into what is there if the place is fixed, and keeps it otherwise.
    """

    def __init__(self, device: torch.device, *, fixed: bool, given: dict[str, torch.Tensor | None]) -> None:
        """`given` are the caller's buffers, whose address stays.

        Raises:
            ValueError: a buffer is on another device.
        """
        self.device = device
        self.fixed = fixed
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in given.items():
            if tensor is not None:
                if tensor.device != device:
                    raise ValueError(f"{name} is on {tensor.device}, the workspace on {device}")
                self._tensors[name] = tensor

    def put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's place on the device.

        Raises:
            ValueError: the place is fixed and too small, or of another dtype; names it.
        """
        place = self._tensors.get(name)
        if not self.fixed or place is None:
            self._tensors[name] = tensor.to(self.device).contiguous().clone()
            return self._tensors[name]
        if place.dtype != tensor.dtype or place.shape[0] < tensor.shape[0]:
            raise ValueError(
                f"{name} is {place.dtype} with room for {place.shape[0]}, needed {tensor.dtype}, {tensor.shape[0]}"
            )
        place[: tensor.shape[0]].copy_(tensor)
        return place


def fixed_tensors(
    float_workspace_buffer: torch.Tensor,
    use_cuda_graph: bool,
    needed: dict[str, torch.Tensor | None],
    optional: dict[str, torch.Tensor | None] | None = None,
) -> FixedTensors:
    """The places of a wrapper, on the workspace's device.

    Args:
        float_workspace_buffer: uint8, one dimension.
        use_cuda_graph: whether they keep their addresses.
        needed: the caller's buffers by name, all of which a CUDA graph needs.
        optional: those that it may do without.

    Raises:
        ValueError: the workspace is no uint8 vector, or a buffer is missing or on another device; names it.
    """
    if float_workspace_buffer.dtype != torch.uint8 or float_workspace_buffer.dim() != 1:
        raise ValueError(f"float_workspace_buffer must be a uint8 vector, not {float_workspace_buffer.dtype}")
    missing = [name for name, tensor in needed.items() if tensor is None]
    if use_cuda_graph and missing:
        raise ValueError(f"use_cuda_graph needs {missing}")
    return FixedTensors(float_workspace_buffer.device, fixed=use_cuda_graph, given={**needed, **(optional or {})})


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTable:
    """A checked page table on the device."""

    indptr: torch.Tensor  # int32 [batch + 1]
    indices: torch.Tensor  # int32
    last_page_len: torch.Tensor  # int32 [batch]
    page_index_max: int  # -1 without pages

    def check_pool(self, page_count: int) -> None:
        """Refuses a cache that is smaller than what was planned.

        Raises:
            ValueError: a page index is outside the cache.
        """
        if self.page_index_max >= page_count:
            raise ValueError(f"indices must be in 0..{page_count - 1}, found {self.page_index_max}")


def plan_table(
    tensors: FixedTensors,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    page_size: int,
    prefix: str = "",
    buffer_suffix: str = "_buffer",
) -> PlannedTable:
    """Checks a page table, wherever it lives, and takes it to the device.

    Args:
        tensors: their places.
        indptr: int32 `[batch + 1]`.
        indices: int32 `[indptr[batch]]` or longer.
        last_page_len: int32 `[batch]`.
        page_size: tokens per page.
        prefix: of the arguments' names, for messages.
        buffer_suffix: what names a buffer, after "paged_kv_indptr".

    Raises:
        ValueError: see `check_page_table`; or a fixed place is too small, or of another batch.
    """
    check_page_table(indptr, indices, last_page_len, page_count=None, page_size=page_size, prefix=prefix)
    used = indices[: int(indptr[-1])]
    page_index_max = int(used.max()) if used.numel() else -1
    placed = [
        tensors.put(f"paged_kv_{name}{buffer_suffix}", tensor)
        for name, tensor in (("indptr", indptr), ("indices", used), ("last_page_len", last_page_len))
    ]
    if placed[0].shape[0] != indptr.shape[0] or placed[2].shape[0] != last_page_len.shape[0]:
        raise ValueError(f"{prefix}indptr is of {indptr.shape[0] - 1} requests, the graph of {placed[0].shape[0] - 1}")
    return PlannedTable(placed[0], placed[1], placed[2], page_index_max)


def planned_options(
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    alibi_slopes: torch.Tensor | None,
    device: torch.device,
) -> AttentionOptions:
    """What a plan says about scores; `sm_scale` defaults to 1 / sqrt(head_dim).

    Raises:
        ValueError: an unknown encoding, heads that do not divide, or what `AttentionOptions` refuses.
    """
    if pos_encoding_mode not in POSITION_ENCODINGS:
        raise ValueError(f"pos_encoding_mode must be one of {POSITION_ENCODINGS}, not {pos_encoding_mode!r}")
    if min(query_heads, kv_heads, head_dim) < 1 or query_heads % kv_heads:
        raise ValueError(f"num_qo_heads must be a multiple of num_kv_heads: {query_heads}, {kv_heads}")
    if pos_encoding_mode == "ALIBI" and alibi_slopes is None:
        alibi_slopes = standard_alibi_slopes(query_heads, device)
    elif pos_encoding_mode != "ALIBI" and alibi_slopes is not None:
        raise ValueError('alibi_slopes needs pos_encoding_mode="ALIBI"')
    return AttentionOptions(
        sm_scale=1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale,
        logits_soft_cap=logits_soft_cap or 0.0,
        window_left=window_left,
        alibi_slopes=alibi_slopes,
    )


def run_options(
    planned: AttentionOptions,
    kv_heads: int,
    device: torch.device,
    *,
    q_scale: float | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    sinks: torch.Tensor | None,
) -> AttentionOptions:
    """A plan's options with what is given per layer. Numbers go into `sm_scale`, tensors to the kernel.

    Raises:
        ValueError: what `AttentionOptions` and `scale_per_head` refuse.
    """
    sm_scale = planned.sm_scale * (1.0 if q_scale is None else q_scale)
    if k_scale is not None and not isinstance(k_scale, torch.Tensor):
        sm_scale, k_scale = sm_scale * k_scale, None
    return replace(
        planned,
        sm_scale=sm_scale,
        sinks=sinks,
        k_scale=scale_per_head("k_scale", k_scale, kv_heads, device),
        v_scale=scale_per_head("v_scale", v_scale, kv_heads, device),
    )


def check_planned(name: str, actual: object, planned: object) -> None:
    """Refuses at run what differs from the plan.

    Raises:
        ValueError: they differ; names the argument.
    """
    if actual != planned:
        raise ValueError(f"{name} is {actual}, planned {planned}")
