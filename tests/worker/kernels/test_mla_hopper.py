"""Latent decode for Hopper: the rows that it copies, the conditions of its use, and on a Hopper chip its results."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from quire_kernels.ops import mla_hopper, mla_paged
from quire_kernels.ops.mla_hopper import HEADS, KEYS, fits_hopper
from quire_kernels.shared import mla_work
from quire_kernels.shared.latent_tiles import page_of_box
from quire_kernels.shared.launch import is_hopper
from quire_kernels.shared.mla_work import divide_mla

from .test_mla_paged import latents_match


def copied_rows(page_ids: list[int], start: int, stop: int, page_size: int) -> list[list[int]]:
    """Returns the cache rows in the buffer of each tile of a unit, as `copy_items` computes them."""
    rows, box_rows = [], min(page_size, KEYS)
    for tile in range(-(-(stop - start) // KEYS)):
        buffer: list[int] = []
        for box in range(KEYS // box_rows):
            page, slot = page_of_box.fn(start + tile * KEYS, box, len(page_ids) - 1, page_size, box_rows)
            first = page_ids[page] * page_size + slot
            buffer += range(first, first + box_rows)
        rows.append(buffer)
    return rows


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129, 200, 1000])
def test_a_tile_holds_the_keys_of_its_pages_in_order(page_size: int, length: int) -> None:
    page_ids = random.Random(length).sample(range(1000), -(-length // page_size))
    for start in range(0, length, KEYS):  # a unit may start at any tile
        stop = min(length, start + 3 * KEYS)
        rows = [row for tile in copied_rows(page_ids, start, stop, page_size) for row in tile]
        expected = [page_ids[key // page_size] * page_size + key % page_size for key in range(start, stop)]
        assert rows[: stop - start] == expected
        assert {row // page_size for row in rows} <= set(page_ids)


def parts(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    pool = torch.zeros(3, 16, 576, dtype=torch.bfloat16)
    query = torch.zeros(2, 128, 576, dtype=torch.bfloat16)
    given = {"q_nope": query[..., :512], "q_pe": query[..., 512:], "ckv": pool[..., :512], "kpe": pool[..., 512:]}
    return given | changed


def fits(heads: int = 128, split_keys: bool = True, **changed: torch.Tensor) -> bool:
    """Returns whether the kernel accepts a batch of two. The test must pretend that there is a Hopper chip."""
    qo_indptr = torch.arange(3, dtype=torch.int32)
    lengths = torch.tensor([40, 3], dtype=torch.int32)
    sizes = {"ckv_dim": 512, "element_bytes": 2, "page_size": 16}
    division = divide_mla(qo_indptr, lengths, token_count=2, split_keys=split_keys, heads=heads, **sizes)
    return fits_hopper(parts(**changed), division)


def test_it_is_chosen_for_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fits()  # the tensors are not on a Hopper chip
    for module in (mla_hopper, mla_work):
        monkeypatch.setattr(module, "is_hopper", lambda _: True)
    assert fits()
    assert fits(heads=20)
    assert not fits(heads=16)  # with 16 heads, three quarters of the rows would be zeros
    assert not fits(split_keys=False)
    wide = torch.zeros(3, 16, 2, 576, dtype=torch.bfloat16)
    assert fits(ckv=wide[:, :, 0, :512])  # a larger stride between rows is allowed
    assert not fits(ckv=torch.zeros(3, 16, 256, dtype=torch.bfloat16))
    assert not fits(ckv=wide[:2].transpose(0, 1)[:, :, 0, :512])  # these pages are not adjacent in memory
    assert not fits(ckv=torch.zeros(3 * 16 * 576 + 1, dtype=torch.bfloat16)[1:].view(3, 16, 576)[..., :512])
    assert not fits(ckv=torch.zeros(3, 8, 512, dtype=torch.bfloat16))
    assert not fits(ckv=torch.zeros(3, 48, 512, dtype=torch.bfloat16))
    assert fits(q_nope=torch.zeros(128, 2, 512, dtype=torch.bfloat16).transpose(0, 1))
    assert not fits(q_nope=torch.zeros(2, 128, 516, dtype=torch.bfloat16)[..., :512])  # these rows are not aligned
    assert not fits(q_nope=torch.zeros(2, 128, 512), ckv=torch.zeros(3, 16, 512))
    monkeypatch.setenv(mla_hopper.SWITCH, "0")
    assert not fits()


def test_units_are_whole_tiles_and_one_for_each_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_work, "is_hopper", lambda _: True)
    monkeypatch.setattr(mla_work, "multiprocessor_count", lambda _: 132)
    lengths = torch.full((32,), 8192, dtype=torch.int32)
    division = divide_mla(
        torch.arange(33, dtype=torch.int32), lengths, token_count=32, split_keys=True, heads=128, ckv_dim=512,
        element_bytes=2, page_size=16,
    )  # fmt: skip
    assert division.work.capacity == 132 * HEADS // 128 + 32
    units = division.work.units[: int(division.work.indptr[-1])]
    assert (units[:, 1] % KEYS == 0).all()
    # A unit has at least ceil(32 * 8192 / 66) = 3972 keys, so each request's 8192 keys are two units.
    assert (units[:, 2] - units[:, 1] == 4096).all()


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Returns a device of compute capability 9, where launching the Triton kernel fails the test."""
    if not is_hopper(device):
        pytest.skip("needs a chip of compute capability 9")
    monkeypatch.setattr(mla_paged, "mla_paged_kernel", None)
    return device


SHAPES: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([64], {}),
    ([1], {}),
    ([63, 64, 65, 0, 128, 129], {}),
    ([63, 64, 65, 0, 128, 129], {"page_size": 64}),
    ([0, 0], {}),
    ([8000, 3, 700], {}),
    ([8000, 3, 700], {"page_size": 64}),
    ([300, 17], {"page_size": 32}),
    ([300, 17], {"page_size": 128}),
    ([300, 17], {"heads": 64}),
    ([300, 17], {"heads": 17}),
    ([300, 17], {"heads": 80, "page_size": 64}),
    ([1000, 1], {"dtype": torch.float16}),
    ([300, 0, 17], {"arrange": torch.Tensor.contiguous}),
    ([length * 7 % 400 for length in range(200)], {}),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "shape"), SHAPES, ids=str)
def test_it_gives_the_softmax(lengths: list[int], shape: dict[str, Any], hopper: torch.device) -> None:
    shape = {"heads": 128, "dtype": torch.bfloat16, **shape}
    latents_match(mla_paged, hopper, lengths, ckv_dim=512, kpe_dim=64, **shape)
