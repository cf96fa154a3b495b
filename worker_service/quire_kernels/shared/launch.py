"""Functions that every attention launcher uses: the chip, checks, and the form of a kernel's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

from quire_kernels.shared.fp8 import FP8_BYTES, FP8_NAMES, is_fp8
from quire_kernels.shared.options import AttentionOptions

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NATIVE_FP8_CAPABILITY = (8, 9)
DOT_MIN = 16  # smallest side of a product on tensor cores
MULTIPROCESSORS_WITHOUT_GPU = 4  # small, so that tests split requests into a few units


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a tile, and compiler options."""

    block_m: int  # query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int


def chip_of(device: torch.device) -> str:
    """Returns the chip that sizes are chosen for: "sm_80" (all before sm_90), "sm_90" (and later), or "gfx942"."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "gfx942"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return "sm_80"
    return "sm_90"


def is_hopper(device: torch.device) -> bool:
    """Returns whether a device has compute capability 9, which the kernels in Gluon need."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def can_overlap(device: torch.device) -> bool:
    """Returns whether a kernel can start while the previous one ends ("programmatic dependent launch").

    A kernel launched with `launch_pdl=True` starts once every program of the previous kernel has called
    `gdc_launch_dependents` or has ended. The next kernel must call `gdc_wait` before it reads the results of this
    kernel.
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def is_interpreted(kernel: Any) -> bool:
    """Returns whether a kernel runs in Triton's interpreter.

    The interpreter's bf16 arithmetic is wrong, so interpreted kernels compute in float32.
    """
    return not isinstance(kernel, triton.runtime.JITFunction)


def check_runnable(kernel: Any, **places: torch.Tensor | torch.device) -> None:
    """Refuses tensors in host memory unless the kernel is interpreted: compiled kernels cannot read them.

    Args:
        kernel: the kernel that will read the tensors.
        **places: tensors or their devices, by the names of the caller's arguments.

    Raises:
        ValueError: a tensor is in host memory, and the kernel is compiled; the message names the argument.
    """
    for name, place in places.items():
        device = place.device if isinstance(place, torch.Tensor) else place
        if device.type == "cpu" and not is_interpreted(kernel):
            raise ValueError(
                f"{name} is on the CPU, but these kernels run only on GPUs: move it to a CUDA device, or start "
                "Python with TRITON_INTERPRET=1"
            )


def device_of(kernel: Any, **place: torch.Tensor | torch.device) -> AbstractContextManager[object]:
    """Makes a tensor's device the current one, so that `kernel` is launched there. Every launcher calls this function.

    Args:
        kernel: the kernel to launch.
        **place: a tensor or its device, by the name of the caller's argument.

    Raises:
        ValueError: see `check_runnable`.
    """
    check_runnable(kernel, **place)
    (given,) = place.values()
    device = given.device if isinstance(given, torch.Tensor) else given
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def multiprocessor_count(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; a CPU counts as a small GPU."""
    if device.type != "cuda":
        return MULTIPROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def head_dim_blocks(head_dim: int, v_head_dim: int) -> dict[str, int]:
    """Returns the constexprs that depend on head dims.

    Example: 192 and 128 give BLOCK_D 128, BLOCK_TAIL 64, BLOCK_V 128.
    """
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
    """Views a cache in the dtype for a kernel: an fp8 cache as bytes (see `fp8`) if the device lacks the type.

    Triton could convert e5m2 on older chips too. Bytes are still used there, so that those chips run the code that the
    interpreter tests.
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
        head_dim: the head dim of the keys.
        kv_heads: must divide query_heads.
        kv_dtype: q's dtype, float8_e4m3fn or float8_e5m2.

    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument.
    """
    if q.dim() != 3 or q.shape[2] != head_dim:
        raise ValueError(f"q must be [tokens, heads, {head_dim}], not {tuple(q.shape)}")
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, not {q.dtype}")
    if kv_dtype != q.dtype and not is_fp8(kv_dtype):
        raise ValueError(f"the cache must have the dtype of q, {q.dtype}, or {FP8_NAMES}, not {kv_dtype}")
    if q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise ValueError(f"the number of query heads must be a multiple of {kv_heads} KV heads, not {q.shape[1]}")
    if head_dim < DOT_MIN:
        raise ValueError(f"the head dim of q must be at least {DOT_MIN}, not {head_dim}")


def check_devices(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Refuses tensors that are on another device than the queries.

    Raises:
        ValueError: a tensor is on another device; the message names it.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on the queries' device, {device}, not {tensor.device}")


def output_like(
    name: str, given: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns a tensor to write to: the caller's, or a new one if the caller gave none.

    Raises:
        ValueError: the caller's tensor has another shape, dtype or device, or is not contiguous; the message names it.
    """
    if given is None:
        return torch.empty(*shape, dtype=dtype, device=device)
    if tuple(given.shape) != tuple(shape) or given.dtype != dtype or given.device != device:
        raise ValueError(
            f"{name} must be {dtype} {tuple(shape)} on {device}, "
            f"not {given.dtype} {tuple(given.shape)} on {given.device}"
        )
    if not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not have strides {given.stride()}")
    return given


def option_arguments(options: AttentionOptions) -> dict[str, Any]:
    """Returns the kernels' arguments for `AttentionOptions`, without `window_left`."""
    return {
        "sinks": options.sinks,
        "slopes": options.alibi_slopes,
        "k_scale": options.k_scale,
        "v_scale": options.v_scale,
        "sm_scale": float(options.sm_scale),  # float, because Triton would compile another variant for an integer
        "soft_cap": float(options.logits_soft_cap),
        "SOFT_CAP": options.logits_soft_cap > 0,
    }


def strides_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """Returns the stride arguments of the kernels, in elements. Keys and values without pages have no page's stride."""
    axes = ("page", "token", "head", "dim")
    return {
        f"stride_{name}_{axis}": stride
        for name, tensor in (("q", q), ("k", k), ("v", v))
        for axis, stride in zip(axes[-tensor.dim() :], tensor.stride(), strict=True)
    }
