"""fp8 e4m3 (finite, NaN 0x7f) as bytes, by integer arithmetic.

    byte = sign, 4 bits of exponent (bias 7), 3 bits of mantissa
    largest 448, smallest normal 2^-6, subnormals n * 2^-9

Kernels see fp8 caches as uint8 and convert here, so that every device gives the same byte: sm_80 has no such
instruction, gfx942 has another e4m3, and Triton's interpreter rounds wrongly. The kernels that convert wait for memory
anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@triton.jit
def e4m3_from_float(x):
    """fp32 to bytes, uint8, of the same shape: rounded to nearest, ties to even, saturated at 448; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = ((bits >> 24) & 0x80).to(tl.uint32)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448.0: as integers, magnitudes are in the order of the numbers
    # Normal: 23 bits of mantissa become 3, the exponent's bias 127 becomes 7. A carry moves into the exponent.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6: next to 2^14 the last bit of a float is worth 2^-9, so the addition rounds to a whole subnormal.
    # 8 of them are the smallest normal, whose byte is 8 as well.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000  # the bits of 16384.0
    byte = tl.where(magnitude < 0x3C800000, subnormal, normal)  # 2^-6
    byte = tl.where(is_nan, 0x7F, byte)
    return (byte | sign).to(tl.uint8)


@triton.jit
def e4m3_to_float(byte):
    """Bytes, uint8, to fp32 of the same shape, exactly."""
    bits = byte.to(tl.uint32)
    magnitude = bits & 0x7F
    # Exponent and mantissa into the places of a float, whose bias is 127 instead of 7. A subnormal is n * 2^-9.
    normal = ((magnitude << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


def quantise_reference(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """What an append must store, in plain torch.

    Args:
        x: floating, any shape.
        scale: fp32, broadcast against `x`.

    Returns:
        e4m3 of `x / scale`, saturated, of the shape of `x`.
    """
    return (x.to(torch.float32) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
