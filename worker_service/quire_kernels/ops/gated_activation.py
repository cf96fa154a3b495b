"""The activation of a gated layer (Shazeer, 2020), fused with the product of its halves in one launch.

    y = act(x[..., :size]) * x[..., size:]

    silu         x / (1 + exp(-x))
    gelu_tanh    x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))      Hendrycks and Gimpel, 2016

Everything is computed in float32 and rounded once. One matrix product with merged weights gives both halves.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import QUERY_DTYPES, device_of, output_like

BLOCK = 1024  # elements that one program writes
NUM_WARPS = 4
SQRT_2_OVER_PI = tl.constexpr(math.sqrt(2.0 / math.pi))


@triton.jit
def gated_activation_kernel(x_ptr, out_ptr, row_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Computes block b of row r in program (r, b)."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = element < size
    gate = tl.load(x_ptr + row * row_stride + element, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * row_stride + size + element, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # GELU is gate * (1 + tanh(t)) / 2, which equals gate / (1 + exp(-2 t)). Here z is 2 t.
        z = 2.0 * SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    else:
        z = gate
    active = gate / (1.0 + tl.exp(-z))
    tl.store(out_ptr + row * size + element, (active * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies silu of the first half with the second half. Name and arguments are FlashInfer's.

    Args:
        input: float16, bfloat16 or float32 `[..., 2 * size]`, dense in its last dimension.
        out: tensor for the result, written in place; None allocates it.

    Returns:
        `[..., size]` of the input's dtype, contiguous.

    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument.
    """
    return _activated(input, out, is_gelu=False)


def gelu_tanh_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies the tanh approximation of gelu of the first half with the second half; otherwise as `silu_and_mul`."""
    return _activated(input, out, is_gelu=True)


def gated_activation_reference(x: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """Computes the formula in float64."""
    gate, up = x.double().chunk(2, dim=-1)
    if not is_gelu:
        return gate / (1 + (-gate).exp()) * up
    return gate / 2 * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up


def _activated(x: torch.Tensor, out: torch.Tensor | None, *, is_gelu: bool) -> torch.Tensor:
    if x.dim() < 1 or x.dtype not in QUERY_DTYPES or x.shape[-1] % 2 or not x.shape[-1]:
        raise ValueError(f"input must be [..., 2 * size] of one of {QUERY_DTYPES}, not {x.dtype} {tuple(x.shape)}")
    size = x.shape[-1] // 2
    output = output_like("out", out, (*x.shape[:-1], size), x.dtype, x.device)
    rows = x.reshape(-1, 2 * size)
    if rows.stride(1) != 1:
        raise ValueError(f"input must be dense in its last dimension, not have strides {x.stride()}")
    if rows.shape[0]:
        with device_of(gated_activation_kernel, input=x):
            gated_activation_kernel[(rows.shape[0], triton.cdiv(size, BLOCK))](
                rows, output, rows.stride(0), size, GELU=is_gelu, BLOCK=BLOCK, num_warps=NUM_WARPS
            )
    return output
