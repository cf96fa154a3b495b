"""fp8 by integer arithmetic equals torch's conversion for every byte, and for numbers at every rounding boundary."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from quire_kernels.shared.fp8 import (
    E4M3,
    E5M2,
    FP8_BYTES,
    FP8_MAX,
    e4m3_from_float,
    e4m3_to_float,
    e5m2_from_float,
    e5m2_to_float,
    is_fp8,
    quantise_reference,
)

FORMATS = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)


@triton.jit
def _encode(x_ptr, byte_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    x = tl.load(x_ptr + index)
    if byte_ptr.dtype.element_ty == tl.int8:
        tl.store(byte_ptr + index, e5m2_from_float(x))
    else:
        tl.store(byte_ptr + index, e4m3_from_float(x))


@triton.jit
def _decode(byte_ptr, x_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    byte = tl.load(byte_ptr + index)
    if byte_ptr.dtype.element_ty == tl.int8:
        tl.store(x_ptr + index, e5m2_to_float(byte))
    else:
        tl.store(x_ptr + index, e4m3_to_float(byte))


def encode(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    size = triton.next_power_of_2(x.numel())
    padded = torch.nn.functional.pad(x, (0, size - x.numel()))
    byte = torch.empty(size, dtype=FP8_BYTES[fp8], device=x.device)
    _encode[(1,)](padded, byte, size)
    return byte[: x.numel()].view(fp8)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@FORMATS
def test_every_byte_is_read_as_torch_reads_it(fp8: torch.dtype, device: torch.device) -> None:
    byte = torch.arange(256, device=device).to(torch.uint8)
    x = torch.empty(256, device=device)
    _decode[(1,)](byte.view(FP8_BYTES[fp8]), x, 256)
    expected = byte.view(fp8).to(torch.float32)
    assert torch.equal(x.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert x.isnan().sum() == (2 if fp8 == E4M3 else 6)


@FORMATS
def test_numbers_on_and_beside_every_rounding_boundary_become_the_byte_that_torch_gives(
    fp8: torch.dtype, device: torch.device
) -> None:
    numbers = torch.arange(128, device=device).to(torch.uint8).view(fp8).to(torch.float32)
    numbers = numbers[numbers <= FP8_MAX[fp8]]  # drops infinity and NaN
    assert len(numbers) == (127 if fp8 == E4M3 else 124)
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([numbers, middles])
    infinity = torch.tensor(float("inf"), device=device)
    around = torch.cat([around, torch.nextafter(around, infinity), torch.nextafter(around, -infinity)])
    around = torch.cat([around, -around])
    assert torch.equal(bits(encode(around, fp8)), bits(quantise_reference(around, 1.0, fp8)))


@FORMATS
def test_random_numbers_of_every_magnitude_become_the_byte_that_torch_gives(
    fp8: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(8192) * torch.exp2(torch.randint(-20, 19, (8192,)))
    x = x.to(device)
    assert torch.equal(bits(encode(x, fp8)), bits(quantise_reference(x, 1.0, fp8)))


@FORMATS
def test_too_large_numbers_saturate_and_nan_stays_nan(fp8: torch.dtype, device: torch.device) -> None:
    largest = FP8_MAX[fp8]
    x = torch.tensor([largest, largest * 1.01, 1e30, float("inf"), float("-inf"), float("nan"), 1e-30, 0.0, -0.0])
    stored = encode(x.to(device), fp8).to(torch.float32)
    assert stored[:5].tolist() == [largest] * 4 + [-largest]
    assert stored[5].isnan()
    assert stored[6:].tolist() == [0.0, 0.0, 0.0]


def test_no_other_dtype_of_a_byte_is_taken_for_fp8() -> None:
    others = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.uint8, torch.int8, None)
    assert not any(is_fp8(dtype) for dtype in others)
    assert is_fp8(E4M3)
    assert is_fp8(E5M2)
