"""Packed masks, compared with numpy's packbits."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from quire_kernels.ops import pack_mask as real
from quire_kernels.ops.pack_mask import packbits, segment_packbits, segment_packbits_reference

LENGTHS = (0, 3, 8, 0, 5000, 17, 1)


def make_mask(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Returns mask and indptr of requests of several lengths, and the indptr as a list."""
    indptr = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return (torch.rand(sum(LENGTHS)) < 0.5).to(device), indptr.to(device), indptr.tolist()


def packing_matches(module: ModuleType, device: torch.device, bitorder: str = "little") -> bool:
    """Returns whether the kernel equals the reference. The module may be the real or a faulty one."""
    mask, indptr, bounds = make_mask(device)
    packed, output_indptr = module.segment_packbits(mask, indptr, bitorder)
    sizes = [-(-length // 8) for length in LENGTHS]
    expected = segment_packbits_reference(mask, bounds, bitorder)
    return output_indptr.diff().tolist() == sizes and torch.equal(packed.cpu(), expected)


@pytest.mark.parametrize("bitorder", ["little", "big"])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4096, 4097])
def test_bits_are_packed_as_numpy_packs_them(length: int, bitorder: str, device: torch.device) -> None:
    mask = torch.rand(length) < 0.5
    packed = packbits(mask.to(device), bitorder)
    expected = np.packbits(mask.numpy(), bitorder=bitorder)  # type: ignore[call-overload]
    assert packed.dtype == torch.uint8
    assert packed.cpu().tolist() == expected.tolist()


@pytest.mark.parametrize("bitorder", ["little", "big"])
def test_each_request_starts_at_a_byte(bitorder: str, device: torch.device) -> None:
    assert packing_matches(real, device, bitorder)
    mask, indptr, bounds = make_mask(device)
    packed, output = segment_packbits(mask, indptr, bitorder)
    assert output.dtype == torch.int32
    for request, (begin, end) in enumerate(pairwise(bounds)):
        alone = packbits(mask[begin:end], bitorder)
        assert torch.equal(packed[int(output[request]) : int(output[request + 1])], alone)


def test_any_integer_but_zero_is_true_and_any_stride_is_taken(device: torch.device) -> None:
    x = torch.tensor([0, 9, 2, 9, 0, 9, 255, 9], dtype=torch.uint8, device=device)[::2]
    assert packbits(x, "little").tolist() == [0b1010]


def test_the_first_bit_is_the_highest_unless_it_is_asked_for_otherwise_as_in_flashinfer_and_numpy(
    device: torch.device,
) -> None:
    mask, indptr, _ = make_mask(device)
    assert packbits(mask).cpu().tolist() == np.packbits(mask.cpu().numpy()).tolist()
    assert torch.equal(segment_packbits(mask, indptr)[0], segment_packbits(mask, indptr, "big")[0])


def test_wide_indptr_stay_wide(device: torch.device) -> None:
    mask, indptr, _ = make_mask(device)
    assert segment_packbits(mask, indptr.to(torch.int64))[1].dtype == torch.int64


def test_arguments_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    mask, indptr, _ = make_mask(device)
    for name, call in {
        "bitorder": lambda: packbits(mask, "middle"),
        "x must": lambda: packbits(mask.reshape(1, -1)),
        "x must be": lambda: packbits(mask.float()),
        "indptr must be": lambda: segment_packbits(mask, indptr.float()),
        "indptr must end": lambda: segment_packbits(mask, indptr[:-1]),
        "indptr must rise": lambda: segment_packbits(mask, indptr.flip(0)),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
