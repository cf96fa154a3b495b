"""Drops of a pool's, a namespace's or a prefix's cache; removals from the index; and block ids that begin above 0."""

from __future__ import annotations

import pytest
from quire_allocator.core.drop import drop_cached
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants

from tests.allocator.core.pools import blocks_of, chunked, counts, d, full, granted_next, make_pool, state, states


def leave(pool: Pool, letters: str, namespace: str = "") -> None:
    """Computes these blocks of 4 tokens in a new sequence, and frees it."""
    sequence_id, count = pool.last_sequence_id + 1, 4 * len(letters)
    matched = pool.allocate(sequence_id, count, d(letters), namespace).matched_token_count
    pool.commit(sequence_id, count, d(letters)[matched * 8 :])
    pool.free(sequence_id)


def test_everything_cached_is_empty_afterwards_and_what_is_held_can_be_hit() -> None:
    pool = make_pool(12)
    leave(pool, "abc")
    leave(pool, "xy", "blue")
    pool.allocate(7, 5, d("a"))
    assert counts(pool) == (6, 4, 2)
    assert drop_cached(pool) == 4
    invariants.check(pool)
    assert counts(pool) == (10, 0, 2)
    assert pool.match("", d("abc")) == 4
    assert pool.match("blue", d("xy")) == 0
    assert (pool.blocks.dropped_count, pool.blocks.evicted_count) == (4, 0)


def test_a_namespace_is_dropped_alone() -> None:
    pool = make_pool(12)
    leave(pool, "abc")
    leave(pool, "xy", "blue")
    assert drop_cached(pool, "blue") == 2
    invariants.check(pool)
    assert pool.match("", d("abc")) == 12
    assert pool.match("blue", d("xy")) == 0
    assert drop_cached(pool, "blue") == drop_cached(pool, "never seen") == 0


def test_behind_a_place_of_a_prefix_everything_goes_whatever_it_continues_with() -> None:
    pool = make_pool(16)
    for letters in ("abcd", "abx", "aby", "q"):
        leave(pool, letters)
    assert drop_cached(pool, "", d("abcd"), 1) == 5
    invariants.check(pool)
    assert [pool.match("", d(letters)) for letters in ("abcd", "abx", "q")] == [4, 4, 4]
    assert drop_cached(pool, "", d("zz")) == 0
    assert drop_cached(pool, "", d("q"), 1) == 0, "all that it names is to be kept"


def test_what_a_sequence_holds_below_the_place_stays_with_its_path() -> None:
    pool = make_pool(16)
    leave(pool, "abcd")
    leave(pool, "abx")
    pool.allocate(9, 13, d("abc"))
    assert drop_cached(pool, "", d("a")) == 2
    invariants.check(pool)
    assert [pool.match("", d(letters)) for letters in ("abcd", "abx")] == [12, 8]


@pytest.mark.parametrize("groups", [(full(4), chunked(4, 8)), (full(4), state(8)), (state(4),)])
def test_windows_and_states_lose_what_stands_on_the_path(groups: tuple[object, ...]) -> None:
    pool = make_pool(40, *groups)
    leave(pool, "abcd")
    before = pool.match("", d("abcdz"))
    assert before > 0
    assert drop_cached(pool, "", d("abcd")) > 0
    invariants.check(pool)
    assert pool.match("", d("abcdz")) == 0


def test_ids_begin_where_the_specification_says() -> None:
    pool = make_pool(4, first_block_id=3)
    pool.allocate(1, 9)
    assert blocks_of(pool, 1) == [3, 4, 5]
    assert states(pool) == [2, 2, 2, 0]
    invariants.check(pool)
    pool.free(1)
    assert sorted(granted_next(pool)) == [3, 4, 5, 6]


def test_the_log_says_what_left_with_a_step_and_did_not_come_back() -> None:
    pool = make_pool(4)
    pool.log.step = 1
    leave(pool, "ab")
    pool.log.step = 2
    drop_cached(pool)
    leave(pool, "a")
    found, is_cut = pool.log.removed_in(2, 100, 100)
    assert [bytes(digests) for digests in found.values()] == [d("ab")[32:]]
    assert not is_cut
    assert pool.log.removed_in(1, 100, 100) == ({}, False)
    drop_cached(pool)
    found, is_cut = pool.log.removed_in(2, 1, 100)
    assert (sum(map(len, found.values())), is_cut) == (32, True)
