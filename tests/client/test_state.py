"""A step's digest covers only part of large tables; over many steps the digests cover all of them."""

from __future__ import annotations

from array import array

import pytest
from quire.protocol import state_digest as state_digest_module
from quire.protocol.state_digest import STATE_DIGEST_STEPS, SequenceRow, in_turn, state_digest


def rows(ids: list[int], entries: int = 4, wrong: int = 0) -> list[SequenceRow]:
    return [(i, 16, 16 - (i == wrong), "", [array("I", range(entries))]) for i in ids]


def test_every_sequence_is_in_the_digest_of_a_small_pool_wherever_it_begins() -> None:
    ids = [3, 5, 9, 12]
    for step in range(0, 20 * STATE_DIGEST_STEPS, STATE_DIGEST_STEPS):
        turn = list(in_turn(ids, step))
        assert sorted(turn) == ids
        right = state_digest(rows(turn), state_digest_module.STATE_DIGEST_ENTRIES_MAX)
        assert all(
            state_digest(rows(turn, wrong=i), state_digest_module.STATE_DIGEST_ENTRIES_MAX) != right for i in ids
        )


def test_a_pool_without_sequences_has_a_digest() -> None:
    assert in_turn([], 64) == ()
    assert state_digest([], 10) == state_digest([])


def test_a_digest_ends_with_the_sequence_that_fills_it() -> None:
    first_two = rows([1, 2], entries=5)
    entries = 2 * (5 + state_digest_module.SEQUENCE_ENTRIES)
    assert state_digest(rows([1, 2, 3], entries=5), entries) == state_digest(first_two)
    assert state_digest(rows([1, 2, 3], entries=5), entries + 1) != state_digest(first_two)


@pytest.mark.parametrize("count", [10, 97, 1000, 4096])
@pytest.mark.parametrize("covered", [1, 3, 10])
def test_a_wrong_sequence_of_a_large_pool_is_found_within_four_times_as_many_digests_as_cover_it_once(
    count: int, covered: int
) -> None:
    ids, missing = list(range(1, count + 1)), set(range(1, count + 1))
    digests = 0
    while missing:
        digests += 1
        missing -= set(in_turn(ids, digests * STATE_DIGEST_STEPS)[:covered])
        assert digests <= 4 * -(-count // covered)
