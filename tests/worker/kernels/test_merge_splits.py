"""Merging of a request's units, compared with float64."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.ops import merge_splits as merge_splits_module
from quire_kernels.ops.merge_splits import merge_splits, merge_splits_reference
from quire_kernels.shared.work_units import WorkUnits

from .attention_scene import assert_close, spread


def work_of(indptr: list[int], device: torch.device) -> WorkUnits:
    units = torch.zeros(indptr[-1], 4, dtype=torch.int32, device=device)
    return WorkUnits(units, torch.tensor(indptr, dtype=torch.int32, device=device))


@pytest.mark.parametrize("v_head_dim", [64, 80, 128])
@pytest.mark.parametrize("count", [2, 16, 31, 32, 33, 70])
def test_any_number_of_units_is_merged(count: int, v_head_dim: int, device: torch.device) -> None:
    indptr = [0, count, count + 3]
    partial = torch.randn(count + 3, 2, v_head_dim, device=device)
    lse = torch.randn(count + 3, 2, device=device) * 20
    lse[::2, 0] = -torch.inf  # these units saw no key
    out, merged = torch.zeros(2, 2, v_head_dim, device=device), torch.zeros(2, 2, device=device)
    merge_splits(partial, lse, work_of(indptr, device), out, merged)
    assert_close((out, merged), merge_splits_reference(partial, lse, indptr))


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_a_program_merges_several_heads_of_a_large_batch(
    heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_splits_module, "PROGRAMS_MAX", 6)
    indptr = [0, 2, 6, 9, 12]
    partial, lse = torch.randn(12, heads, 64, device=device), torch.randn(12, heads, device=device)
    out, merged = torch.zeros(4, heads, 64, device=device), torch.zeros(4, heads, device=device)
    merge_splits(partial, lse, work_of(indptr, device), out, merged)
    assert_close((out, merged), merge_splits_reference(partial, lse, indptr))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["request", "head", "dim"])
def test_strides_past_two_to_the_thirty_first_elements(dim: int, device: torch.device) -> None:
    partial, lse = torch.randn(6, 3, 64, device=device), torch.randn(6, 3, device=device)
    out, merged = spread(torch.zeros(2, 3, 64, dtype=torch.float16, device=device), dim), torch.zeros(2, 3).to(device)
    merge_splits(partial, lse, work_of([0, 2, 6], device), out, merged)
    assert_close((out, merged), merge_splits_reference(partial, lse, [0, 2, 6]))


def test_units_that_saw_nothing_merge_to_nothing(device: torch.device) -> None:
    partial, lse = torch.zeros(3, 1, 64, device=device), torch.full((3, 1), -torch.inf, device=device)
    out, merged = torch.ones(1, 1, 64, device=device), torch.ones(1, 1, device=device)
    merge_splits(partial, lse, work_of([0, 3], device), out, merged)
    assert out.eq(0).all()
    assert merged.eq(-torch.inf).all()


def test_a_request_of_one_unit_is_left_alone(device: torch.device) -> None:
    out, merged = torch.ones(2, 1, 64, device=device), torch.ones(2, 1, device=device)
    nan = torch.full((2, 1, 64), torch.nan, device=device)
    merge_splits(nan, nan[..., 0].contiguous(), work_of([0, 1, 2], device), out, merged)
    assert out.eq(1).all()
    assert merged.eq(1).all()


def test_what_does_not_fit_is_refused_by_name(device: torch.device) -> None:
    partial, lse = torch.zeros(3, 2, 64, device=device), torch.zeros(3, 2, device=device)
    out, work = torch.zeros(1, 2, 64, device=device), work_of([0, 3], device)
    for message, arguments in (
        (r"^out must have 1 requests", (partial, lse, work, out.expand(2, 2, 64), None)),
        (r"^partial_out must be", (partial.half(), lse, work, out, None)),
        (r"^partial_lse must be", (partial, lse[:2], work, out, None)),
        (r"^lse must be", (partial, lse, work, out, lse)),
    ):
        with pytest.raises(ValueError, match=message):
            merge_splits(*arguments)
