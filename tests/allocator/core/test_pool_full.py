"""Full attention, each rule as one worked-out example. Unless said otherwise: 8 blocks of 4 tokens, one group.

A fresh pool grants blocks 0, 1, 2, ... `d("ab")` are the digests of two blocks.
"""

from __future__ import annotations

from array import array

import pytest
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import CommitResult, GrowResult, Result, Swap

from tests.allocator.core.pools import (
    blocks_of,
    commit,
    computed,
    counts,
    d,
    d_from,
    everything,
    full,
    granted_next,
    grow,
    make_pool,
    states,
    tables,
)


def test_a_fresh_sequence_is_granted_the_lowest_blocks() -> None:
    pool = make_pool()
    grown = pool.allocate(1, 9, d("ab"))
    assert (grown.result, grown.matched_token_count, grown.pending_token_count) == (Result.OK, 0, 0)
    assert [list(table) for table in grown.blocks] == [[0, 1, 2]]
    assert states(pool) == [2, 2, 2, 0, 0, 0, 0, 0]


def test_a_published_prefix_is_shared_instead_of_granted() -> None:
    pool = make_pool()
    computed(pool, 1, "ab", tokens=1)
    grown = pool.allocate(2, 9, d("ab"))
    assert grown.matched_token_count == 8
    assert [list(table) for table in grown.blocks] == [[0, 1, 3]]
    assert states(pool) == [3, 3, 2, 2, 0, 0, 0, 0]
    assert (pool.queried_token_count, pool.matched_token_count, pool.granted_block_count) == (18, 8, 4)


def test_a_prefix_is_shared_up_to_the_first_block_that_differs() -> None:
    pool = make_pool()
    computed(pool, 1, "abc")
    assert pool.allocate(2, 12, d("axc")).matched_token_count == 4
    invariants.check(pool)


def test_blocks_that_were_granted_but_not_committed_cannot_be_hit() -> None:
    pool = make_pool()
    pool.allocate(1, 8, d("ab"))
    assert pool.allocate(2, 9, d("ab")).matched_token_count == 0
    pool.commit(1, 7, d("a"))
    assert pool.match("", d("ab")) == 4


@pytest.mark.parametrize(("token_count", "matched"), [(8, 4), (9, 8), (7, 4), (4, 0), (5, 4), (1, 0)])
def test_at_least_one_token_is_computed_on_a_full_hit(token_count: int, matched: int) -> None:
    pool = make_pool()
    computed(pool, 1, "ab")
    assert pool.allocate(2, token_count, d("ab")).matched_token_count == matched


def test_at_least_one_token_is_computed_where_the_hit_ends_inside_the_second_of_two_runs() -> None:
    pool = make_pool(10)
    computed(pool, 1, "ab")
    computed(pool, 2, "abcd")
    assert pool.allocate(3, 16, d("abcd")).matched_token_count == 12
    assert pool.allocate(4, 17, d("abcd")).matched_token_count == 16
    invariants.check(pool)


def test_a_hit_counts_as_committed_and_is_shared_by_a_fork_at_once() -> None:
    pool = make_pool()
    computed(pool, 1, "ab")
    pool.allocate(2, 9, d("ab"))
    assert pool.fork(2, 3) is Result.OK
    assert blocks_of(pool, 3) == [0, 1]
    assert pool.sequences[3].token_count == 8


def test_a_hit_may_end_in_the_middle_of_what_another_sequence_computed_in_one_go() -> None:
    pool = make_pool()
    computed(pool, 1, "abcd")  # published as one run of four blocks
    assert pool.allocate(2, 12, d("abxy")).blocks[0].tolist() == [0, 1, 4]
    assert states(pool)[:5] == [3, 3, 2, 2, 2]
    pool.free(1)
    assert counts(pool) == (3, 2, 3)  # c and d are cached, a and b are held by sequence 2
    assert granted_next(pool) == [5, 6, 7, 3, 2]
    assert pool.match("", d("abcd")) == 16


def test_a_freed_sequence_is_evicted_tail_first() -> None:
    pool = make_pool(4)
    computed(pool, 1, "abcd")
    pool.free(1)
    assert states(pool) == [1, 1, 1, 1]
    assert granted_next(pool) == [3, 2, 1, 0]


def test_eviction_takes_all_groups_of_a_position_before_an_earlier_position() -> None:
    pool = make_pool(6, group_count=2)
    computed(pool, 1, "abc")  # the three positions have blocks 0 and 1, 2 and 3, 4 and 5
    assert tables(pool, 1) == [[0, 2, 4], [1, 3, 5]]
    pool.free(1)
    pool.allocate(2, 1)  # the new sequence evicts the last position and takes its two blocks
    assert tables(pool, 2) == [[4], [5]]
    assert pool.match("", d("abc")) == 8
    pool.allocate(3, 1)
    assert tables(pool, 3) == [[2], [3]]
    assert pool.match("", d("abc")) == 4


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
    pool.allocate(3, 5, d("a"))  # the sequence shares block 0 and takes block 2
    pool.free(3)
    assert granted_next(pool) == [2, 3, 1, 0]


def test_the_eviction_order_outlives_many_hits() -> None:
    pool = make_pool(4)
    for sequence_id, letter in ((1, "a"), (2, "x"), (3, "p")):
        computed(pool, sequence_id, letter)
    for sequence_id in (1, 2, 3):
        pool.free(sequence_id)
    for sequence_id in range(4, 304):  # Each sequence leaves an outdated item in the queue.
        pool.allocate(sequence_id, 5, d("a" if sequence_id % 2 else "p"))
        pool.free(sequence_id)
    invariants.check(pool)
    assert granted_next(pool) == [3, 1, 2, 0]


def test_matching_alone_does_not_change_the_eviction_order() -> None:
    pool = make_pool(2)
    computed(pool, 1, "a")
    computed(pool, 2, "x")
    pool.free(1)
    pool.free(2)
    before = everything(pool)
    assert pool.match("", d("a")) == 4
    assert everything(pool) == before
    assert granted_next(pool) == [0, 1]


def test_empty_blocks_are_granted_before_cached_ones() -> None:
    pool = make_pool(4)
    computed(pool, 1, "ab")
    pool.free(1)
    assert pool.allocate(2, 4).blocks[0].tolist() == [2]
    pool.free(2)
    assert granted_next(pool) == [2, 3, 1, 0]
    assert pool.blocks.evicted_count == 0


def test_an_evicted_block_is_no_longer_hit_but_its_ancestors_are() -> None:
    pool = make_pool(3)
    computed(pool, 1, "abc")
    pool.free(1)
    assert pool.allocate(2, 4).blocks[0].tolist() == [2]
    assert pool.blocks.evicted_count == 1
    assert pool.match("", d("abc")) == 8


def test_the_hits_of_a_new_sequence_are_not_evicted_to_make_room_for_its_own_tail() -> None:
    pool = make_pool(4)
    computed(pool, 1, "ab")
    computed(pool, 2, "xy")
    pool.free(1)  # Sequence 1's blocks are evicted first.
    pool.free(2)
    grown = pool.allocate(3, 16, d("ab"))
    assert [list(table) for table in grown.blocks] == [[0, 1, 2, 3]]
    assert pool.blocks.evicted_count == 2


def test_of_a_cached_run_only_what_is_hit_is_kept_from_being_granted() -> None:
    pool = make_pool(5)
    computed(pool, 1, "abcd")
    pool.free(1)
    pool.allocate(2, 1)  # takes block 4, the last empty one
    answer = pool.allocate(3, 20, d("abxyz"))  # the prompt hits a and b, may evict c and d, and lacks one more block
    assert (answer.result, answer.shortfall) == (Result.NO_SPACE, 1)
    assert pool.allocate(3, 16, d("abx")).blocks[0].tolist() == [0, 1, 2, 3]
    invariants.check(pool)


def test_a_digest_that_another_block_carries_swaps_the_committers_entry() -> None:
    pool = make_pool()
    pool.allocate(1, 8, d("ab"))
    pool.allocate(2, 8, d("ab"))
    assert pool.commit(1, 8, d("ab")) == CommitResult(Result.OK)
    assert pool.commit(2, 8, d("ab")) == CommitResult(Result.OK, [Swap(0, 0, 0), Swap(0, 1, 1)])
    assert blocks_of(pool, 2) == [0, 1]
    assert states(pool) == [3, 3, 0, 0, 0, 0, 0, 0]
    assert granted_next(pool)[:2] == [2, 3]  # sequence 2 gave blocks 2 and 3 back, so they are granted first


def test_a_swap_brings_a_cached_block_back_into_use() -> None:
    pool = make_pool()
    computed(pool, 1, "a")
    pool.allocate(2, 4, d("a"))  # one token must be computed, so the sequence has its own block 1
    pool.free(1)
    assert pool.commit(2, 4, d("a")).swaps == [Swap(0, 0, 0)]
    assert states(pool) == [2, 0, 0, 0, 0, 0, 0, 0]


def test_a_commit_may_adopt_blocks_of_several_earlier_sequences_and_stop_in_the_middle_of_the_last() -> None:
    pool = make_pool(16)
    computed(pool, 1, "ab")  # has blocks 0 and 1
    computed(pool, 2, "abcd", tokens=1)  # the sequence shares blocks 0 and 1, and has 2, 3, and 4 for the last token
    computed(pool, 3, "abcdxy")  # the sequence shares 0 to 3, and has 5 and 6: the path now has three runs
    pool.allocate(4, 24)  # without digests nothing is hit: the sequence has blocks 7 to 12
    answer = commit(pool, 4, "abcdxz", 24)
    assert answer.swaps == [Swap(0, 0, 0), Swap(0, 1, 1), Swap(0, 2, 2), Swap(0, 3, 3), Swap(0, 4, 5)]
    assert blocks_of(pool, 4) == [0, 1, 2, 3, 5, 12]
    assert states(pool)[:7] == [5, 5, 4, 4, 2, 3, 2]
    assert list(pool.blocks.empty) == [7, 8, 9, 10, 11, 13, 14, 15]
    assert [pool.match("", d(text)) for text in ("abcdxy", "abcdxz", "abcdx", "abcz")] == [24, 24, 20, 12]


def test_nothing_is_published_under_a_block_that_was_not() -> None:
    pool = make_pool()
    computed(pool, 1, "a")
    pool.allocate(2, 8)
    commit(pool, 2, "ab", 8)  # sequence 2's own "a" is dropped, and its "b" is published below the first sequence's "a"
    assert blocks_of(pool, 2) == [0, 2]
    pool.free(2)
    assert pool.allocate(3, 9, d("ab")).matched_token_count == 8


def test_no_space_changes_nothing_not_even_the_eviction_order() -> None:
    pool = make_pool(4)
    computed(pool, 1, "ab")
    computed(pool, 2, "x", tokens=1)
    pool.free(1)
    before = everything(pool)
    answer = pool.allocate(3, 16, d("ab"))
    assert (answer.result, answer.shortfall) == (Result.NO_SPACE, 2)
    assert everything(pool) == before


def test_a_failed_allocate_does_not_use_up_its_id() -> None:
    pool = make_pool(2)
    pool.allocate(1, 8)
    assert pool.allocate(2, 1).result is Result.NO_SPACE
    pool.free(1)
    assert pool.allocate(2, 1).result is Result.OK


def test_with_two_groups_one_missing_block_refuses_both() -> None:
    pool = make_pool(5, group_count=2)
    pool.allocate(1, 8)
    before = everything(pool)
    assert (pool.allocate(2, 4).result, pool.allocate(2, 4).shortfall) == (Result.NO_SPACE, 1)
    assert everything(pool) == before
    assert grow(pool, 1, 12).result is Result.TOO_LONG


@pytest.mark.parametrize(("block_count", "group_count"), [(8, 1), (16, 2)])
def test_more_than_the_whole_pool_is_too_long_and_the_whole_pool_is_not(block_count: int, group_count: int) -> None:
    pool = make_pool(block_count, group_count=group_count)
    assert pool.allocate(1, 33) == GrowResult(Result.TOO_LONG)
    assert pool.allocate(1, 32).result is Result.OK
    assert grow(pool, 1, 33) == GrowResult(Result.TOO_LONG)
    assert pool.commit(1, 33) == CommitResult(Result.TOO_LONG)


def test_an_id_that_is_not_above_all_earlier_ones_is_too_low_and_that_of_a_live_sequence_exists() -> None:
    pool = make_pool()
    pool.allocate(5, 1)
    pool.free(5)
    pool.allocate(6, 1)
    before = everything(pool)
    assert [pool.allocate(i, 1).result for i in (0, 4, 5, 6)] == [*[Result.ID_TOO_LOW] * 3, Result.EXISTS]
    assert [pool.fork(6, i) for i in (0, 5, 6)] == [*[Result.ID_TOO_LOW] * 2, Result.EXISTS]
    assert everything(pool) == before


def test_unknown_and_freed_sequences_are_not_found() -> None:
    pool = make_pool()
    pool.allocate(1, 1)
    pool.free(1)
    before = everything(pool)
    for sequence_id in (1, 9):
        assert grow(pool, sequence_id, 1).result is Result.NOT_FOUND
        assert pool.commit(sequence_id, 1).result is Result.NOT_FOUND
        assert pool.fork(sequence_id, 10) is Result.NOT_FOUND
        assert pool.free(sequence_id) is Result.NOT_FOUND
    assert everything(pool) == before


def test_growing_to_no_more_than_there_is_changes_nothing() -> None:
    pool = make_pool()
    pool.allocate(1, 6)
    before = everything(pool)
    assert grow(pool, 1, 3) == grow(pool, 1, 6) == GrowResult(Result.OK)
    assert everything(pool) == before
    assert grow(pool, 1, 8) == GrowResult(Result.OK)  # 8 tokens still fit into the second block
    assert pool.sequences[1].token_count == 8


def test_many_grow_at_once_and_only_those_that_need_something_are_answered() -> None:
    pool = make_pool(3)
    for sequence_id in (1, 2):
        pool.allocate(sequence_id, 3)
    grants, others = pool.grow_many(array("Q", [1, 2, 7]), [4, 4, 4])
    assert (grants.rows, others) == ([], [(2, GrowResult(Result.NOT_FOUND))])
    grants, ((second, two),) = pool.grow_many(array("Q", [1, 2]), [5, 5])
    assert (grants.rows, grants.counts, grants.blocks) == ([0], [1], [array("I", [2])])
    assert (second, two.result, two.shortfall) == (1, Result.NO_SPACE, 1)


def test_a_group_of_larger_blocks_is_hit_only_where_both_end() -> None:
    # Digests cover 4 tokens. 20 tokens take 5 blocks of 4 in one group, and 3 of 8 in the other, two of them full.
    pool = make_pool(16, full(4), full(8))
    computed(pool, 1, "abcde")
    assert [len(table) for table in tables(pool, 1)] == [5, 3]
    assert [pool.match("", d("abcde")[: 32 * count]) for count in range(6)] == [0, 0, 8, 8, 16, 16]
    grown = pool.allocate(2, 20, d("abcde"))
    assert grown.matched_token_count == 16
    assert [table[:4].tolist() for table in grown.blocks] == [table[:4] for table in tables(pool, 2)]
    assert tables(pool, 2)[1][:2] == tables(pool, 1)[1][:2]
    invariants.check(pool)


def test_a_block_that_only_the_larger_group_has_half_filled_is_copied_by_whoever_goes_on() -> None:
    pool = make_pool(16, full(4), full(8))
    computed(pool, 1, "a")  # 4 tokens fill a whole small block and half of a large one
    grow(pool, 1, 6)
    pool.fork(1, 2)
    assert tables(pool, 2) == [[0], [1]]
    assert pool.sequences[1].limit == 6  # beyond 6, the parent would write into the block that the fork shares
    grown = grow(pool, 1, 7)
    assert grown.copies == [(1, 3)]
    invariants.check(pool)
    assert not grow(pool, 2, 5).copies  # only the parent holds the large block now
    assert tables(pool, 2) == [[0, 4], [1]]


def test_a_prefix_is_not_shared_between_namespaces() -> None:
    pool = make_pool()
    computed(pool, 1, "ab", namespace="blue")
    assert pool.match("red", d("ab")) == 0
    computed(pool, 2, "ab", namespace="red")
    assert blocks_of(pool, 2) == [2, 3]
    pool.fork(2, 3)
    assert pool.sequences[3].namespace.name == "red"


def test_a_namespace_is_forgotten_with_its_last_block_and_begins_anew() -> None:
    pool = make_pool(2)
    computed(pool, 1, "a", namespace="blue")
    pool.free(1)
    assert set(pool.blocks.namespaces) == {"blue"}  # one block of blue is still cached
    pool.allocate(2, 8)
    assert set(pool.blocks.namespaces) == {""}
    pool.free(2)
    assert not pool.blocks.namespaces
    computed(pool, 3, "a", namespace="blue")
    assert pool.match("blue", d("a")) == 4


def test_a_sequence_that_evicts_the_last_blocks_of_its_own_namespace_keeps_the_namespace() -> None:
    pool = make_pool(2)
    computed(pool, 1, "ab")
    pool.free(1)
    pool.allocate(2, 8, d("xy"))  # no hit: this evicted everything that the namespace had cached
    pool.commit(2, 8, d("xy"))
    invariants.check(pool)
    assert pool.match("", d("xy")) == 8
    assert pool.fork(2, 3) is Result.OK
    pool.free(2)
    assert pool.match("", d_from("xy", 0)) == 8
