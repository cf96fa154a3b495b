"""Requests and positions of new tokens, compared with a Python loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from quire_kernels.ops.token_positions import get_batch_indices_positions, get_seq_lens


def int32(*values: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("seed", range(20))
def test_they_are_those_of_a_loop(seed: int, device: torch.device) -> None:
    choose = random.Random(seed)
    new = [choose.choice((0, 0, 1, 3, 7)) for _ in range(choose.randrange(6))]
    lengths = [count + choose.randrange(5) for count in new]
    padding = choose.randrange(4)
    expected = [(request, lengths[request] - count + i) for request, count in enumerate(new) for i in range(count)]
    expected += [(-1, 0)] * padding  # The append skips these tokens.
    indptr = int32(0, *new, device=device).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=choose.choice((torch.int32, torch.int64)))
    requests, positions = get_batch_indices_positions(indptr, seq_lens, len(expected))
    assert list(zip(requests.tolist(), positions.tolist(), strict=True)) == expected
    given = int32(*[9] * len(expected), device=device), int32(*[9] * len(expected), device=device)
    result = get_batch_indices_positions(indptr, seq_lens, len(expected), *given)
    assert result[0] is given[0]
    assert result[1] is given[1]
    assert torch.equal(given[0], requests)
    assert torch.equal(given[1], positions)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("^append_indptr must be int32", {"append_indptr": torch.tensor([0, 2, 5])}),
        ("^append_indptr must have batch", {"append_indptr": int32()}),
        (r"^seq_lens must be int32 or int64 \[2\]", {"seq_lens": int32(5)}),
        (r"^seq_lens must be int32 or int64 \[2\]", {"seq_lens": torch.ones(2)}),
        ("^nnz must be at least 0", {"nnz": -1}),
        ("^batch_indices must be torch.int32", {"batch_indices": int32(0)}),
        ("^positions must be torch.int32", {"positions": torch.zeros(5)}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(message: str, changes: dict[str, Any]) -> None:
    arguments = {"append_indptr": int32(0, 2, 5), "seq_lens": int32(5, 5), "nnz": 5}
    with pytest.raises(ValueError, match=message):
        get_batch_indices_positions(**{**arguments, **changes})


def test_lengths_come_from_a_page_table(device: torch.device) -> None:
    indptr, last = int32(0, 3, 3, 4, device=device), int32(13, 7, 16, device=device)
    assert get_seq_lens(indptr, last, 16).tolist() == [45, 0, 16]
    for message, arguments in (
        ("^kv_last_page_len must have 3", (indptr, last[:2], 16)),
        ("^kv_indptr must be int32", (indptr.long(), last, 16)),
        ("^page_size", (indptr, last, 0)),
    ):
        with pytest.raises(ValueError, match=message):
            get_seq_lens(*arguments)
