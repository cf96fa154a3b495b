"""fp8 by integer arithmetic against torch's own conversion: every byte, and every number around a rounding boundary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from quire_kernels.shared.e4m3 import E4M3, e4m3_from_float, e4m3_to_float, quantise_reference


@triton.jit
def _encode(x_ptr, byte_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(byte_ptr + index, e4m3_from_float(tl.load(x_ptr + index)))


@triton.jit
def _decode(byte_ptr, x_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(x_ptr + index, e4m3_to_float(tl.load(byte_ptr + index)))


def encode(x: torch.Tensor) -> torch.Tensor:
    size = triton.next_power_of_2(x.numel())
    padded = torch.nn.functional.pad(x, (0, size - x.numel()))
    byte = torch.empty(size, dtype=torch.uint8, device=x.device)
    _encode[(1,)](padded, byte, size)
    return byte[: x.numel()]


def test_every_byte_is_read_as_torch_reads_it(device: torch.device) -> None:
    byte = torch.arange(256, device=device).to(torch.uint8)
    x = torch.empty(256, device=device)
    _decode[(1,)](byte, x, 256)
    expected = byte.view(E4M3).to(torch.float32)
    assert torch.equal(x.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert x.isnan().sum() == 2


def test_numbers_on_and_beside_every_rounding_boundary_become_the_byte_that_torch_gives(device: torch.device) -> None:
    numbers = torch.arange(127, device=device).to(torch.uint8).view(E4M3).to(torch.float32)  # 0 to 448
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([numbers, middles])
    infinity = torch.tensor(float("inf"), device=device)
    around = torch.cat([around, torch.nextafter(around, infinity), torch.nextafter(around, -infinity)])
    around = torch.cat([around, -around])
    assert torch.equal(encode(around), quantise_reference(around, 1.0).view(torch.uint8))


def test_random_numbers_of_every_magnitude_become_the_byte_that_torch_gives(device: torch.device) -> None:
    x = torch.randn(8192) * torch.exp2(torch.randint(-20, 12, (8192,)))
    x = x.to(device)
    assert torch.equal(encode(x), quantise_reference(x, 1.0).view(torch.uint8))


def test_too_large_numbers_saturate_and_nan_stays_nan(device: torch.device) -> None:
    x = torch.tensor([448.0, 449.0, 1e30, float("inf"), float("-inf"), float("nan"), 1e-30, 0.0, -0.0], device=device)
    stored = encode(x).view(E4M3).to(torch.float32)
    assert stored[:5].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0]
    assert stored[5].isnan()
    assert stored[6:].tolist() == [0.0, 0.0, 0.0]
