"""Only an owner with made-up digests has a digest at two positions of windows or states. The pool keeps both apart."""

from __future__ import annotations

import pytest
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import index, invariants
from quire_allocator.core.spec import GroupSpec, Result

from tests.allocator.core.pools import blocks_of, forget, make_pool, sliding, state

SAME = b"same".ljust(32, b".")
SHORT = b"x".ljust(32, b".") + SAME  # `SHORT` and `LONG` end with the same digest, at positions 1 and 2
LONG = b"y".ljust(32, b".") + b"z".ljust(32, b".") + SAME

kinds = pytest.mark.parametrize("group", [sliding(4, 4), state(4)], ids=["windows", "states"])


def published(pool: Pool, sequence_id: int, digests: bytes) -> list[tuple[int, int]]:
    """Computes a text without looking it up, publishes it, and returns positions and blocks of the swaps."""
    token_count = 4 * (len(digests) // 32)
    assert pool.allocate(sequence_id, token_count).result is Result.OK
    answer = pool.commit(sequence_id, token_count, digests)
    assert answer.result is Result.OK
    invariants.check(pool)
    return [(swap.position, swap.block) for swap in answer.swaps]


def both(group: GroupSpec) -> Pool:
    """Returns a pool where sequence 1 has `SHORT` and sequence 2 has `LONG`."""
    pool = make_pool(16, group, retention="dense")
    assert published(pool, 1, SHORT) == published(pool, 2, LONG) == []
    return pool


def hits(pool: Pool) -> list[bytes]:
    """Returns the texts that can be hit up to their ends."""
    return [digests for digests in (SHORT, LONG, SAME) if pool.match("", digests) == len(digests) // 8]


def place(group: GroupSpec, digests: bytes) -> int:
    """Returns the position of the published block with the last digest of a text."""
    return len(digests) // 32 - (group == sliding(4, 4))


@kinds
def test_it_is_hit_at_each_of_them_and_nowhere_else(group: GroupSpec) -> None:
    pool = both(group)
    assert hits(pool) == [SHORT, LONG]
    for sequence_id, digests in ((3, SHORT), (4, LONG)):
        token_count = len(digests) // 8
        assert pool.allocate(sequence_id, token_count + 1, digests).matched_token_count == token_count
        invariants.check(pool)
    assert len([stretch for stretch in index.walk(pool) if stretch.digests.endswith(SAME)]) == 2


@kinds
def test_who_publishes_it_again_gets_the_block_of_the_same_position(group: GroupSpec) -> None:
    pool = both(group)
    for sequence_id, first, digests in ((3, 1, SHORT), (4, 2, LONG)):
        assert published(pool, sequence_id, digests)[-1][1] == blocks_of(pool, first)[-1]


@kinds
@pytest.mark.parametrize("first", [SHORT, LONG], ids=["the one published first goes", "the other goes"])
def test_one_is_evicted_and_published_again_and_the_other_stays(group: GroupSpec, first: bytes) -> None:
    pool, other = both(group), LONG if first == SHORT else SHORT
    pool.free(1)
    pool.free(2)
    for gone, left in ((first, other), (other, first)):
        forget(pool, 0, [place(group, gone)])
        assert hits(pool) == [left]
        published(pool, pool.last_sequence_id + 1, gone)
        assert hits(pool) == [SHORT, LONG]
        pool.free(pool.last_sequence_id)
    forget(pool, 0, range(4))
    assert hits(pool) == []


@kinds
@pytest.mark.parametrize("freed", [1, 2])
def test_what_is_dropped_when_its_holder_has_gone_leaves_the_other_one(group: GroupSpec, freed: int) -> None:
    pool = both(group)
    pool.free(freed)
    assert hits(pool) == [SHORT, LONG]
    pool.blocks.drop(None)
    invariants.check(pool)
    assert hits(pool) == [LONG if freed == 1 else SHORT]
