"""Merged states, compared with float64 and with attention over all keys at once."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from quire_kernels.ops import merge_states as real
from quire_kernels.ops.merge_states import merge_state, merge_state_in_place, merge_states, merge_states_reference
from quire_kernels.shared.reference import MERGE_TOLERANCE

from .attention_scene import spread

DTYPES = pytest.mark.parametrize("dtype", MERGE_TOLERANCE, ids=str)


def make_states(
    device: torch.device, dtype: torch.dtype = torch.float32, *, states: int = 3, heads: int = 5, dim: int = 80
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes states; some are empty, and have NaN in v.

    Row 0 is empty in all states, row 1 in all but the last, and row 2 in all but the first.
    """
    v = torch.randn(4, states, heads, dim, device=device).to(dtype)
    s = 5 * torch.randn(4, states, heads, device=device)
    s[0], s[1, :-1], s[2, 1:] = -math.inf, -math.inf, -math.inf
    v[0], v[1, :-1], v[2, 1:] = math.nan, math.nan, math.nan
    return v, s


def close(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Returns whether v and s agree, including their dtypes."""
    tolerance = MERGE_TOLERANCE[expected[0].dtype]
    if got[0].dtype != expected[0].dtype or got[0].shape != expected[0].shape:
        return False
    return torch.allclose(got[0].float(), expected[0].float(), atol=tolerance, rtol=tolerance) and torch.allclose(
        got[1], expected[1], atol=MERGE_TOLERANCE[torch.float32]
    )


def states_match(module: ModuleType, device: torch.device) -> bool:
    """Returns whether merging several states is right. The module may be the real or a faulty one."""
    v, s = make_states(device)
    return close(module.merge_states(v, s), merge_states_reference(v, s))


def pairs_match(module: ModuleType, device: torch.device) -> bool:
    """Returns whether merging two states is right. The module may be the real or a faulty one."""
    v, s = make_states(device, states=2)
    return close(module.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), merge_states_reference(v, s))


def in_place_matches(module: ModuleType, device: torch.device) -> bool:
    """Returns whether merging in place is right, with a mask and without it, by the real module or a faulty one."""
    v, s = make_states(device, states=2, heads=9)
    expected = merge_states_reference(v, s)
    v_all, s_all = v[:, 0].clone(), s[:, 0].clone()
    module.merge_state_in_place(v_all, s_all, v[:, 1], s[:, 1])
    v_some, s_some = v[:, 0].clone(), s[:, 0].clone()
    mask = torch.tensor([False, True, False, True], device=device)
    module.merge_state_in_place(v_some, s_some, v[:, 1], s[:, 1], mask)
    return (
        close((v_all, s_all), expected)
        and close((v_some[1::2], s_some[1::2]), (expected[0][1::2], expected[1][1::2]))
        and torch.equal(v_some[::2].nan_to_num(7.0), v[::2, 0].nan_to_num(7.0))
        and torch.equal(s_some[::2], s[::2, 0])
    )


@DTYPES
@pytest.mark.parametrize(("states", "heads", "dim"), [(1, 1, 64), (3, 5, 80), (7, 33, 96), (4, 8, 128), (2, 3, 256)])
def test_any_number_of_states_heads_and_dims(
    states: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    v, s = make_states(device, dtype, states=states, heads=heads, dim=dim)
    assert close(merge_states(v, s), merge_states_reference(v, s))


@DTYPES
def test_two_states(dtype: torch.dtype, device: torch.device) -> None:
    v, s = make_states(device, dtype, states=2, heads=20)
    assert close(merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), merge_states_reference(v, s))


def test_rows_without_any_key_are_zero_with_an_lse_of_minus_infinity(device: torch.device) -> None:
    v, s = make_states(device)
    for merged, lse in (merge_states(v, s), merge_state(v[:, 0], s[:, 0], v[:, 0], s[:, 0])):
        assert merged[0].eq(0).all()
        assert lse[0].isneginf().all()


def test_merging_parts_is_attention_over_the_whole(device: torch.device) -> None:
    scores = torch.randn(6, 2, 30, device=device) * 4  # [rows, heads, keys], as exponents of e
    values = torch.randn(30, 2, 64, device=device)
    whole = torch.einsum("rhk,khd->rhd", scores.softmax(-1), values)
    parts = [scores[..., :7], scores[..., 7:8], scores[..., 8:]]
    pairs = zip(parts, values.split((7, 1, 22)), strict=True)
    v = torch.stack([torch.einsum("rhk,khd->rhd", part.softmax(-1), its) for part, its in pairs], 1)
    s = torch.stack([part.logsumexp(-1) / math.log(2) for part in parts], 1)
    merged, lse = merge_states(v, s)
    assert torch.allclose(merged, whole, atol=MERGE_TOLERANCE[torch.float32])
    assert torch.allclose(lse, scores.logsumexp(-1) / math.log(2), atol=MERGE_TOLERANCE[torch.float32])


def test_lse_of_any_size_neither_overflow_nor_vanish(device: torch.device) -> None:
    v, _ = make_states(device)
    v = v.nan_to_num(1.0)
    for size in (-3e4, -200.0, 200.0, 3e4):
        s = torch.full(v.shape[:-1], size, device=device)
        merged, lse = merge_states(v, s)
        assert torch.allclose(merged, v.mean(1), atol=MERGE_TOLERANCE[torch.float32])
        assert torch.allclose(lse, torch.tensor(size + math.log2(3), device=device))


def test_merging_in_place_changes_only_the_rows_of_the_mask(device: torch.device) -> None:
    assert in_place_matches(real, device)


def test_states_may_have_any_strides(device: torch.device) -> None:
    v, s = make_states(device)
    wide = torch.zeros(8, 3, 5, 160, device=device)[::2, ..., ::2]
    wide.copy_(v)
    strided = s.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert close(merge_states(wide, strided), merge_states_reference(v, s))
    pair = (wide[:, 1], strided[:, 1], wide[:, 2], strided[:, 2])
    assert close(merge_state(*pair), merge_states_reference(v[:, 1:], s[:, 1:]))


@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["row", "state", "head", "dim"])
def test_strides_past_two_to_the_thirty_first_elements(dim: int, device: torch.device) -> None:
    v, s = make_states(device, torch.float16)
    assert close(merge_states(spread(v, dim), s), merge_states_reference(v, s))


def test_no_rows_and_no_states_are_fine(device: torch.device) -> None:
    v, s = make_states(device)
    assert merge_states(v[:0], s[:0])[0].shape == (0, 5, 80)
    merged, lse = merge_states(v[:, :0], s[:, :0])
    assert merged.eq(0).all()
    assert lse.isneginf().all()


def test_tensors_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    v, s = make_states(device)
    one, lse = v[:, 0].contiguous(), s[:, 0].contiguous()
    for name, call in {
        "v_a": lambda: merge_state(v, lse, one, lse),
        "s_a": lambda: merge_state(one, lse.double(), one, lse),
        "v_b": lambda: merge_state(one, lse, one[:1], lse[:1]),
        "s_b": lambda: merge_state(one, lse, one, lse[:1]),
        "^v must be one": lambda: merge_states(v.double(), s),
        "^s must": lambda: merge_states(v, s[:, :1]),
        "^v must be contiguous": lambda: merge_state_in_place(v[:, 0], lse, one, lse),
        "mask": lambda: merge_state_in_place(one, lse, one, lse, lse[:, 0]),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()


def test_the_real_module_passes_what_faulty_ones_must_fail(device: torch.device) -> None:
    assert states_match(real, device)
    assert pairs_match(real, device)
