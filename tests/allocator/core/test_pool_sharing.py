"""Forks, half-filled blocks and copies, each rule as one worked-out example: 8 blocks of 4 tokens, one group."""

from __future__ import annotations

import pytest
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.readers.usage import longest_prefixes, table_entry_count
from quire_allocator.core.spec import Copy, GrowResult, Result, Swap

from tests.allocator.core.pools import (
    blocks_of,
    commit,
    computed,
    counts,
    d,
    everything,
    granted_next,
    grow,
    make_pool,
    sliding,
    states,
    tables,
)


def grown(pool: Pool, sequence_id: int, token_count: int) -> tuple[list[int], list[Copy]]:
    """Returns the grants and copies of a grow."""
    answer = grow(pool, sequence_id, token_count)
    assert answer.result is Result.OK
    invariants.check(pool)
    return (list(answer.blocks[0]) if answer.blocks else [], list(answer.copies))


def test_a_fork_shares_the_half_filled_block_too() -> None:
    pool = make_pool()
    computed(pool, 1, "a", tokens=2)
    assert pool.fork(1, 2) is Result.OK
    assert blocks_of(pool, 2) == [0, 1]
    assert states(pool)[:3] == [3, 3, 0]
    assert table_entry_count(pool) == 4


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_whichever_side_of_a_fork_writes_first_gets_the_copy_and_the_other_keeps_the_block(
    first: int, second: int
) -> None:
    pool = make_pool()
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    assert grown(pool, first, 7) == ([2], [Copy(1, 2)])
    assert blocks_of(pool, first) == [0, 2]
    assert grown(pool, second, 7) == ([], [])
    assert blocks_of(pool, second) == [0, 1]
    assert pool.copy_count == 1


def test_of_three_sharers_the_first_two_copy() -> None:
    pool = make_pool()
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    pool.fork(2, 3)
    assert [grown(pool, sequence_id, 7)[1] for sequence_id in (1, 2, 3)] == [[Copy(1, 2)], [Copy(1, 3)], []]


def test_a_fork_at_a_block_edge_needs_no_copy() -> None:
    pool = make_pool()
    computed(pool, 1, "a")
    pool.fork(1, 2)
    assert [grown(pool, 1, 5), grown(pool, 2, 5)] == [([1], []), ([2], [])]


def test_a_fork_shares_what_is_committed_and_not_what_is_merely_granted() -> None:
    pool = make_pool()
    pool.allocate(1, 14, d("a"))
    commit(pool, 1, "a", 6)
    pool.fork(1, 2)
    assert blocks_of(pool, 2) == [0, 1]
    assert pool.sequences[2].token_count == 6
    # The parent was granted the rest of block 1 before the fork, so it continues in block 1, and the child copies block
    # 1.
    assert grown(pool, 1, 16) == ([], [])
    assert grown(pool, 2, 7) == ([4], [Copy(1, 4)])


def test_a_fork_of_a_sequence_without_computed_tokens_is_empty_and_can_grow() -> None:
    pool = make_pool()
    pool.allocate(1, 6)
    assert pool.fork(1, 2) is Result.OK
    assert blocks_of(pool, 2) == []
    assert grown(pool, 2, 5) == ([2, 3], [])


def test_freeing_one_side_of_a_fork_leaves_the_other_whole() -> None:
    pool = make_pool()
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    pool.free(1)
    assert blocks_of(pool, 2) == [0, 1]
    assert states(pool)[:3] == [2, 2, 0]
    assert grown(pool, 2, 7) == ([], [])  # the sequence is the only holder left, so it needs no copy


def half_borrowed() -> Pool:
    """Returns a pool with sequence 2 that has 6 tokens in blocks 0 and 1. Sequence 1 then filled and published
    block 1."""
    pool = make_pool()
    pool.allocate(1, 8)
    commit(pool, 1, "a", 6)
    pool.fork(1, 2)
    commit(pool, 1, "ab", 8)
    return pool


def test_a_block_that_the_parent_filled_and_published_is_copied_even_by_its_last_holder() -> None:
    pool = half_borrowed()
    pool.free(1)
    assert grown(pool, 2, 7) == ([2], [Copy(1, 2)])
    assert states(pool)[:3] == [2, 1, 2]
    assert pool.match("", d("ab")) == 8


def test_a_published_block_that_a_fork_still_reads_is_not_evicted() -> None:
    pool = half_borrowed()
    pool.free(1)
    assert counts(pool) == (6, 0, 2)
    pool.allocate(3, 24)  # this sequence takes all free blocks
    assert pool.allocate(4, 1).result is Result.NO_SPACE
    assert pool.match("", d("ab")) == 8
    assert blocks_of(pool, 2) == [0, 1]


def test_what_a_borrower_leaves_is_cached_and_its_own_prefix_after_it() -> None:
    pool = half_borrowed()
    pool.free(1)
    pool.free(2)
    assert counts(pool) == (6, 2, 0)
    assert granted_next(pool)[-2:] == [1, 0]
    invariants.check(pool)


def test_a_fork_of_a_borrower_borrows_too_and_the_last_of_them_leaves_the_block_cached() -> None:
    pool = half_borrowed()
    pool.fork(2, 3)
    pool.free(1)
    assert grown(pool, 3, 7) == ([2], [Copy(1, 2)])
    assert states(pool)[1] == 2
    assert grown(pool, 2, 7) == ([3], [Copy(1, 3)])
    assert states(pool)[1] == 1


def test_a_block_that_somebody_borrows_can_be_hit_and_extended_by_others() -> None:
    pool = half_borrowed()
    pool.free(1)
    computed(pool, 3, "abc")  # this prompt hits a and b
    assert blocks_of(pool, 3) == [0, 1, 2]
    assert grown(pool, 2, 7) == ([3], [Copy(1, 3)])
    commit(pool, 2, "ax", 7)
    pool.free(3)
    assert pool.match("", d("abc")) == 12


def test_the_borrowers_own_text_is_published_beside_the_one_it_left() -> None:
    pool = half_borrowed()
    grown(pool, 2, 9)
    commit(pool, 2, "ax", 8)
    assert blocks_of(pool, 2) == [0, 2, 3]
    assert [pool.match("", d(text)) for text in ("ab", "ax")] == [8, 8]


def test_a_shared_half_filled_block_whose_text_is_published_already_stays_with_the_fork() -> None:
    pool = make_pool()
    computed(pool, 1, "ab")  # has blocks 0 and 1
    pool.allocate(2, 8)  # has blocks 2 and 3
    commit(pool, 2, "a", 6)
    assert blocks_of(pool, 2) == [0, 3]
    pool.fork(2, 3)
    assert commit(pool, 2, "ab", 8).swaps == [Swap(0, 1, 1)]
    assert (blocks_of(pool, 2), blocks_of(pool, 3)) == ([0, 1], [0, 3])
    assert grown(pool, 3, 7) == ([], [])  # sequence 3 alone holds block 3 now, so it needs no copy


def test_of_two_forks_that_grow_alike_the_second_takes_over_what_the_first_published() -> None:
    pool = make_pool(8, group_count=2)
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    assert tables(pool, 2) == [[0, 2], [1, 3]]
    assert grow(pool, 1, 8).copies == [Copy(2, 4), Copy(3, 5)]
    assert not grow(pool, 2, 8).copies
    commit(pool, 1, "ab", 8)
    assert commit(pool, 2, "ab", 8).swaps == [Swap(0, 1, 4), Swap(1, 1, 5)]
    assert tables(pool, 1) == tables(pool, 2) == [[0, 4], [1, 5]]
    assert states(pool) == [3, 3, 0, 0, 3, 3, 0, 0]


def test_the_source_of_a_copy_is_never_granted_by_the_same_operation() -> None:
    pool = make_pool(2)
    pool.allocate(1, 4)
    pool.commit(1, 2)
    pool.fork(1, 2)
    pool.commit(1, 4, d("a"))
    pool.free(1)  # block 0 is published, and only the child holds it
    before = everything(pool)
    # Two blocks are enough in the end, but the copy needs a third for a moment: NO_SPACE, not TOO_LONG.
    assert grow(pool, 2, 8) == GrowResult(Result.NO_SPACE, shortfall=1)
    assert everything(pool) == before
    assert grown(pool, 2, 4) == ([1], [Copy(0, 1)])


def test_a_copy_without_a_free_block_is_no_space_and_changes_nothing() -> None:
    pool = make_pool(2)
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    before = everything(pool)
    answer = grow(pool, 2, 7)
    assert (answer.result, answer.shortfall) == (Result.NO_SPACE, 1)
    assert everything(pool) == before


def test_a_windowed_block_is_copied_by_the_same_rule() -> None:
    pool = make_pool(8, sliding(4, 8))
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    assert grown(pool, 2, 7) == ([2], [Copy(1, 2)])
    assert grown(pool, 1, 8) == ([], [])
    commit(pool, 1, "ab", 8)
    assert tables(pool, 1) == [[0, 1]]
    assert tables(pool, 2) == [[0, 2]]


def test_a_windowed_block_that_another_filled_and_published_is_copied_by_its_last_holder() -> None:
    pool = make_pool(8, sliding(4, 8))
    pool.allocate(1, 8)
    commit(pool, 1, "a", 6)
    pool.fork(1, 2)
    commit(pool, 1, "ab", 8)
    pool.free(1)
    assert grown(pool, 2, 7) == ([2], [Copy(1, 2)])
    assert states(pool)[:3] == [2, 1, 2]


def test_the_longest_prefixes_are_ordered_by_tokens_in_pools_of_several_groups() -> None:
    pool = make_pool(64, group_count=2)
    for number, letters in enumerate(("abcdefg", "abcdexy", "uvwxyz"), 1):
        computed(pool, number, letters)
    found = longest_prefixes(pool, lambda _name: True)
    assert [(use.token_count, use.block_count) for use in found] == [(28, 4), (28, 4), (24, 12)]
