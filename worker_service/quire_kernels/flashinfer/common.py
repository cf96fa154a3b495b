"""The common parts of the FlashInfer-named wrappers: tensors at fixed addresses for CUDA graphs, and choices of
`plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from quire_kernels.shared.fp8 import FP8_NAMES, is_fp8
from quire_kernels.shared.launch import QUERY_DTYPES, check_runnable
from quire_kernels.shared.numbers import require_finite
from quire_kernels.shared.options import AttentionOptions, Scale, scale_per_head
from quire_kernels.shared.paged_cache import check_page_table
from quire_kernels.shared.upload import upload_tensor
from quire_kernels.shared.work_units import divide_work_kernel

POSITION_ENCODINGS = ("NONE", "ALIBI")  # a rotation is not among them: keys are stored rotated
LSE_BASES = ("log2", "ln")
DType = torch.dtype | str


def as_dtype(name: str, dtype: DType) -> torch.dtype:
    """Returns a dtype given as such or by name, such as "float16".

    Raises:
        ValueError: no such dtype; names the argument.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} must be a dtype, not {dtype!r}")
    return found


def planned_dtypes(
    q_data_type: DType, kv_data_type: DType | None, o_data_type: DType | None = None
) -> tuple[torch.dtype, torch.dtype]:
    """Returns those of queries and cache; the cache's is the queries' if None, and so is that of the results, always.

    Raises:
        ValueError: no such dtype, or one that kernels cannot take; names the argument.
    """
    q_dtype = as_dtype("q_data_type", q_data_type)
    kv_dtype = q_dtype if kv_data_type is None else as_dtype("kv_data_type", kv_data_type)
    if q_dtype not in QUERY_DTYPES:
        raise ValueError(f"q_data_type must be one of {QUERY_DTYPES}, not {q_dtype}")
    if kv_dtype != q_dtype and not is_fp8(kv_dtype):
        raise ValueError(f"kv_data_type must be q_data_type's {q_dtype}, {FP8_NAMES}, not {kv_dtype}")
    if o_data_type is not None and as_dtype("o_data_type", o_data_type) != q_dtype:
        raise ValueError(f"o_data_type must be that of q, {q_dtype}, not {o_data_type}")
    return q_dtype, kv_dtype


def standard_alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Returns the slopes of the ALiBi paper, float32 `[heads]`: 2^(-8 i / n), odd places of the next power filling
    up."""
    base = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / base) for i in range(base)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / base) for i in range(heads - base)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


# Buffers of a graph that may be larger than the plan needs. Every other buffer must fit the batch exactly.
ROOMY_BUFFERS = ("paged_kv_indices_buffer", "paged_kv_indices_buf", "kv_indices", "custom_mask_buf")


class FixedTensors:
    """Tensors on the device by name: new at each plan, or, for CUDA graphs, copied to where the first ones were.

    Lifecycle: 1. given or empty. 2. `put`, once per plan, after everything else that may be refused: it checks all
    tensors before it writes the first one, so that a plan that is refused leaves the one before it whole.
    """

    def __init__(self, device: torch.device, *, fixed: bool, given: dict[str, torch.Tensor | None]) -> None:
        """`given` are the caller's buffers, which keep their address.

        Raises:
            ValueError: a buffer is on another device.
        """
        self.device = device
        self.fixed = fixed
        self._places: dict[str, torch.Tensor] = {}
        for name, tensor in given.items():
            if tensor is not None:
                if tensor.device != device:
                    raise ValueError(f"{name} is on {tensor.device}, the workspace on {device}")
                self._places[name] = tensor

    def check(self, tensors: dict[str, torch.Tensor]) -> None:
        """Refuses values that do not fit `put`'s buffers; writes nothing.

        Raises:
            ValueError: a fixed place is of another dtype or batch, or too small; names it.
        """
        if not self.fixed:
            return
        for name, tensor in tensors.items():
            place = self._places.get(name)
            if place is None:
                continue
            room, needed = place.shape[0], tensor.shape[0]
            if place.dtype != tensor.dtype or room < needed:
                raise ValueError(f"{name} is {place.dtype} with room for {room}, needed {tensor.dtype}, {needed}")
            if room > needed and name not in ROOMY_BUFFERS:
                bounds = int("indptr" in name)
                raise ValueError(f"{name}: the plan is of {needed - bounds} requests, the graph of {room - bounds}")

    def put(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors' places on the device, by the same names.

        Raises:
            ValueError: see `check`; then nothing was written.
        """
        self.check(tensors)
        placed = {}
        for name, tensor in tensors.items():
            place = self._places.get(name) if self.fixed else None
            if place is None:
                place = upload_tensor(tensor, self.device).contiguous().clone()
                if self.fixed:
                    self._places[name] = place
            else:
                upload_tensor(tensor, self.device, into=place[: tensor.shape[0]])
            placed[name] = place
        return placed


def fixed_tensors(
    workspace: torch.Tensor,
    use_cuda_graph: bool,
    needed: dict[str, torch.Tensor | None],
    optional: dict[str, torch.Tensor | None] | None = None,
) -> FixedTensors:
    """Returns the places of a wrapper, on the workspace's device.

    Args:
        workspace: by `workspace_bytes`.
        use_cuda_graph: whether they keep their addresses.
        needed: the caller's buffers by name; a CUDA graph needs all of them.
        optional: those that it may do without.

    Raises:
        ValueError: a buffer is missing or on another device; names it.
    """
    missing = [name for name, tensor in needed.items() if tensor is None]
    if use_cuda_graph and missing:
        raise ValueError(f"use_cuda_graph needs {missing}")
    return FixedTensors(workspace.device, fixed=use_cuda_graph, given={**needed, **(optional or {})})


def workspace_bytes(float_workspace_buffer: torch.Tensor) -> torch.Tensor:
    """Returns a wrapper's workspace as uint8 `[bytes]`; FlashInfer's users also make it of int8.

    Raises:
        ValueError: it is no vector of bytes, or where kernels cannot run.
    """
    if float_workspace_buffer.dtype not in (torch.uint8, torch.int8) or float_workspace_buffer.dim() != 1:
        raise ValueError(f"float_workspace_buffer must be a uint8 vector, not {float_workspace_buffer.dtype}")
    check_runnable(divide_work_kernel, float_workspace_buffer=float_workspace_buffer)  # every plan launches it
    return float_workspace_buffer.view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTable:
    """A checked page table on the device."""

    indptr: torch.Tensor  # int32 [batch + 1]
    indices: torch.Tensor  # int32
    last_page_len: torch.Tensor  # int32 [batch]
    page_index_max: int  # -1 without pages

    def check_pool(self, name: str, page_count: int) -> None:
        """Refuses a cache that is smaller than the plan needs.

        Args:
            name: of the plan's argument that has the pages.
            page_count: of the cache.

        Raises:
            ValueError: a page index is outside the cache.
        """
        if self.page_index_max >= page_count:
            raise ValueError(f"{name} must be in 0..{page_count - 1}, found {self.page_index_max}")


@dataclass(frozen=True, slots=True, eq=False)
class CheckedTable:
    """A checked page table, wherever it lives."""

    tensors: dict[str, torch.Tensor]  # indptr, indices in use, last_page_len, by the names of their buffers
    page_index_max: int

    def place(self, placed: dict[str, torch.Tensor]) -> PlannedTable:
        """Returns the table on the device, made of the tensors from `FixedTensors.put`."""
        indptr, indices, last_page_len = (placed[name] for name in self.tensors)
        return PlannedTable(indptr, indices, last_page_len, self.page_index_max)


def check_table(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    page_size: int,
    prefix: str = "",
    buffer_suffix: str = "_buffer",
) -> CheckedTable:
    """Checks a page table, wherever it lives.

    Args:
        indptr: int32 `[batch + 1]`.
        indices: int32 `[indptr[batch]]` or longer.
        last_page_len: int32 `[batch]`.
        page_size: tokens per page.
        prefix: of the arguments' names, for messages.
        buffer_suffix: the end of a buffer's name, after "paged_kv_indptr".

    Raises:
        ValueError: see `check_page_table`.
    """
    check_page_table(indptr, indices, last_page_len, page_count=None, page_size=page_size, prefix=prefix)
    used = indices[: int(indptr[-1])]
    named = {"indptr": indptr, "indices": used, "last_page_len": last_page_len}
    tensors = {f"paged_kv_{name}{buffer_suffix}": tensor for name, tensor in named.items()}
    return CheckedTable(tensors, int(used.max()) if used.numel() else -1)


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
    """Returns a plan's options for scores; `sm_scale` defaults to 1 / sqrt(head_dim).

    Raises:
        ValueError: an unknown encoding, heads that do not divide, or a refusal of `AttentionOptions`.
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
    q_scale: Scale | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    sinks: torch.Tensor | None,
    window_left: int | None = None,
) -> AttentionOptions:
    """Returns a plan's options with those of one layer's call. Numbers go into `sm_scale`, tensors to the kernel.

    Raises:
        ValueError: refusals of `AttentionOptions` and `scale_per_head`.
    """
    sm_scale, key_scale = planned.sm_scale, None
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):  # both are factors of the same product
        if isinstance(scale, torch.Tensor):
            per_head = scale_per_head(name, scale, kv_heads, device)
            key_scale = per_head if key_scale is None or per_head is None else key_scale * per_head
        elif scale is not None:
            sm_scale *= require_finite(name, scale)
    return replace(
        planned,
        sm_scale=sm_scale,
        window_left=planned.window_left if window_left is None else window_left,
        sinks=sinks,
        k_scale=key_scale,
        v_scale=scale_per_head("v_scale", v_scale, kv_heads, device),
    )


def result_of(
    out: torch.Tensor, lse: torch.Tensor, *, return_lse: bool, lse_base: str = "log2"
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of `run`; with `lse_base` "ln" lse, which kernels write in base 2, is converted in place.

    Raises:
        ValueError: an unknown base.
    """
    if lse_base not in LSE_BASES:
        raise ValueError(f"lse_base must be one of {LSE_BASES}, not {lse_base!r}")
    if lse_base == "ln":
        lse.mul_(math.log(2.0))
    return (out, lse) if return_lse else out


def check_planned(name: str, actual: object, planned: object) -> None:
    """Refuses at run arguments that differ from the plan.

    Raises:
        ValueError: they differ; names the argument.
    """
    if actual != planned:
        raise ValueError(f"{name} is {actual}, planned {planned}")
