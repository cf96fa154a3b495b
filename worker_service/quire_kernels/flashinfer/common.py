"""The common parts of FlashInfer's wrappers: tensors at fixed addresses for CUDA graphs, and steps of `plan`."""

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

POSITION_ENCODINGS = ("NONE", "ALIBI")  # Rotary encoding is missing, because the cache stores rotated keys.
LSE_BASES = ("log2", "ln")
DType = torch.dtype | str


def as_dtype(name: str, dtype: DType) -> torch.dtype:
    """Returns a dtype that is given as a dtype or by name, such as "float16".

    Raises:
        ValueError: there is no such dtype; the message names the argument.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} must be a dtype, not {dtype!r}")
    return found


def planned_dtypes(
    q_data_type: DType, kv_data_type: DType | None, o_data_type: DType | None = None
) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes of queries and cache. If the cache's is None, it has the queries' dtype, as results have.

    Raises:
        ValueError: there is no such dtype, or kernels do not support it; the message names the argument.
    """
    q_dtype = as_dtype("q_data_type", q_data_type)
    kv_dtype = q_dtype if kv_data_type is None else as_dtype("kv_data_type", kv_data_type)
    if q_dtype not in QUERY_DTYPES:
        raise ValueError(f"q_data_type must be one of {QUERY_DTYPES}, not {q_dtype}")
    if kv_dtype != q_dtype and not is_fp8(kv_dtype):
        raise ValueError(f"kv_data_type must be q_data_type, {q_dtype}, or {FP8_NAMES}, not {kv_dtype}")
    if o_data_type is not None and as_dtype("o_data_type", o_data_type) != q_dtype:
        raise ValueError(f"o_data_type must be q_data_type, {q_dtype}, not {o_data_type}")
    return q_dtype, kv_dtype


def standard_alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Returns the slopes of the ALiBi paper, float32 `[heads]`.

    For a power of two n they are 2^(-8 i / n). Other numbers of heads add every second slope of the next power of two.
    """
    base = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / base) for i in range(base)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / base) for i in range(heads - base)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


# A CUDA graph's buffers that may be larger than a plan needs. Every other buffer must have exactly the batch's size.
ROOMY_BUFFERS = ("paged_kv_indices_buffer", "paged_kv_indices_buf", "kv_indices", "custom_mask_buf")


class FixedTensors:
    """Named tensors on the device: new ones at each plan or, for CUDA graphs, always at the same addresses.

    Lifecycle: 1. The object is made with the caller's buffers, or empty. 2. `put` runs once per plan, after all checks
    that may refuse the plan. It checks all tensors before it writes the first one, so a refused plan leaves the
    previous one intact.
    """

    def __init__(self, device: torch.device, *, fixed: bool, given: dict[str, torch.Tensor | None]) -> None:
        """Takes the caller's buffers as `given`; they keep their addresses.

        Raises:
            ValueError: a buffer is on another device.
        """
        self.device = device
        self.fixed = fixed
        self._places: dict[str, torch.Tensor] = {}
        for name, tensor in given.items():
            if tensor is not None:
                if tensor.device != device:
                    raise ValueError(f"{name} must be on the workspace's device, {device}, not {tensor.device}")
                self._places[name] = tensor

    def check(self, tensors: dict[str, torch.Tensor]) -> None:
        """Refuses tensors that do not fit into the buffers of `put`. Writes nothing.

        Raises:
            ValueError: a fixed buffer has another dtype or batch size, or is too small; the message names it.
        """
        if not self.fixed:
            return
        for name, tensor in tensors.items():
            place = self._places.get(name)
            if place is None:
                continue
            room, needed = place.shape[0], tensor.shape[0]
            if place.dtype != tensor.dtype or room < needed:
                raise ValueError(
                    f"{name} must be {tensor.dtype} with at least {needed} entries, not {place.dtype} with {room}"
                )
            if room > needed and name not in ROOMY_BUFFERS:
                bounds = int("indptr" in name)
                raise ValueError(
                    f"{name}: the plan must have {room - bounds} requests, like the CUDA graph, not {needed - bounds}"
                )

    def put(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies the tensors to the device, and returns the copies under the same names.

        Raises:
            ValueError: `check` refuses a tensor; nothing was written.
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
    """Makes the `FixedTensors` of a wrapper, on the workspace's device.

    Args:
        workspace: the result of `workspace_bytes`.
        use_cuda_graph: whether tensors keep their addresses.
        needed: the caller's buffers by name; a CUDA graph needs all of them.
        optional: buffers that a CUDA graph may lack.

    Raises:
        ValueError: a buffer is missing or on another device; the message names it.
    """
    missing = [name for name, tensor in needed.items() if tensor is None]
    if use_cuda_graph and missing:
        raise ValueError(f"use_cuda_graph needs {missing}")
    return FixedTensors(workspace.device, fixed=use_cuda_graph, given={**needed, **(optional or {})})


def workspace_bytes(float_workspace_buffer: torch.Tensor) -> torch.Tensor:
    """Returns a wrapper's workspace as uint8 `[bytes]`; int8 is accepted too, because FlashInfer's users pass it.

    Raises:
        ValueError: the workspace is not a vector of bytes, or kernels cannot run on its device.
    """
    if float_workspace_buffer.dtype not in (torch.uint8, torch.int8) or float_workspace_buffer.dim() != 1:
        raise ValueError(f"float_workspace_buffer must be a uint8 vector, not {float_workspace_buffer.dtype}")
    check_runnable(divide_work_kernel, float_workspace_buffer=float_workspace_buffer)  # every plan launches this kernel
    return float_workspace_buffer.view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTable:
    """A checked page table on the device."""

    indptr: torch.Tensor  # int32 [batch + 1]
    indices: torch.Tensor  # int32
    last_page_len: torch.Tensor  # int32 [batch]
    page_index_max: int  # the largest page index; -1 without pages

    def check_pool(self, name: str, page_count: int) -> None:
        """Refuses a cache with fewer pages than the plan uses.

        Args:
            name: the name of the plan's argument with the page indices.
            page_count: pages of the cache.

        Raises:
            ValueError: a page index is outside the cache.
        """
        if self.page_index_max >= page_count:
            raise ValueError(f"{name} must be in 0..{page_count - 1}, not {self.page_index_max}")


@dataclass(frozen=True, slots=True, eq=False)
class CheckedTable:
    """A checked page table on any device."""

    tensors: dict[str, torch.Tensor]  # indptr, used indices, last_page_len, under the names of their buffers
    page_index_max: int

    def place(self, placed: dict[str, torch.Tensor]) -> PlannedTable:
        """Returns the table on the device, made from the tensors of `FixedTensors.put`."""
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
    """Checks a page table on any device.

    Args:
        indptr: int32 `[batch + 1]`.
        indices: int32 `[indptr[batch]]` or longer.
        last_page_len: int32 `[batch]`.
        page_size: tokens per page.
        prefix: prefix of the arguments' names, for messages.
        buffer_suffix: the end of a buffer's name, after "paged_kv_indptr".

    Raises:
        ValueError: `check_page_table` refuses the table.
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
    """Returns a plan's options; `sm_scale` defaults to 1 / sqrt(head_dim).

    Raises:
        ValueError: the position encoding is unknown, kv_heads does not divide query_heads, or `AttentionOptions`
            refuses a value.
    """
    if pos_encoding_mode not in POSITION_ENCODINGS:
        raise ValueError(f"pos_encoding_mode must be one of {POSITION_ENCODINGS}, not {pos_encoding_mode!r}")
    if min(query_heads, kv_heads, head_dim) < 1 or query_heads % kv_heads:
        raise ValueError(f"num_qo_heads must be a multiple of num_kv_heads, {kv_heads}, not {query_heads}")
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
    """Adds the options of one layer's `run` to a plan's. Scales that are numbers go into `sm_scale`; tensors stay.

    Raises:
        ValueError: `AttentionOptions` or `scale_per_head` refuses a value.
    """
    sm_scale, key_scale = planned.sm_scale, None
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):  # Both scales apply to q @ k.
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
    """Returns the result of `run`. With `lse_base` "ln", converts lse in place from the kernels' base 2.

    Raises:
        ValueError: the base is unknown.
    """
    if lse_base not in LSE_BASES:
        raise ValueError(f"lse_base must be one of {LSE_BASES}, not {lse_base!r}")
    if lse_base == "ln":
        lse.mul_(math.log(2.0))
    return (out, lse) if return_lse else out


def check_planned(name: str, actual: object, planned: object) -> None:
    """Refuses an argument of `run` that differs from the plan.

    Raises:
        ValueError: the argument differs; the message names it.
    """
    if actual != planned:
        raise ValueError(f"{name} must be {planned}, as planned, not {actual}")
