"""A commit without digests of some blocks publishes the blocks before them, for all groups. The other blocks stay the
sequence's own. Owners cannot send such a commit: the wire refuses it.
"""

from __future__ import annotations

import random

import pytest
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupSpec, PoolSpec, Result

from tests.allocator.core.pools import chunked, full, grow, sliding, state

POOLS = {
    "full": (full(4),),
    "window": (sliding(4, 16),),
    "chunked": (chunked(4, 16),),
    "full and windows": (full(4), sliding(4, 16), sliding(4, 16)),
    "two block sizes": (full(16), sliding(4, 16)),
    "states": (full(4), state(16)),
    "states alone": (state(16),),
}


def text(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(32 * count)


@pytest.mark.parametrize("groups", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("retention", ["auto", "dense"])
@pytest.mark.parametrize("given", [0, 1, 3, 7, 15, 16, 17])
def test_blocks_without_digests_are_private_and_given_back(
    groups: tuple[GroupSpec, ...], retention: str, given: int
) -> None:
    pool, digests = Pool(PoolSpec(200, groups, retention=retention)), text(1, 40)
    full_only = Pool(PoolSpec(200, (full(4),)))
    for each in (pool, full_only):
        assert each.allocate(1, 64, digests[: 32 * 16]).result is Result.OK
        first = each.sequences[1].committed_token_count // 4  # chunked groups may hit although no block is cached
        assert each.commit(1, 64, digests[32 * first : 32 * given]).result is Result.OK
        assert grow(each, 1, 160).result is Result.OK
        invariants.check(each)
        assert each.commit(1, 160, digests[32 * 16 :]).result is Result.OK
        invariants.check(each)
        assert each.fork(1, 2) is (Result.OK if given >= 64 // each.digest_tokens else Result.UNCOMMITTED)
        for sequence_id in sorted(each.sequences):
            assert each.free(sequence_id) is Result.OK
            invariants.check(each)
    assert full_only.match("", digests) == (160 if given >= 16 else 4 * given)
    if any(group.kind is full(4).kind for group in groups):
        assert pool.match("", digests) <= full_only.match("", digests)
    assert pool.blocks.free_count == 200


def test_a_prompt_that_hits_what_such_a_commit_left_finds_no_more_than_had_digests() -> None:
    pool, digests = Pool(PoolSpec(400, (full(4), sliding(4, 16)))), text(2, 64)
    assert pool.allocate(1, 256, digests).result is Result.OK
    assert pool.commit(1, 256, digests[: 32 * 24]).result is Result.OK
    assert pool.free(1) is Result.OK
    invariants.check(pool)
    assert pool.match("", digests) <= 96
    assert pool.allocate(2, 256, digests).result is Result.OK
    assert pool.commit(2, 256, digests[pool.sequences[2].committed_token_count // 4 * 32 :]).result is Result.OK
    assert pool.free(2) is Result.OK
    invariants.check(pool)
    assert pool.match("", digests) == 256
