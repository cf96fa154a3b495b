"""Small pools, and their observable state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from quire_allocator.core.groups.units import UnitScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.readers.usage import block_states
from quire_allocator.core.retention.stop import Stop, Unit
from quire_allocator.core.spec import NULL_BLOCK, GroupKind, GroupSpec, GrowResult, PoolSpec, Result

from tests.allocator.core.compiled import what_if

NULL = NULL_BLOCK


def full(block_size: int) -> GroupSpec:
    return GroupSpec(GroupKind.FULL_ATTENTION, block_size)


def sliding(block_size: int, window: int) -> GroupSpec:
    return GroupSpec(GroupKind.SLIDING_WINDOW, block_size, window)


def chunked(block_size: int, window: int) -> GroupSpec:
    return GroupSpec(GroupKind.CHUNKED_LOCAL, block_size, window)


def state(block_size: int) -> GroupSpec:
    return GroupSpec(GroupKind.STATE, block_size)


# Groups and retention of pools that have neither early stops nor stops of answers, because they have no states, only
# states, or keep all states ("dense").
WITHOUT_TOLD_ENDS = [
    ((full(4),), ""),
    ((full(4), sliding(4, 8)), ""),
    ((state(4), state(64)), ""),
    ((full(4), state(64)), "dense"),
]


def make_pool(block_count: int = 8, *groups: GroupSpec, block_size: int = 4, group_count: int = 1, **spec: Any) -> Pool:
    """Returns a pool of these groups, by default of `group_count` groups of full attention. Evicts by LRU."""
    spec.setdefault("eviction_policy", "lru")
    return Pool(PoolSpec(block_count, groups or (full(block_size),) * group_count, **spec))


def grow(pool: Pool, sequence_id: int, token_count: int) -> GrowResult:
    """Grows one sequence."""
    grants, others = pool.grow_many(array("Q", [sequence_id]), [token_count])
    return others[0][1] if others else GrowResult(Result.OK, 0, 0, grants.tables())


def stops_of(pool: Pool, namespace: str = "") -> dict[tuple[int, bytes], Stop]:
    """Returns the stops of a namespace, by their token counts and digests."""
    return {
        (count, digest): stop
        for (name, count, digest), stop in pool.coordinator.retention.stops.items()
        if name == namespace
    }


def d(letters: str) -> bytes:
    """Returns one digest per letter, each for a block that follows all letters before it."""
    return b"".join(letters[: i + 1].encode().ljust(32, b".") for i in range(len(letters)))


def d_from(letters: str, first: int) -> bytes:
    """Returns the digests of `d(letters)` from number `first` on."""
    return d(letters)[32 * first :]


def tables(pool: Pool, sequence_id: int) -> list[list[int]]:
    """Returns the whole table of each group."""
    return [list(table) for table in pool.tables(pool.sequences[sequence_id])]


def blocks_of(pool: Pool, sequence_id: int, group: int = 0) -> list[int]:
    return tables(pool, sequence_id)[group]


def states(pool: Pool) -> list[int]:
    """Returns the state of each block: 0 empty, 1 cached, n + 1 in n tables."""
    return list(block_states(pool).to_bytes())


def counts(pool: Pool) -> tuple[int, int, int]:
    """Counts the empty, the cached and the held blocks."""
    blocks = pool.blocks
    return (blocks.empty_count, blocks.cached_count, blocks.block_count - blocks.free_count)


def granted_next(pool: Pool) -> list[int]:
    """Returns all free blocks in the order of grants, one by one."""
    return what_if(pool.blocks, lambda blocks: [blocks.take(1)[0] for _ in range(blocks.free_count)])


def everything(pool: Pool) -> tuple[Any, ...]:
    """Returns everything that a refused operation must not change."""
    sequences = [
        (i, s.token_count, s.committed_token_count, s.limit, s.promised, tables(pool, i))
        for i, s in pool.sequences.items()
    ]
    counters = (pool.granted_block_count, pool.copy_count, pool.queried_token_count, pool.matched_token_count)
    kept = (sorted(pool.blocks.namespaces), len(pool.pending), pool.admission.promised_block_count)
    log = (len(pool.log._recorded), pool.blocks.evicted_count)
    return (states(pool), granted_next(pool), sequences, counters, kept, log)


def computed(
    pool: Pool, sequence_id: int, letters: str, *, namespace: str = "", tokens: int = 0, **options: Any
) -> None:
    """Allocates, computes and commits a sequence with the digest blocks of `letters`, and `tokens` more."""
    size = pool.digest_tokens
    token_count = size * len(letters) + tokens
    grown = pool.allocate(sequence_id, token_count, d(letters), namespace, **options)
    assert grown.result is Result.OK, grown
    commit(pool, sequence_id, letters, token_count)


def commit(pool: Pool, sequence_id: int, letters: str, token_count: int, keep: int = 0) -> Any:
    """Commits a forward pass up to `token_count`, of a text whose digest blocks are `letters`."""
    size = pool.digest_tokens
    first = pool.sequences[sequence_id].committed_token_count // size
    digests = d_from(letters[: token_count // size], first)
    assert len(digests) == 32 * (token_count // size - first), "not enough letters"
    answer = pool.commit(sequence_id, token_count, digests, keep)
    assert answer.result is Result.OK
    invariants.check(pool)
    return answer


def filled(pool: Pool, sequence_id: int, token_count: int) -> int:
    """Counts the digest blocks that a commit up to `token_count` fills; negative if it goes back."""
    return token_count // pool.digest_tokens - pool.sequences[sequence_id].committed_token_count // pool.digest_tokens


def published(scope: Any) -> dict[tuple[int, bytes], tuple[list[int], int]]:
    """Returns the published blocks of a windowed or state group, and their worth, by position and digest."""
    found = {unit.key: (list(unit.blocks), unit.worth) for unit in scope.units()}
    for stretch in getattr(scope, "stretches", {}).values():
        width = len(stretch.blocks) * 32 // stretch.size
        for offset in range(stretch.size // 32):
            key = stretch.first_position + offset, bytes(stretch.digests[32 * offset : 32 * (offset + 1)])
            assert key not in found, "two blocks are published as the same thing"
            found[key] = list(stretch.blocks[offset * width : (offset + 1) * width]), stretch.worth
    return found


def positions_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that collects every position where scopes look for a unit from now on; empty if compiled."""
    asked, find = list[int](), UnitScope.find

    def count(self: UnitScope, position: int, digest: bytes) -> Unit | None:
        asked.append(position)
        return find(self, position, digest)

    monkeypatch.setattr(UnitScope, "find", count)
    return asked


def forget(pool: Pool, manager: int, positions: Sequence[int], namespace: str = "") -> None:
    """Evicts chosen cached positions of a windowed or state group, as a policy might."""
    scope: Any = pool.blocks.namespaces[namespace].scopes[manager]
    for stretch in list(getattr(scope, "stretches", {}).values()):
        if any(stretch.first_position <= position < stretch.end_position for position in positions):
            scope.manager._fallen.cut(scope, stretch, stretch.first_position, stretch.end_position)
    for position, unit in [(unit.first_position, unit) for unit in scope.units()]:
        if not unit.live and not unit.ticket:
            pool.blocks.push(unit)
        if position in positions:
            pool.blocks.dropped(scope, scope.manager.evict(unit, 1))
    invariants.check(pool)
