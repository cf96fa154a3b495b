"""RMSNorm (Zhang and Sennrich, 2019) in one launch. Transformers needs six, because it converts to float32 and back.

    y = x / sqrt(mean(x^2) + eps) * (weight + offset)

The offset is 0, or 1 for models such as Gemma that store weight - 1. Everything is computed in float32 and rounded
once. There is one program per row, and it holds the row in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import QUERY_DTYPES, check_devices, device_of, output_like
from quire_kernels.shared.numbers import require_finite

SIZE_MAX = 32_768  # longest row that one program can hold: 64 elements per thread
ELEMENTS_PER_WARP = 1_024


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, row_stride, eps, offset, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Norms row r in program r."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    mask = element < SIZE
    x = tl.load(x_ptr + row * row_stride + element, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + element, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + element, (x * scale * (weight + offset)).to(out_ptr.dtype.element_ty), mask=mask)


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms the last dimension. Name and arguments are FlashInfer's.

    Args:
        input: float16, bfloat16 or float32 `[..., size]`, dense in its last dimension.
        weight: `[size]`, contiguous, of the input's dtype.
        eps: added to the mean of squares.
        out: tensor for the result, written in place; None allocates it.

    Returns:
        `[..., size]` of the input's dtype, contiguous.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    return _normed(input, weight, require_finite("eps", eps), out, offset=0.0)


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms with 1 + weight, as Gemma does; otherwise as `rmsnorm`."""
    return _normed(input, weight, require_finite("eps", eps), out, offset=1.0)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """Computes the formula in float64."""
    x64 = x.double()
    return x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


def launch_sizes(size: int) -> dict[str, Any]:
    """Returns the constexprs and the number of warps for a row."""
    block = max(128, triton.next_power_of_2(size))
    return {"SIZE": size, "BLOCK": block, "num_warps": min(16, max(4, block // ELEMENTS_PER_WARP))}


def _normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None, *, offset: float
) -> torch.Tensor:
    if x.dim() < 1 or x.dtype not in QUERY_DTYPES or not 1 <= x.shape[-1] <= SIZE_MAX:
        raise ValueError(
            f"input must be [..., 1 to {SIZE_MAX}] of one of {QUERY_DTYPES}, not {x.dtype} {tuple(x.shape)}"
        )
    size = x.shape[-1]
    if weight.shape != (size,) or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous {x.dtype} [{size}], not {weight.dtype} {tuple(weight.shape)}")
    check_devices(x.device, weight=weight)
    output = output_like("out", out, x.shape, x.dtype, x.device)
    rows = x.reshape(-1, size)
    if rows.stride(1) != 1:
        raise ValueError(f"input must be dense in its last dimension, not have strides {x.stride()}")
    if rows.shape[0]:
        with device_of(rms_norm_kernel, input=x):
            rms_norm_kernel[(rows.shape[0],)](
                rows, weight, output, rows.stride(0), float(eps), float(offset), **launch_sizes(size)
            )
    return output
