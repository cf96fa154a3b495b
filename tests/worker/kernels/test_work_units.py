"""The division of work on the device, compared with plain Python."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.shared.work_units import divide_work, divide_work_reference


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("unit_target", [1, 7, 500])
@pytest.mark.parametrize(
    "lengths", [[0], [1], [4096] * 3, [100_000, *[20] * 31], [0, 0, 5, 0], [2**30 - 64] * 5], ids=len
)
def test_units_are_those_of_the_reference(lengths: list[int], unit_target: int, device: torch.device) -> None:
    first, last = int32([0] * len(lengths), device), int32(lengths, device)
    how = {"unit_target": unit_target, "size_min": 32, "alignment": 32, "units_min": 1}
    work = divide_work(first, last, **how)
    rows, indptr = divide_work_reference(first, last, **how)
    assert work.indptr.tolist() == indptr
    assert [tuple(row) for row in work.units[: len(rows)].tolist()] == rows
    assert len(rows) <= work.capacity == unit_target + len(lengths)


def test_more_requests_than_a_block_of_the_kernel(device: torch.device) -> None:
    last = int32([(7 * i) % 50 for i in range(260)], device)
    how = {"unit_target": 20, "size_min": 8, "alignment": 8, "units_min": 0}
    work = divide_work(torch.zeros_like(last), last, **how)
    rows, indptr = divide_work_reference(torch.zeros_like(last), last, **how)
    assert work.indptr.tolist() == indptr
    assert [tuple(row) for row in work.units[: len(rows)].tolist()] == rows


def test_units_of_fixed_size_start_at_the_first_item(device: torch.device) -> None:
    first, last = int32([3, 0, 7], device), int32([20, 0, 8], device)
    work = divide_work(first, last, unit_target=None, size_min=8, capacity=9)
    assert work.indptr.tolist() == [0, 3, 3, 4]
    assert work.units[:4].tolist() == [[0, 3, 11, 3], [0, 11, 19, 3], [0, 19, 20, 3], [2, 7, 8, 1]]


def test_a_long_request_is_cut_finely_although_others_are_short(device: torch.device) -> None:
    last = int32([32_768, *[17] * 31], device)
    work = divide_work(torch.zeros_like(last), last, unit_target=66, size_min=64, alignment=64, units_min=1)
    counts = work.indptr.diff().tolist()
    assert 55 <= counts[0] <= 66
    assert counts[1:] == [1] * 31


def test_equal_requests_leave_no_sliver(device: torch.device) -> None:
    last = int32([8192] * 32, device)
    work = divide_work(torch.zeros_like(last), last, unit_target=66, size_min=64, alignment=64, units_min=1)
    assert work.indptr.tolist() == list(range(0, 66, 2))
    assert (work.units[:64, 2] - work.units[:64, 1] == 4096).all()


@pytest.mark.parametrize(("batch", "count"), [(1, 5), (7, 4), (16, 2), (17, 1), (32, 1), (34, 1)])
def test_equal_requests_are_no_more_units_than_are_aimed_at(batch: int, count: int, device: torch.device) -> None:
    last = int32([580] * batch, device)
    work = divide_work(torch.zeros_like(last), last, unit_target=33, size_min=64, alignment=64, units_min=1)
    assert set(work.indptr.diff().tolist()) == {count}


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    one, two = int32([1], device), int32([1, 2], device)
    for message, first, last, changes in (
        ("^last must have 1", one, two, {}),
        ("^first must be int32", one.long(), one, {}),
        ("at least 1", one, one, {"size_min": 0}),
        ("at least 1", one, one, {"unit_target": 0}),
        ("^capacity is required", one, one, {"unit_target": None}),
        ("^out must have", one, one, {"out": divide_work(two, two, unit_target=1, size_min=1)}),
    ):
        with pytest.raises(ValueError, match=message):
            divide_work(first, last, **{"unit_target": 1, "size_min": 1, **changes})
