"""The victim that NO_SPACE names is the sequence that loses least; it returns later. Worked out by hand; blocks of 4
tokens, one group."""

from __future__ import annotations

from array import array

import pytest
from quire_allocator.core.spec import Result, Victim

from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.core.pools import commit, computed, counts, d, full, grow, make_pool, sliding, state


def test_no_space_names_the_sequence_that_has_least_to_compute_again() -> None:
    pool = make_pool(8)
    computed(pool, 1, "ab", tokens=1)
    computed(pool, 2, "x", tokens=2)
    computed(pool, 3, "pq")
    assert pool.allocate(4, 8).victim == Victim(2, 6)
    assert pool.allocate(4, 8).shortfall == 1
    assert grow(pool, 2, 13).victim == Victim(3, 8)  # the asking sequence is never its own victim


def test_tokens_that_others_hold_too_need_not_be_computed_again() -> None:
    pool = make_pool(8)
    computed(pool, 1, "abc")
    computed(pool, 2, "abx", tokens=1)  # 8 of sequence 2's 13 tokens are in blocks of sequence 1
    pool.allocate(3, 8)
    assert pool.allocate(4, 8).victim == Victim(3, 0)
    pool.free(3)
    computed(pool, 4, "rs")
    assert pool.allocate(5, 8).victim == Victim(1, 4)


def test_the_newest_of_equals_goes_first() -> None:
    pool = make_pool(4)
    for sequence_id in (1, 2, 3):
        computed(pool, sequence_id, "abcd"[sequence_id])
    assert pool.allocate(5, 8).victim == Victim(3, 4)


def test_a_sequence_of_a_higher_priority_is_never_named() -> None:
    pool = make_pool(2)
    pool.allocate(1, 4, priority=2)
    pool.allocate(2, 4, priority=1)
    assert pool.allocate(3, 4, priority=0).victim is None
    assert pool.allocate(3, 4, priority=1).victim == Victim(2, 0)
    assert pool.allocate(3, 4, priority=2).victim == Victim(2, 0)  # of both sequences, the one with the lower priority
    assert grow(pool, 2, 5).victim is None
    assert grow(pool, 1, 5).victim == Victim(2, 0)


def test_a_fork_has_the_priority_of_its_parent() -> None:
    pool = make_pool(2)
    computed(pool, 1, "a", priority=2)
    pool.fork(1, 2)
    assert pool.allocate(3, 8, priority=1).victim is None


def test_what_a_sequence_alone_borrows_does_not_count_as_held_by_others() -> None:
    pool = make_pool()
    pool.allocate(1, 8)
    commit(pool, 1, "a", 6)
    pool.fork(1, 2)
    commit(pool, 1, "ab", 8)
    # sequence 1 also holds "a", so sequence 2 loses only 2 tokens
    assert pool.admission.cheapest_victim(0, except_id=1) == Victim(2, 2)
    assert pool.allocate(3, 28).victim == Victim(1, 0)  # sequence 2 also holds both blocks of sequence 1
    pool.free(1)
    assert pool.allocate(3, 28).victim == Victim(2, 6)


def test_where_windows_or_states_are_not_shared_as_well_everything_is_computed_again() -> None:
    pool = make_pool(8, full(4), sliding(4, 4))
    computed(pool, 1, "ab")  # full attention has blocks 0 and 1; the window keeps block 3
    pool.allocate(2, 9, d("ab"))
    assert pool.admission.cheapest_victim(0) == Victim(1, 0)  # sequence 2 also holds all blocks of sequence 1
    # sequence 2 holds a block of the window that no other sequence holds
    assert pool.admission.cheapest_victim(0, except_id=1) == Victim(2, 8)


def test_a_state_that_a_fork_shares_need_not_be_computed_again() -> None:
    pool = make_pool(8, full(4), state(4))
    computed(pool, 1, "ab")
    assert pool.admission.cheapest_victim(0) == Victim(1, 8)
    pool.fork(1, 2)
    assert pool.admission.cheapest_victim(0) == Victim(2, 0)
    grow(pool, 2, 9)  # sequence 2 now has its own copy of the state
    assert pool.admission.cheapest_victim(0) == Victim(2, 8)


def test_preempting_the_victims_that_are_named_makes_room() -> None:
    pool = make_pool(8)
    for sequence_id, letters in enumerate(("abc", "abd", "x", "pq"), 1):
        computed(pool, sequence_id, letters)
    preempted = []
    while (answer := pool.allocate(9, 20)).result is Result.NO_SPACE:
        assert answer.victim is not None
        preempted.append(answer.victim.sequence_id)
        pool.free(answer.victim.sequence_id)
    assert preempted == [3, 2, 4]
    assert counts(pool) == (0, 0, 8)


@pytest.mark.skipif(IS_COMPILED, reason="methods of extension modules cannot be replaced")
def test_many_refusals_look_for_their_victim_once_and_again_after_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, searches = make_pool(8), 0
    search = pool.admission._two_cheapest

    def counted() -> list[tuple[int, int, int]]:
        nonlocal searches
        searches += 1
        return search()

    monkeypatch.setattr(pool.admission, "_two_cheapest", counted)
    for sequence_id in range(1, 9):
        computed(pool, sequence_id, "abcdefgh"[sequence_id - 1])
    _, refused = pool.grow_many(array("Q", range(1, 9)) * 100, [5] * 800)
    assert {grown.victim for _, grown in refused} == {Victim(8, 4), Victim(7, 4)}  # sequence 8 is not its own victim
    assert searches == 1
    pool.free(8)
    assert grow(pool, 1, 9).victim == Victim(7, 4)
    assert searches == 2


def test_a_preempted_request_that_returns_is_no_new_query() -> None:
    pool = make_pool(20)
    letters = "abcdefghijkl"
    computed(pool, 1, letters)
    before = (pool.queried_token_count, pool.matched_token_count)
    pool.free(1)
    grown = pool.allocate(2, 49, d(letters), is_return=True)
    assert grown.matched_token_count == 48
    assert (pool.queried_token_count, pool.matched_token_count) == before == (48, 0)
    assert (pool.returned_token_count, pool.returned_matched_token_count) == (49, 48)
