"""Small pools, and what can be seen of them."""

from __future__ import annotations

import copy
from typing import Any

from quire_allocator.core.pool import GroupKind, GroupSpec, Pool, PoolSpec, Result


def make_pool(block_count: int = 8, *, block_size: int = 4, group_count: int = 1) -> Pool:
    return Pool(PoolSpec(block_count, (GroupSpec(GroupKind.FULL_ATTENTION, block_size),) * group_count))


def d(letters: str) -> list[bytes]:
    """One digest per letter: that of a block behind all letters before it."""
    return [letters[: i + 1].encode().ljust(32, b".") for i in range(len(letters))]


def blocks_of(pool: Pool, sequence_id: int, group: int = 0) -> list[int]:
    return list(pool.sequences[sequence_id].tables[group])


def granted_next(pool: Pool) -> list[int]:
    """All free blocks in the order in which they would be granted."""
    return copy.deepcopy(pool.blocks).take(pool.blocks.free_count)


def everything(pool: Pool) -> tuple[Any, ...]:
    """All that a refused operation must leave as it was."""
    sequences = {
        i: (s.token_count, s.committed_token_count, s.tables) for i, s in copy.deepcopy(pool.sequences).items()
    }
    counters = (pool.granted_block_count, pool.copy_count, pool.queried_token_count, pool.matched_token_count)
    return (pool.blocks.states(), granted_next(pool), sequences, counters, pool.blocks.evicted_count)


def computed(pool: Pool, sequence_id: int, letters: str, *, namespace: str = "", tokens: int = 0) -> None:
    """A sequence whose blocks of `letters`, and `tokens` tokens more, have been allocated, computed and committed."""
    token_count = 4 * len(letters) + tokens
    grown = pool.allocate(sequence_id, token_count, d(letters), namespace)
    assert grown.result is Result.OK
    missing = d(letters)[grown.matched_token_count // 4 :]
    assert pool.commit(sequence_id, token_count, missing).result is Result.OK
    pool.check_invariants()
