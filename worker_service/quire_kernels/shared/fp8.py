"""Conversions of the two fp8 formats of caches, by integer arithmetic on bytes.

    e4m3   sign, 4 bits of exponent (bias 7), 3 of mantissa    largest 448,   smallest normal 2^-6,  subnormals n 2^-9
    e5m2   sign, 5 bits of exponent (bias 15), 2 of mantissa   largest 57344, smallest normal 2^-14, subnormals n 2^-16

e4m3 has no infinity, and its NaN is 0x7f. e5m2 is the upper byte of a float16, with its infinities and NaNs.

On a device without the type, kernels read fp8 caches as bytes and convert here, so that every device gives the same
numbers: sm_80 has no e4m3, gfx942 has other formats under the same names, and Triton's interpreter rounds wrongly. The
dtype of the bytes tells the format: uint8 is e4m3, int8 is e5m2. So kernels need no argument for the conversion. The
kernels that convert wait for memory anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
FP8_BYTES = {E4M3: torch.uint8, E5M2: torch.int8}  # the dtype of each format inside kernels
FP8_NAMES = "float8_e4m3fn or float8_e5m2"  # for messages


def is_fp8(dtype: torch.dtype | None) -> bool:
    """Returns whether a dtype is one of the two formats; torch's other 8-bit formats are not supported."""
    return dtype in FP8_MAX


@triton.jit
def e4m3_from_float(x):
    """Converts fp32 to e4m3 as uint8, of the same shape.

    Rounds to nearest, ties to even, and saturates at 448. NaN stays NaN.
    """
    return fp8_from_float(x, 3, 7, 0x43E00000)  # the bits of 448.0


@triton.jit
def e5m2_from_float(x):
    """Converts fp32 to e5m2 as int8, of the same shape.

    Rounds to nearest, ties to even, and saturates at 57344. NaN stays NaN.
    """
    return fp8_from_float(x, 2, 15, 0x47600000).to(tl.int8, bitcast=True)  # the bits of 57344.0


@triton.jit
def fp8_from_float(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Converts fp32 to fp8 with MANTISSA bits of mantissa, as uint8.

    The comments use the numbers of e4m3: MANTISSA 3 and BIAS 7.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = ((bits >> 24) & 0x80).to(tl.uint32)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, LARGEST)  # Bits of positive floats compare like the floats.
    # Normal numbers: 23 bits of mantissa become 3, the exponent's bias 127 becomes 7. A carry moves into the exponent.
    DROPPED: tl.constexpr = 23 - MANTISSA
    HALF: tl.constexpr = (1 << (DROPPED - 1)) - 1
    normal = ((magnitude + HALF + ((magnitude >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Numbers below 2^-6: adding 2^14 rounds them to multiples of 2^-9, the smallest subnormal, because 2^-9 is the last
    # bit of a float near 2^14. Eight times the smallest subnormal is the smallest normal number, with byte 8.
    EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
    shifted = magnitude.to(tl.float32, bitcast=True) + 2.0**EXPONENT
    subnormal = shifted.to(tl.uint32, bitcast=True) - ((127 + EXPONENT) << 23)
    byte = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    byte = tl.where(is_nan, 0x7F, byte)
    return (byte | sign).to(tl.uint8)


@triton.jit
def e4m3_to_float(byte):
    """Converts e4m3 as uint8 to fp32 of the same shape, exactly."""
    bits = byte.to(tl.uint32)
    magnitude = bits & 0x7F
    # Exponent and mantissa move to their places in a float, and the bias 7 becomes 127. A subnormal is n * 2^-9.
    normal = ((magnitude << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def e5m2_to_float(byte):
    """Converts e5m2 as int8 to fp32 of the same shape, exactly: the byte is the upper byte of a float16."""
    bits = (byte.to(tl.int32) & 0xFF) << 8
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


def quantise_reference(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Computes the fp8 numbers that an append must store, in plain torch.

    Args:
        x: floating, any shape.
        scale: fp32, broadcast against `x`.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        `x / scale`, saturated, of `dtype` and the shape of `x`.
    """
    return (x.to(torch.float32) / scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)
