"""Invariants of a pool: no owner can break them, and a defect that breaks one is noticed and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import Quota, Result

from tests.allocator.core.pools import (
    blocks_of,
    chunked,
    commit,
    computed,
    d,
    filled,
    full,
    grow,
    make_pool,
    sliding,
    state,
    stops_of,
)


def test_a_block_never_stands_at_two_positions_even_if_its_owner_repeats_a_digest() -> None:
    pool = make_pool()
    same = d("a") * 2
    pool.allocate(1, 8, same)
    pool.commit(1, 8, same)
    assert blocks_of(pool, 1) == [0, 1]
    invariants.check(pool)
    pool.allocate(2, 9, same)
    assert blocks_of(pool, 2) == [0, 1, 2]
    invariants.check(pool)


operations = st.tuples(
    st.sampled_from(["allocate", "allocate", "grow", "commit", "commit", "fork", "fork", "free"]),
    st.integers(0, 12),
    st.integers(1, 24),
    st.lists(st.sampled_from([b"a" * 32, b"b" * 32, b"c" * 32]), max_size=6),
)
POOLS: list[Callable[[], Pool]] = [
    lambda: make_pool(7, block_size=2),
    lambda: make_pool(14, block_size=2, group_count=2),
    lambda: make_pool(12, full(4), sliding(2, 3), quotas=(Quota("", 10, 2),)),
    lambda: make_pool(12, chunked(2, 4), state(4), sliding(2, 5)),
    lambda: make_pool(20, full(2), state(2), watermark_block_count=1),
]


@given(st.lists(operations, min_size=8, max_size=40), st.sampled_from(POOLS))
@settings(max_examples=250, deadline=None)
def test_no_digest_that_an_owner_could_make_up_breaks_an_invariant(
    steps: list[tuple[str, int, int, list[bytes]]], make: Callable[[], Pool]
) -> None:
    pool = make()
    for name, choice, token_count, digests in steps:
        live = list(pool.sequences) or [0]
        sequence_id, new_id = live[choice % len(live)], pool.last_sequence_id + 1
        if name == "allocate":
            pool.allocate(new_id, token_count, b"".join(digests), prompt_token_count=token_count + choice - 6)
        elif name == "grow":
            grow(pool, sequence_id, token_count)
        elif name == "commit" and pool.sequences:
            sequence = pool.sequences[sequence_id]
            until = min(token_count, sequence.token_count)
            count = filled(pool, sequence_id, until)
            if until >= sequence.committed_token_count:  # a commit that goes back is refused before it reaches the pool
                pool.commit(sequence_id, until, b"".join((digests * 24 or [bytes(32)] * 24)[:count]), choice)
        elif name == "fork":
            pool.fork(sequence_id, new_id)
        else:
            pool.free(sequence_id)
        invariants.check(pool)


# -- a defect is noticed ---------------------------------------------------------------------------------------------


def busy_pool() -> Pool:
    """Returns a pool with a borrower, a fork, a prompt in chunks, sharers of a half-filled block, and cached blocks.

    Sequence 3 borrows a block that 1 published; 4 is a fork of 1; 5 is a prompt in chunks; 7 and 8 share.
    """
    pool = make_pool(60, full(4), sliding(4, 6), quotas=(Quota("", None, 20),))
    pool.allocate(1, 12)
    commit(pool, 1, "abcd", 6)
    pool.fork(1, 3)
    commit(pool, 1, "abcd", 12)
    pool.fork(1, 4)
    pool.allocate(5, 4, d("pqr"), prompt_token_count=14)
    computed(pool, 6, "xy")
    pool.free(6)
    computed(pool, 7, "xyz", tokens=2)
    pool.fork(7, 8)
    pool.allocate(9, 6, namespace="blue")
    invariants.check(pool)
    return pool


def state_pool() -> Pool:
    """Returns a pool where sequence 1 is at a checkpoint that sequence 2 shares, and has passed another checkpoint."""
    pool = make_pool(8, state(4))
    pool.allocate(1, 4)
    commit(pool, 1, "ab", 4)
    assert grow(pool, 1, 8).result is Result.OK
    commit(pool, 1, "ab", 8)
    pool.fork(1, 2)
    invariants.check(pool)
    return pool


def scope(pool: Pool, number: int) -> Any:
    return pool.blocks.namespaces[""].scopes[number]


def part(pool: Pool, sequence_id: int, number: int) -> Any:
    return pool.sequences[sequence_id].parts[number]


def cached_unit(pool: Pool, number: int) -> Any:
    return next(unit for unit in scope(pool, number).units() if not unit.live)


def a_run(pool: Pool) -> Any:
    return next(iter(scope(pool, 0).root.children.values()))


def take_a_block(pool: Pool) -> None:
    pool.blocks.take(1)


def give_a_held_block_back(pool: Pool) -> None:
    pool.blocks.give_back(part(pool, 5, 0).tail[:1])


def publish_too_much(pool: Pool) -> None:
    pool.sequences[1].committed_token_count += 4
    pool.sequences[1].token_count += 4


def forget_a_namespace(pool: Pool) -> None:
    del pool.blocks.namespaces["blue"]


def keep_a_namespace(pool: Pool) -> None:
    pool.blocks.namespaces["gone"] = pool.coordinator.new_namespace("gone")


def lose_a_child(pool: Pool) -> None:
    scope(pool, 0).root.children.clear()


def misfile_a_unit(pool: Pool) -> None:
    units = scope(pool, 1)._by_digest
    units[bytes(32)] = units.pop(next(iter(units)))


def forget_a_sharer(pool: Pool) -> None:
    pool.managers[0]._sharers.clear()  # type: ignore[attr-defined]


def drop_a_candidate(pool: Pool) -> None:
    pool.blocks.queue.discard(cached_unit(pool, 1))


def lose_a_queue_entry(pool: Pool) -> None:
    lose_all(pool.blocks.queue)


def lose_all(queue: Any) -> None:
    for lane in queue._lanes:
        lane.heap.clear()
    queue._kept.clear()
    for line in queue._lines:
        line._entries, line._tickets, line._heap = [], [], []


def lose_a_queue_entry_of_a_namespace(pool: Pool) -> None:
    queue = pool.blocks.namespaces[""].queue
    assert queue is not None
    lose_all(queue)


def last_stop(pool: Pool) -> Any:
    """Returns a stop that no other stop follows."""
    return next(b for b in stops_of(pool).values() if not b.way_count)


def a_stop(pool: Pool) -> Any:
    return next(b for b in stops_of(pool).values() if b.needed)


def lose_a_stop(pool: Pool) -> None:
    stop = a_stop(pool)
    del pool.coordinator.retention.stops[stop.key]


def forget_where_a_stop_stands(pool: Pool) -> None:
    stop = a_stop(pool)
    stop.runs[0].stops.remove(stop)


def need_one_unit_less(pool: Pool) -> None:
    a_stop(pool).needed.pop()


def announce_what_nobody_computes(pool: Pool) -> None:
    pool.pending.announce("", d("zzz"), 0, 3)


def stop_announcing(pool: Pool) -> None:
    announcement = pool.sequences[5].announcement
    assert announcement is not None
    pool.pending.drop(announcement)


def borrow_elsewhere(pool: Pool) -> None:
    borrower, other = part(pool, 3, 0), part(pool, 7, 0).run
    borrower.borrowed.live -= 1
    borrower.borrowed = other
    other.live += 1


def keep_the_key(pool: Pool) -> None:
    part(pool, 1, 0).unit.now_published(1, d("a"))


def lose_the_state(pool: Pool) -> None:
    part(pool, 2, 0).unit = None


def add(target: Callable[[Pool], Any], name: str, by: int) -> Callable[[Pool], None]:
    """Returns a defect that makes one number wrong."""

    def corrupt(pool: Pool) -> None:
        setattr(target(pool), name, getattr(target(pool), name) + by)

    return corrupt


DEFECTS: list[tuple[str, Callable[[Pool], None]]] = [
    ("blocks .* are lost", take_a_block),
    ("blocks .* have two uses", give_a_held_block_back),
    ("count as held", add(lambda pool: scope(pool, 0), "held", 1)),
    ("count as cached", add(lambda pool: scope(pool, 1), "cached", -1)),
    ("count as cached", add(lambda pool: pool.blocks, "cached_count", 1)),
    ("committed positions are not published|table begins", publish_too_much),
    ("has the limit", add(lambda pool: pool.sequences[3], "limit", 1)),
    ("quiet_until of sequence", add(lambda pool: pool.sequences[1], "quiet_until", 5)),
    ("count as promised", add(lambda pool: pool.admission, "promised_block_count", 1)),
    ("count as promised", add(lambda pool: pool.sequences[5], "promised", 1)),
    ("miscounts", add(lambda pool: pool.blocks.namespaces["blue"], "sequence_count", 1)),
    ("namespace of sequence 9 was removed", forget_a_namespace),
    ("is empty but was not removed", keep_a_namespace),
    ("counts .* holders", add(a_run, "live", 1)),
    ("first digest|begins at", add(a_run, "_first_position", 1)),
    ("not in the tree", lose_a_child),
    ("has .* published positions", add(lambda pool: part(pool, 1, 0), "published", -1)),
    ("sharers", forget_a_sharer),
    ("counts .* holders", add(lambda pool: cached_unit(pool, 1), "live", 1)),
    ("a unit of position . is not indexed there", misfile_a_unit),
    ("table of .* tokens has", add(lambda pool: part(pool, 1, 1), "first", -1)),
    ("a borrowed run does not follow", borrow_elsewhere),
    ("only entries that can be evicted have tickets", drop_a_candidate),
    ("candidate is not queued", lose_a_queue_entry),
    ("missing in its namespace's queue", lose_a_queue_entry_of_a_namespace),
    ("has a removed stop", lose_a_stop),
    ("lacks one of its stops", forget_where_a_stop_stands),
    ("needed_count is wrong|aside_count is wrong|list of stops", need_one_unit_less),
    ("number of ways is wrong", add(a_stop, "way_count", 1)),
    ("is aside although a path ends", lambda pool: setattr(last_stop(pool), "is_aside", True)),
    ("an outdated worth", add(lambda pool: cached_unit(pool, 1), "worth", 1)),
    ("count as spare", add(lambda pool: scope(pool, 1), "spare", 2)),
    ("above last_sequence_id", add(lambda pool: pool, "last_sequence_id", -1)),
    ("index of announcements differs", announce_what_nobody_computes),
    ("no place where it can be found", stop_announcing),
]


@pytest.mark.parametrize(("message", "corrupt"), DEFECTS, ids=[f"{i}: {m}" for i, (m, _) in enumerate(DEFECTS)])
def test_a_defect_is_noticed_and_named(message: str, corrupt: Callable[[Pool], None]) -> None:
    pool = busy_pool()
    corrupt(pool)
    with pytest.raises(AssertionError) as raised:
        invariants.check(pool)
    assert re.search(message, str(raised.value)), raised.value


@pytest.mark.parametrize(
    ("message", "corrupt"),
    [
        ("belongs to another length", add(lambda pool: pool.sequences[1], "committed_token_count", -1)),
        ("may be overwritten", add(lambda pool: pool.sequences[1], "token_count", 1)),
        ("another length|not in the index", keep_the_key),
        ("has no state", lose_the_state),
        ("the index of depths differs", lambda pool: scope(pool, 0).depths.add(99)),
        ("do not rise", lambda pool: setattr(pool.sequences[1].turn, "token_counts", (8, 4))),
        ("not at edges", lambda pool: setattr(pool.sequences[1].turn, "token_counts", (5,))),
        ("counts .* holders", add(lambda pool: part(pool, 1, 0).unit, "live", -1)),
    ],
)
def test_a_defect_of_a_state_is_noticed_and_named(message: str, corrupt: Callable[[Pool], None]) -> None:
    pool = state_pool()
    corrupt(pool)
    with pytest.raises(AssertionError) as raised:
        invariants.check(pool)
    assert re.search(message, str(raised.value)), raised.value
