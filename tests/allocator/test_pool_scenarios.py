"""The rules of a pool, each as one worked-out example. Unless said otherwise: 8 blocks of 4 tokens, one group.

A fresh pool grants blocks 0, 1, 2, ... `d("ab")` are the digests of two blocks.
"""

from __future__ import annotations

import pytest
from quire_allocator.core.pool import CommitResult, Copy, GrowResult, Result, Swap

from tests.allocator.pools import blocks_of, computed, d, everything, granted_next, make_pool


def test_a_fresh_sequence_is_granted_the_lowest_blocks() -> None:
    pool = make_pool()
    grown = pool.allocate(1, 9, d("ab"), "")
    assert grown.result is Result.OK
    assert grown.matched_token_count == 0
    assert [list(table) for table in grown.blocks] == [[0, 1, 2]]
    assert pool.blocks.states() == bytes([2, 2, 2, 0, 0, 0, 0, 0])


def test_a_published_prefix_is_shared_instead_of_granted() -> None:
    pool = make_pool()
    computed(pool, 1, "ab", tokens=1)
    grown = pool.allocate(2, 9, d("ab"), "")
    assert grown.matched_token_count == 8
    assert [list(table) for table in grown.blocks] == [[0, 1, 3]]
    assert pool.blocks.states() == bytes([3, 3, 2, 2, 0, 0, 0, 0])
    assert (pool.queried_token_count, pool.matched_token_count, pool.granted_block_count) == (18, 8, 4)


def test_a_prefix_is_shared_up_to_the_first_block_that_differs() -> None:
    pool = make_pool()
    computed(pool, 1, "abc")
    assert pool.allocate(2, 12, d("axc"), "").matched_token_count == 4


def test_blocks_that_were_granted_but_not_committed_cannot_be_hit() -> None:
    pool = make_pool()
    pool.allocate(1, 8, d("ab"), "")
    assert pool.allocate(2, 9, d("ab"), "").matched_token_count == 0
    pool.commit(1, 7, d("a"))
    assert pool.match("", d("ab")) == [[0]]


@pytest.mark.parametrize(("token_count", "matched"), [(8, 4), (9, 8), (7, 4), (4, 0), (5, 4), (1, 0)])
def test_at_least_one_token_is_computed_on_a_full_hit(token_count: int, matched: int) -> None:
    pool = make_pool()
    computed(pool, 1, "ab")
    assert pool.allocate(2, token_count, d("ab"), "").matched_token_count == matched


def test_a_hit_counts_as_committed_and_is_shared_by_a_fork_at_once() -> None:
    pool = make_pool()
    computed(pool, 1, "ab")
    pool.allocate(2, 9, d("ab"), "")
    assert pool.fork(2, 3) is Result.OK
    assert blocks_of(pool, 3) == [0, 1]
    assert pool.sequences[3].token_count == 8


def test_a_freed_sequence_is_evicted_tail_first() -> None:
    pool = make_pool(4)
    computed(pool, 1, "abcd")
    pool.free(1)
    assert pool.blocks.states() == bytes([1, 1, 1, 1])
    assert granted_next(pool) == [3, 2, 1, 0]


def test_eviction_takes_all_groups_of_a_position_before_an_earlier_position() -> None:
    pool = make_pool(6, group_count=2)
    computed(pool, 1, "abc")
    pool.free(1)
    assert granted_next(pool) == [2, 5, 1, 4, 0, 3]
    pool.allocate(2, 1, [], "")  # takes a block of each group
    assert pool.match("", d("abc")) == [[0, 1], [3, 4]]


def test_the_least_recently_freed_sequence_is_evicted_first() -> None:
    pool = make_pool(4)
    computed(pool, 1, "ab")
    computed(pool, 2, "xy")
    pool.free(2)
    pool.free(1)
    assert granted_next(pool) == [3, 2, 1, 0]


def test_a_hit_moves_a_cached_prefix_to_the_back_of_the_eviction_order() -> None:
    pool = make_pool(4)
    computed(pool, 1, "a")
    computed(pool, 2, "x")
    pool.free(1)
    pool.free(2)
    assert granted_next(pool) == [2, 3, 0, 1]
    pool.allocate(3, 5, d("a"), "")  # shares block 0 and takes block 2
    pool.free(3)
    assert granted_next(pool) == [2, 3, 1, 0]


def test_matching_alone_does_not_change_the_eviction_order() -> None:
    pool = make_pool(2)
    computed(pool, 1, "a")
    computed(pool, 2, "x")
    pool.free(1)
    pool.free(2)
    assert pool.match("", d("a")) == [[0]]
    assert granted_next(pool) == [0, 1]


def test_empty_blocks_are_granted_before_cached_ones() -> None:
    pool = make_pool(4)
    computed(pool, 1, "ab")
    pool.free(1)
    pool.allocate(2, 4, [], "")
    assert blocks_of(pool, 2) == [2]
    pool.free(2)
    assert granted_next(pool) == [2, 3, 1, 0]
    assert pool.blocks.evicted_count == 0


def test_an_evicted_block_is_no_longer_hit_but_its_ancestors_are() -> None:
    pool = make_pool(3)
    computed(pool, 1, "abc")
    pool.free(1)
    pool.allocate(2, 4, [], "")
    assert blocks_of(pool, 2) == [2]
    assert pool.blocks.evicted_count == 1
    assert pool.match("", d("abc")) == [[0, 1]]


def test_the_hits_of_a_new_sequence_are_not_evicted_to_make_room_for_its_own_tail() -> None:
    pool = make_pool(4)
    computed(pool, 1, "ab")
    computed(pool, 2, "xy")
    pool.free(1)  # the first to be evicted
    pool.free(2)
    grown = pool.allocate(3, 16, d("ab"), "")
    assert [list(table) for table in grown.blocks] == [[0, 1, 3, 2]]
    assert pool.blocks.evicted_count == 2


def test_a_fork_shares_the_half_filled_block_too() -> None:
    pool = make_pool()
    computed(pool, 1, "a", tokens=2)
    assert pool.fork(1, 2) is Result.OK
    assert blocks_of(pool, 2) == [0, 1]
    assert pool.blocks.states() == bytes([3, 3, 0, 0, 0, 0, 0, 0])
    assert pool.table_entry_count() == 4


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_whichever_side_of_a_fork_writes_first_gets_the_copy_and_the_other_keeps_the_block(
    first: int, second: int
) -> None:
    pool = make_pool()
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    grown = pool.grow(first, 7)
    assert grown == GrowResult(Result.OK, blocks=([2],), copies=(Copy(1, 2),))
    assert blocks_of(pool, first) == [0, 2]
    assert pool.grow(second, 7) == GrowResult(Result.OK, blocks=([],))
    assert blocks_of(pool, second) == [0, 1]
    assert pool.copy_count == 1


def test_of_three_sharers_the_first_two_copy() -> None:
    pool = make_pool()
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    pool.fork(2, 3)
    copies = [pool.grow(sequence_id, 7).copies for sequence_id in (1, 2, 3)]
    assert copies == [(Copy(1, 2),), (Copy(1, 3),), ()]


def test_a_fork_at_a_block_boundary_needs_no_copy() -> None:
    pool = make_pool()
    computed(pool, 1, "a")
    pool.fork(1, 2)
    assert [pool.grow(1, 5), pool.grow(2, 5)] == [
        GrowResult(Result.OK, blocks=([1],)),
        GrowResult(Result.OK, blocks=([2],)),
    ]


def test_a_fork_shares_what_is_committed_and_not_what_is_merely_granted() -> None:
    pool = make_pool()
    pool.allocate(1, 14, d("a"), "")
    pool.commit(1, 6, d("a"))
    pool.fork(1, 2)
    assert blocks_of(pool, 2) == [0, 1]
    assert pool.sequences[2].token_count == 6
    # The parent was granted the rest of block 1 before the fork: it goes on writing there, the child copies.
    assert pool.grow(1, 16) == GrowResult(Result.OK, blocks=([],))
    assert pool.grow(2, 7).copies == (Copy(1, 4),)


def test_a_fork_of_a_sequence_without_computed_tokens_is_empty_and_can_grow() -> None:
    pool = make_pool()
    pool.allocate(1, 6, [], "")
    assert pool.fork(1, 2) is Result.OK
    assert blocks_of(pool, 2) == []
    assert pool.grow(2, 5) == GrowResult(Result.OK, blocks=([2, 3],))


def test_a_block_that_the_parent_filled_and_published_is_copied_even_by_its_last_holder() -> None:
    pool = make_pool()
    pool.allocate(1, 8, [], "")
    pool.commit(1, 6, d("a"))
    pool.fork(1, 2)
    pool.commit(1, 8, d("ab")[1:])  # block 1 is published; the child's last token lies in its middle
    pool.free(1)
    assert pool.grow(2, 7) == GrowResult(Result.OK, blocks=([2],), copies=(Copy(1, 2),))
    assert pool.blocks.is_cached(1)
    assert pool.match("", d("ab")) == [[0, 1]]


def test_the_source_of_a_copy_is_never_granted_by_the_same_operation() -> None:
    pool = make_pool(2)
    pool.allocate(1, 4, [], "")
    pool.commit(1, 2, [])
    pool.fork(1, 2)
    pool.commit(1, 4, d("a"))
    pool.free(1)  # block 0: published, held by the child alone
    before = everything(pool)
    assert pool.grow(2, 8) == GrowResult(Result.NO_SPACE, shortfall=1)
    assert everything(pool) == before
    assert pool.grow(2, 4) == GrowResult(Result.OK, blocks=([1],), copies=(Copy(0, 1),))


def test_a_digest_that_another_block_carries_swaps_the_committers_entry() -> None:
    pool = make_pool()
    pool.allocate(1, 8, d("ab"), "")
    pool.allocate(2, 8, d("ab"), "")
    assert pool.commit(1, 8, d("ab")) == CommitResult(Result.OK)
    assert pool.commit(2, 8, d("ab")) == CommitResult(Result.OK, (Swap(0, 0, 0), Swap(0, 1, 1)))
    assert blocks_of(pool, 2) == [0, 1]
    assert pool.blocks.states() == bytes([3, 3, 0, 0, 0, 0, 0, 0])
    assert granted_next(pool)[:2] == [3, 2]  # given back, the last one first


def test_a_swap_brings_a_cached_block_back_into_use() -> None:
    pool = make_pool()
    computed(pool, 1, "a")
    pool.allocate(2, 4, d("a"), "")  # one token must be computed: block 1 is its own
    pool.free(1)
    assert pool.commit(2, 4, d("a")).swaps == (Swap(0, 0, 0),)
    assert pool.blocks.states() == bytes([2, 0, 0, 0, 0, 0, 0, 0])


def test_no_space_changes_nothing_not_even_the_eviction_order() -> None:
    pool = make_pool(4)
    computed(pool, 1, "ab")
    computed(pool, 2, "x", tokens=1)
    pool.free(1)
    before = everything(pool)
    assert pool.allocate(3, 16, d("ab"), "") == GrowResult(Result.NO_SPACE, shortfall=2)
    assert everything(pool) == before
    assert granted_next(pool) == [1, 0]


def test_a_failed_allocate_does_not_use_up_its_id() -> None:
    pool = make_pool(2)
    pool.allocate(1, 8, [], "")
    assert pool.allocate(2, 1, [], "").result is Result.NO_SPACE
    pool.free(1)
    assert pool.allocate(2, 1, [], "").result is Result.OK


def test_a_copy_without_a_free_block_is_no_space_and_changes_nothing() -> None:
    pool = make_pool(2)
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    before = everything(pool)
    assert pool.grow(2, 7) == GrowResult(Result.NO_SPACE, shortfall=1)
    assert everything(pool) == before


def test_with_two_groups_one_missing_block_refuses_both() -> None:
    pool = make_pool(5, group_count=2)
    pool.allocate(1, 8, [], "")
    before = everything(pool)
    assert pool.allocate(2, 4, [], "") == GrowResult(Result.NO_SPACE, shortfall=1)
    assert everything(pool) == before
    assert pool.grow(1, 12).result is Result.TOO_LONG


def test_with_two_groups_every_group_has_its_own_table_copy_and_swap() -> None:
    pool = make_pool(12, group_count=2)
    pool.allocate(1, 6, d("a"), "")
    assert [blocks_of(pool, 1, group) for group in (0, 1)] == [[0, 1], [2, 3]]
    pool.commit(1, 6, d("a"))
    pool.fork(1, 2)
    assert pool.grow(2, 7).copies == (Copy(1, 4), Copy(3, 5))
    pool.allocate(3, 4, d("a"), "")
    assert pool.commit(3, 4, d("a")).swaps == (Swap(0, 0, 0), Swap(1, 0, 2))


def test_a_prefix_that_one_group_has_lost_is_hit_by_none() -> None:
    pool = make_pool(5, group_count=2)
    computed(pool, 1, "ab")
    pool.free(1)
    pool.allocate(2, 4, [], "")  # takes the empty block, and the tail of the group that was released first
    assert [pool.blocks.is_published(block) for block in (1, 3)] == [False, True]
    assert pool.match("", d("ab")) == [[0], [2]]


@pytest.mark.parametrize(("block_count", "group_count"), [(8, 1), (16, 2)])
def test_more_than_the_whole_pool_is_too_long_and_the_whole_pool_is_not(block_count: int, group_count: int) -> None:
    pool = make_pool(block_count, group_count=group_count)
    assert pool.allocate(1, 33, [], "") == GrowResult(Result.TOO_LONG)
    assert pool.allocate(1, 32, [], "").result is Result.OK
    assert pool.grow(1, 33) == GrowResult(Result.TOO_LONG)
    assert pool.commit(1, 33, []) == CommitResult(Result.TOO_LONG)


def test_an_id_that_is_not_above_all_earlier_ones_exists() -> None:
    pool = make_pool()
    pool.allocate(5, 1, [], "")
    pool.free(5)
    pool.allocate(6, 1, [], "")
    before = everything(pool)
    assert [pool.allocate(i, 1, [], "").result for i in (0, 4, 5, 6)] == [Result.EXISTS] * 4
    assert [pool.fork(6, i) for i in (0, 5, 6)] == [Result.EXISTS] * 3
    assert everything(pool) == before


def test_unknown_and_freed_sequences_are_not_found() -> None:
    pool = make_pool()
    pool.allocate(1, 1, [], "")
    pool.free(1)
    before = everything(pool)
    for sequence_id in (1, 9):
        assert pool.grow(sequence_id, 1).result is Result.NOT_FOUND
        assert pool.commit(sequence_id, 1, []).result is Result.NOT_FOUND
        assert pool.fork(sequence_id, 10) is Result.NOT_FOUND
        assert pool.free(sequence_id) is Result.NOT_FOUND
    assert everything(pool) == before


def test_growing_to_no_more_than_there_is_changes_nothing() -> None:
    pool = make_pool()
    pool.allocate(1, 6, [], "")
    before = everything(pool)
    assert pool.grow(1, 3) == pool.grow(1, 6) == GrowResult(Result.OK, blocks=((),))
    assert everything(pool) == before


def test_a_prefix_is_not_shared_between_namespaces() -> None:
    pool = make_pool()
    computed(pool, 1, "ab", namespace="blue")
    assert pool.match("red", d("ab")) == [[]]
    computed(pool, 2, "ab", namespace="red")
    assert blocks_of(pool, 2) == [2, 3]
    pool.fork(2, 3)
    assert pool.sequences[3].namespace == "red"


def test_freeing_one_side_of_a_fork_leaves_the_other_whole() -> None:
    pool = make_pool()
    computed(pool, 1, "a", tokens=2)
    pool.fork(1, 2)
    pool.free(1)
    assert blocks_of(pool, 2) == [0, 1]
    assert pool.blocks.states() == bytes([2, 2, 0, 0, 0, 0, 0, 0])


def test_the_state_of_a_block_held_by_very_many_tables_is_255() -> None:
    pool = make_pool()
    computed(pool, 1, "a")
    for child in range(2, 254):
        pool.fork(1, child)
    assert pool.blocks.states()[0] == 254
    pool.fork(1, 254)
    pool.fork(1, 255)
    assert pool.blocks.states()[0] == 255
