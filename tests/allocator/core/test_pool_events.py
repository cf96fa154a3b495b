"""A pool's events are in order, follow the acknowledgment, and occur once for all copies. Blocks of 4 tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from quire_allocator.core.events import Change, Event
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import index
from quire_allocator.core.spec import GroupSpec

from tests.allocator.core.pools import chunked, commit, computed, d, forget, full, grow, make_pool, sliding, state

# (change, letters of the digests, first position, letter of the parent, manager) of an event
Told = list[tuple[str, str, int, str, int]]


def letters_of(digests: bytes) -> str:
    """Returns the last letter of each digest."""
    names = [digests[i : i + 32].rstrip(b".").decode() for i in range(0, len(digests), 32)]
    return "".join(name[-1] for name in names)


def told(pool: Pool, after: int = 0) -> Told:
    """Returns everything that the log has published."""
    return [
        (
            event.change.name,
            letters_of(bytes(event.digests)),
            event.first_position,
            letters_of(event.parent_digest),
            pool.managers.index(event.scope.manager),  # type: ignore[arg-type]
        )
        for _, event in pool.log.after(after, 1000)
    ]


def all_told(pool: Pool) -> Told:
    """Acknowledges everything, and returns the log."""
    pool.log.publish(pool.log.step)
    return told(pool)


def test_blocks_are_stored_in_runs_that_name_the_block_before_them() -> None:
    pool = make_pool()
    pool.allocate(1, 16)
    commit(pool, 1, "ab", 9)
    commit(pool, 1, "abcd", 16)
    assert all_told(pool) == [("STORED", "ab", 0, "", 0), ("STORED", "cd", 2, "b", 0)]


def test_what_is_granted_or_hit_is_no_event() -> None:
    pool = make_pool()
    computed(pool, 1, "ab")
    pool.allocate(2, 13, d("ab"))
    pool.fork(2, 3)
    pool.free(3)
    grow(pool, 2, 20)
    assert all_told(pool) == [("STORED", "ab", 0, "", 0)]


def test_nothing_is_told_before_its_step_is_acknowledged() -> None:
    pool = make_pool()
    pool.allocate(1, 12)
    for step in (1, 2, 3):
        pool.log.step = step
        commit(pool, 1, "abc", 4 * step)
    assert told(pool) == []
    assert pool.log.publish(2)
    assert told(pool) == [("STORED", "a", 0, "", 0), ("STORED", "b", 1, "a", 0)]
    assert not pool.log.publish(2)
    assert pool.log.last_cursor == 2
    pool.log.publish(9)
    assert told(pool, after=2) == [("STORED", "c", 2, "b", 0)]


def test_eviction_tells_of_the_deep_end_first() -> None:
    pool = make_pool(4)
    computed(pool, 1, "abcd")
    pool.free(1)
    pool.allocate(2, 4)
    pool.allocate(3, 8)
    assert all_told(pool)[1:] == [("REMOVED", "d", 3, "", 0), ("REMOVED", "bc", 1, "", 0)]


def test_a_copy_that_meets_the_first_block_is_no_event_and_its_end_neither() -> None:
    pool = make_pool(4)
    pool.allocate(1, 8, d("ab"))
    pool.allocate(2, 8, d("ab"))
    commit(pool, 1, "ab", 8)
    commit(pool, 2, "ab", 8)
    pool.free(1)
    pool.allocate(3, 8)  # the new sequence takes the blocks that sequence 2 gave back
    assert all_told(pool) == [("STORED", "ab", 0, "", 0)]
    assert pool.match("", d("ab")) == 8
    pool.free(2)
    pool.allocate(4, 8)  # the new sequence evicts the cached blocks of a and b
    assert all_told(pool)[1:] == [("REMOVED", "ab", 0, "", 0)]
    assert pool.match("", d("ab")) == 0


def test_what_is_stored_again_after_it_was_removed_is_told_again() -> None:
    pool = make_pool(2)
    for sequence_id in (1, 3):
        computed(pool, sequence_id, "a")
        pool.free(sequence_id)
        pool.allocate(sequence_id + 1, 8)
        pool.free(sequence_id + 1)
    assert [change for change, *_ in all_told(pool)] == ["STORED", "REMOVED"] * 2


def test_groups_of_one_kind_tell_together_and_kinds_apart() -> None:
    pool = make_pool(20, sliding(4, 4), full(4), sliding(4, 4))
    computed(pool, 1, "ab")
    assert all_told(pool) == [
        ("STORED", "ab", 0, "", 0),
        ("STORED", "ab", 0, "", 1),
    ]
    assert [manager.groups for manager in pool.managers] == [(1,), (0, 2)]


def test_falling_out_of_a_window_is_no_event_and_eviction_is() -> None:
    pool = make_pool(4, sliding(4, 4))
    computed(pool, 1, "abc")
    assert [event[:3] for event in all_told(pool)] == [("STORED", "abc", 0)]
    # The new sequence takes the empty block, and one of the two that fell out: a. Hits of the same prompt end after b,
    # so b stays longer.
    pool.allocate(2, 8)
    assert [event[:3] for event in all_told(pool)[1:]] == [("REMOVED", "a", 0)]


@pytest.mark.parametrize("group", [full(8), sliding(8, 40), sliding(8, 8), chunked(8, 32)])
def test_what_one_commit_stores_is_one_event_in_each_kind_of_group(group: GroupSpec) -> None:
    pool = make_pool(16, group)
    pool.allocate(1, 128)
    commit(pool, 1, "abcdefghijklmnop", 128)
    assert all_told(pool) == [("STORED", "abcdefghijklmnop", 0, "", 0)]


def test_what_a_commit_stores_from_a_forked_block_on_is_one_event() -> None:
    pool = make_pool()
    pool.allocate(1, 6)
    commit(pool, 1, "a", 6)
    pool.fork(1, 2)
    grow(pool, 1, 13)  # sequence 1 continues in a copy of the half-filled block
    grow(pool, 2, 13)  # sequence 2 alone still holds the half-filled block, so it needs no copy
    pool.fork(2, 3)
    commit(pool, 1, "abc", 13)
    assert all_told(pool) == [("STORED", "a", 0, "", 0), ("STORED", "bc", 1, "a", 0)]
    pool = make_pool()
    pool.allocate(1, 12)
    commit(pool, 1, "a", 6)
    pool.fork(1, 2)
    commit(pool, 1, "abc", 12)  # the commit publishes the block that it shares with its fork, and the next one
    assert all_told(pool) == [("STORED", "a", 0, "", 0), ("STORED", "bc", 1, "a", 0)]
    grow(pool, 2, 8)
    commit(pool, 2, "abc", 8)  # the fork commits its copy of a block that is already published
    pool.free(1)
    pool.free(2)
    assert pool.match("", d("abc")) == 12
    assert len(all_told(pool)) == 2


def test_the_next_commit_of_a_window_is_an_event_without_a_parent() -> None:
    pool = make_pool(20, sliding(8, 40))
    pool.allocate(1, 128)
    commit(pool, 1, "ab", 20)
    commit(pool, 1, "abcdef", 50)
    # Windowed groups name no parents: a block is found by its own digest, even if the previous block was evicted.
    assert all_told(pool) == [("STORED", "ab", 0, "", 0), ("STORED", "cdef", 2, "", 0)]


def test_a_commit_of_larger_window_blocks_tells_their_own_digests_only() -> None:
    pool = make_pool(40, full(4), sliding(8, 40))
    pool.allocate(1, 40)
    commit(pool, 1, "abc", 12)
    commit(pool, 1, "abcdefghij", 40)
    assert [event for event in all_told(pool) if event[4] == 1] == [
        ("STORED", "b", 0, "", 1),
        ("STORED", "dfhj", 1, "", 1),
    ]


def test_what_was_stored_by_others_parts_what_a_commit_of_a_window_tells() -> None:
    pool = make_pool(20, sliding(4, 40))
    computed(pool, 1, "abcdef")
    pool.allocate(2, 24)
    pool.free(1)
    forget(pool, 0, [0, 1, 4])
    # Sequence 2 has computed all six blocks. Its copies of a, b and e, which were evicted, are published; c, d and f
    # still are.
    commit(pool, 2, "abcdef", 24)
    assert [event for event in all_told(pool) if event[0] == "STORED"] == [
        ("STORED", "abcdef", 0, "", 0),
        ("STORED", "ab", 0, "", 0),
        ("STORED", "e", 4, "", 0),
    ]


def test_pieces_of_a_long_event_name_a_parent_in_full_attention_only() -> None:
    count = index.DIGESTS_PER_PIECE_MAX + 1
    digests = b"".join(number.to_bytes(32) for number in range(count))
    pool = make_pool(2 * count, full(4), sliding(4, 4))
    pool.allocate(1, 4 * count)
    pool.commit(1, 4 * count, digests)
    pool.log.publish(0)
    told = [piece for _, event in pool.log.after(0, 9) for piece in index.pieces(index.stretch_of(event))]
    assert [(piece.groups, piece.first_position, piece.parent_digest) for piece in told] == [
        ((0,), 0, b""),
        ((0,), count - 1, digests[-64:-32]),
        ((1,), 0, b""),
        ((1,), count - 1, b""),
    ]
    assert b"".join(piece.digests for piece in told) == digests * 2


def test_a_checkpoint_that_is_evicted_or_given_up_is_removed() -> None:
    pool = make_pool(2, state(4))
    pool.allocate(1, 4)
    for token_count in (4, 8):
        grow(pool, 1, token_count)
        commit(pool, 1, "ab", token_count)
    grow(pool, 1, 12)
    # The position of a state counts the digests up to and including its own.
    assert [event[:3] for event in all_told(pool)] == [("STORED", "a", 1), ("STORED", "b", 2), ("REMOVED", "a", 1)]
    pool = make_pool(3, full(4), state(4))
    computed(pool, 1, "a")
    grow(pool, 1, 8)
    assert all_told(pool)[2:] == [("REMOVED", "a", 1, "", 1)]


def test_a_reader_that_is_too_far_behind_is_told_to_start_over() -> None:
    pool = make_pool(8)
    pool.log.event_count_max = 3
    pool.allocate(1, 20)
    for count in range(1, 6):
        commit(pool, 1, "abcde", 4 * count)
    pool.log.publish(0)
    assert [pool.log.can_resume(cursor) for cursor in range(7)] == [False, False, True, True, True, True, False]
    assert [event[1] for event in told(pool, after=2)] == ["c", "d", "e"]
    assert [cursor for cursor, _ in pool.log.after(3, 1)] == [4]


def test_digests_in_the_log_are_bounded_too() -> None:
    pool = make_pool(8)
    pool.log.digest_bytes_max = 96
    pool.allocate(1, 16)
    commit(pool, 1, "ab", 8)
    commit(pool, 1, "abcd", 16)
    pool.log.publish(0)
    assert [pool.log.can_resume(cursor) for cursor in (0, 1, 2)] == [False, True, True]


def test_the_log_keeps_no_more_than_twice_the_digests_that_it_counts() -> None:
    pool = make_pool(32)
    letters = "abcdefghijklmnopqrstuvwxyzABCD"
    computed(pool, 1, letters)
    pool.free(1)
    for sequence_id in range(
        2, 802, 200
    ):  # each new sequence takes a few blocks from the end of the long run, and the next hit cuts the run again
        pool.allocate(sequence_id, 4 * 4)
        pool.free(sequence_id)
        pool.allocate(sequence_id + 100, 4 * 20, d(letters))
        pool.free(sequence_id + 100)
    removed = [Event(*record) for record in pool.log._recorded if record[1] is Change.REMOVED]
    assert removed
    for event in removed:
        assert len(event.source) <= 2 * len(event.digests)


def test_replaying_the_log_gives_the_index_of_the_acknowledged_step() -> None:
    pool = make_pool(6)
    index: Counter[tuple[int, bytes]] = Counter()
    cursor = 0
    for step in range(1, 40):
        pool.log.step = step
        computed(pool, step, "abcdefghijkl"[step % 5 : step % 5 + 1 + step % 4])
        pool.free(step)
        known = {text for text in "abcde" if pool.match("", d(text))}
        pool.log.publish(step)
        for number, event in pool.log.after(cursor, 1000):
            cursor = number
            change = 1 if event.change is Change.STORED else -1
            for i in range(len(event.digests) // 32):
                index[event.first_position + i, bytes(event.digests[32 * i : 32 * i + 32])] += change
        assert set(index.values()) <= {0, 1}
        assert {
            digest.rstrip(b".").decode() for (position, digest), there in index.items() if there and not position
        } == known
