"""Decisions of every attention launcher: sizes of tiles, and the form of the kernel's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

from quire_kernels.shared.fp8 import FP8_BYTES, FP8_NAMES, is_fp8
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NATIVE_FP8_CAPABILITY = (8, 9)
DOT_MIN = 16  # the smallest side that a product on tensor cores may have
MULTIPROCESSORS_WITHOUT_GPU = 4  # so that a test's requests are split into units, and not into many


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a tile, and options of the compiler."""

    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int


def chip_of(device: torch.device) -> str:
    """Returns the chip whose sizes are chosen: "sm_80" (all before sm_90), "sm_90" (and later), or "gfx942"."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "gfx942"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return "sm_80"
    return "sm_90"


def is_hopper(device: torch.device) -> bool:
    """Returns whether a device is of compute capability 9, which has kernels in Gluon."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def can_overlap(device: torch.device) -> bool:
    """Says whether a kernel can be started while the one before it ends ("programmatic dependent launch").

    A kernel launched with `launch_pdl=True` starts once every program of the kernel before it has called
    `gdc_launch_dependents` or has ended. It must call `gdc_wait` before it reads the results of that kernel.
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def is_interpreted(kernel: Any) -> bool:
    """Returns whether a kernel runs in Triton's interpreter, whose bf16 arithmetic is wrong: it then computes in
    float32."""
    return not isinstance(kernel, triton.runtime.JITFunction)


def check_runnable(kernel: Any, **places: torch.Tensor | torch.device) -> None:
    """Refuses tensors in the host's memory, which only an interpreted kernel can read.

    Args:
        kernel: the one that is to read them.
        **places: tensors, or where they are, by the names of the caller's arguments.

    Raises:
        ValueError: one is there, and the kernel is compiled; names it.
    """
    for name, place in places.items():
        device = place.device if isinstance(place, torch.Tensor) else place
        if device.type == "cpu" and not is_interpreted(kernel):
            raise ValueError(
                f"{name} is on the CPU, where these kernels do not run: move it to a CUDA device, "
                "or start Python with TRITON_INTERPRET=1"
            )


def device_of(kernel: Any, **place: torch.Tensor | torch.device) -> AbstractContextManager[object]:
    """Makes a tensor's device the current one, where `kernel` is then launched: every launcher goes through here.

    Args:
        kernel: the one that is launched.
        **place: a tensor, or where it is, by the name of the caller's argument.

    Raises:
        ValueError: see `check_runnable`.
    """
    check_runnable(kernel, **place)
    (given,) = place.values()
    device = given.device if isinstance(given, torch.Tensor) else given
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def multiprocessor_count(device: torch.device) -> int:
    """Counts the multiprocessors of a GPU; a CPU counts as a small one."""
    if device.type != "cuda":
        return MULTIPROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def head_dim_blocks(head_dim: int, v_head_dim: int) -> dict[str, int]:
    """Gives the constexprs that depend on head dims: 192 and 128 give BLOCK_D 128, BLOCK_TAIL 64, BLOCK_V 128."""
    block_d = max(DOT_MIN, 1 << (head_dim.bit_length() - 1))
    tail = head_dim - block_d
    return {
        "HEAD_DIM": head_dim,
        "V_DIM": v_head_dim,
        "BLOCK_D": block_d,
        "BLOCK_TAIL": max(DOT_MIN, triton.next_power_of_2(tail)) if tail > 0 else 0,
        "BLOCK_V": max(DOT_MIN, triton.next_power_of_2(v_head_dim)),
    }


def as_kernel_sees(cache: torch.Tensor, *, interpreted: bool) -> torch.Tensor:
    """Views a cache in the dtype for a kernel: fp8 goes as bytes, see `fp8`, where the device has no such type.

    Triton could convert e5m2 on older chips, too. It goes as e4m3 does, so that they run what the interpreter tests.
    """
    if not is_fp8(cache.dtype):
        return cache
    is_native = (
        not interpreted
        and cache.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(cache.device) >= NATIVE_FP8_CAPABILITY
    )
    return cache if is_native else cache.view(FP8_BYTES[cache.dtype])


def check_queries(q: torch.Tensor, *, head_dim: int, kv_heads: int, kv_dtype: torch.dtype) -> None:
    """Refuses queries that do not fit the keys.

    Args:
        q: `[tokens, query_heads, head_dim]`, float16, bfloat16 or float32, any strides.
        head_dim: of the keys.
        kv_heads: must divide query_heads.
        kv_dtype: that of q, or float8_e4m3fn, or float8_e5m2.

    Raises:
        ValueError: a shape or dtype does not fit; names the argument.
    """
    if q.dim() != 3 or q.shape[2] != head_dim:
        raise ValueError(f"q must be [tokens, heads, {head_dim}], not {tuple(q.shape)}")
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, not {q.dtype}")
    if kv_dtype != q.dtype and not is_fp8(kv_dtype):
        raise ValueError(f"cache must be of q's {q.dtype}, {FP8_NAMES}, not {kv_dtype}")
    if q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads, no multiple of {kv_heads} KV heads")
    if head_dim < DOT_MIN:
        raise ValueError(f"q: head dims start at {DOT_MIN}, not {head_dim}")


def check_devices(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Refuses tensors that are on another device than the queries.

    Raises:
        ValueError: one is; names it.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the queries are on {device}")


def output_like(
    name: str, given: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Gives a tensor to write to: the caller's, if it fits, else a new one.

    Raises:
        ValueError: the caller's has another shape, dtype or device, or is not contiguous; names it.
    """
    if given is None:
        return torch.empty(*shape, dtype=dtype, device=device)
    if tuple(given.shape) != tuple(shape) or given.dtype != dtype or given.device != device:
        raise ValueError(
            f"{name} must be {dtype} {tuple(shape)} on {device}, "
            f"not {given.dtype} {tuple(given.shape)} on {given.device}"
        )
    if not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {given.stride()}")
    return given


def option_arguments(options: AttentionOptions) -> dict[str, Any]:
    """Returns the kernels' arguments for `AttentionOptions`, without `window_left`."""
    return {
        "sinks": options.sinks,
        "slopes": options.alibi_slopes,
        "k_scale": options.k_scale,
        "v_scale": options.v_scale,
        "sm_scale": float(options.sm_scale),  # an integer would be another type to the compiler
        "soft_cap": float(options.logits_soft_cap),
        "SOFT_CAP": options.logits_soft_cap > 0,
    }


def strides_of(q: torch.Tensor, cache: PagedCache) -> dict[str, int]:
    """Returns the kernels' arguments that are strides, in elements."""
    tensors = (
        ("q", q, ("token", "head", "dim")),
        *((name, part, ("page", "token", "head", "dim")) for name, part in (("k", cache.k), ("v", cache.v))),
    )
    return {
        f"stride_{name}_{axis}": stride
        for name, tensor, axes in tensors
        for axis, stride in zip(axes, tensor.stride(), strict=True)
    }
