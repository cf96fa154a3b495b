"""Append-only pools: tables change only at their ends. The naive twin checks the same under random events."""

from __future__ import annotations

import pytest
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GrowResult, Result, Swap

from tests.allocator.core.pools import blocks_of, commit, computed, counts, d, grow, make_pool, sliding, state


def test_who_computed_a_block_beside_another_one_keeps_its_own() -> None:
    pool = make_pool(append_only=True)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 9, d("ab"))
    own = blocks_of(pool, 2)
    commit(pool, 1, "ab", 8)
    twins = blocks_of(pool, 1)[:2]
    assert commit(pool, 2, "ab", 8).swaps == [Swap(0, 0, twins[0]), Swap(0, 1, twins[1])]
    assert blocks_of(pool, 2) == own


def test_what_follows_a_kept_block_can_be_hit() -> None:
    pool = make_pool(append_only=True)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 5, d("a"))
    commit(pool, 1, "a", 4)
    grow(pool, 2, 8)
    commit(pool, 2, "ab", 8)
    assert pool.match("", d("ab")) == 8
    pool.free(2)
    assert pool.match("", d("ab")) == 8
    assert pool.allocate(3, 9, d("ab")).blocks[0][0] == blocks_of(pool, 1)[0], "the published one is shared"


def test_a_block_that_nobody_holds_gives_its_place_up_at_once() -> None:
    pool = make_pool(append_only=True)
    computed(pool, 1, "ab")
    pool.free(1)
    pool.allocate(2, 8)  # a prompt without digests, like one that must not read the cache
    own = blocks_of(pool, 2)
    assert commit(pool, 2, "ab", 8).swaps == ()
    assert blocks_of(pool, 2) == own
    assert counts(pool) == (6, 0, 2)
    assert list(pool.allocate(3, 9, d("ab")).blocks[0])[:2] == own


def test_a_sequence_alone_in_the_pool_can_have_all_of_it() -> None:
    pool = make_pool(8, append_only=True)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 16, d("abcd"))
    commit(pool, 1, "abcd", 16)
    commit(pool, 2, "abcd", 16)
    own = blocks_of(pool, 2)
    pool.free(1)
    assert counts(pool) == (0, 0, 8), "twins are held"
    grown = grow(pool, 2, 32)
    invariants.check(pool)
    assert grown.result is Result.OK
    assert blocks_of(pool, 2)[:4] == own
    assert counts(pool) == (0, 0, 8)


def test_a_twin_that_another_sequence_needs_stays() -> None:
    pool = make_pool(9, append_only=True)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 16, d("abcd"))
    commit(pool, 1, "abcd", 16)
    commit(pool, 2, "abcd", 16)
    assert grow(pool, 2, 24).result is Result.NO_SPACE
    pool.free(1)
    assert pool.allocate(3, 13, d("abc")).matched_token_count == 12
    assert grow(pool, 2, 20).result is Result.OK, "of the twins only the last one is not shared"
    assert grow(pool, 2, 24) == GrowResult(
        Result.NO_SPACE, shortfall=1, victim=pool.admission.cheapest_victim(0, except_id=2)
    )
    invariants.check(pool)


def test_forks_part_at_the_edges_of_blocks() -> None:
    pool = make_pool(append_only=True)
    computed(pool, 1, "a", tokens=2)
    assert pool.fork(1, 2) is Result.UNCOMMITTED
    commit(pool, 1, "a", 6)
    grow(pool, 1, 8)
    commit(pool, 1, "ab", 8)
    assert pool.fork(1, 2) is Result.OK
    assert grow(pool, 2, 9).copies == ()


def test_a_fork_has_the_published_block_where_its_parent_keeps_one() -> None:
    pool = make_pool(append_only=True)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 4, d("a"))
    commit(pool, 1, "a", 4)
    commit(pool, 2, "a", 4)
    assert pool.fork(2, 3) is Result.OK
    assert blocks_of(pool, 3) == blocks_of(pool, 1) != blocks_of(pool, 2)
    pool.free(2)
    invariants.check(pool)


def test_states_are_none_of_an_append_only_pool() -> None:
    with pytest.raises(AssertionError, match="cannot have groups of states"):
        make_pool(8, state(4), append_only=True)


def test_both_blocks_of_a_position_fall_out_of_the_window() -> None:
    pool = make_pool(9, sliding(4, 8), append_only=True)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 16, d("abcd"))
    for sequence_id in (1, 2):
        commit(pool, sequence_id, "ab", 8)
    assert blocks_of(pool, 1)[:2] != blocks_of(pool, 2)[:2]
    assert counts(pool) == (1, 0, 8)
    pool.free(1)
    assert counts(pool) == (3, 0, 6), "two positions are there twice"
    commit(pool, 2, "abcd", 16)
    assert counts(pool) == (5, 2, 2), "of those twins are cached"
    assert pool.match("", d("ab")) == 8
    invariants.check(pool)


def test_a_sequence_with_windows_alone_in_the_pool_can_have_all_of_it() -> None:
    pool = make_pool(8, sliding(4, 64), append_only=True)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 16, d("abcd"))
    for sequence_id in (1, 2):
        commit(pool, sequence_id, "abcd", 16)
    own = blocks_of(pool, 2)
    pool.free(1)
    assert grow(pool, 2, 32).result is Result.OK
    assert blocks_of(pool, 2)[:4] == own
    assert counts(pool) == (0, 0, 8)
    invariants.check(pool)
