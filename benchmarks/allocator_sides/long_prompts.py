"""Cost of a prompt of a million tokens in pools with windows or states: a lookup that misses, and its commit."""

from __future__ import annotations

import random
import statistics
from array import array
from typing import Final

from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result

from allocator_sides.workload import BLOCK_TOKENS, DIGEST_BYTES, cpu_us

TOKENS: Final = 1_000_000
WINDOW_TOKENS: Final = 1_024
CHECKPOINT_TOKENS: Final = 512
ROUNDS: Final = 5
LOOKUP: Final = "1 M tokens: lookup that misses, window alone"
STATE_LOOKUP: Final = "1 M tokens: lookup that misses, states with 1,953 checkpoints"
COMMIT: Final = "1 M tokens: commit, full attention and a window"


def measure() -> dict[str, float]:
    """Returns the median microseconds of each operation."""
    window = GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, WINDOW_TOKENS)
    full = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS)
    blocks, dice = TOKENS // BLOCK_TOKENS, random.Random(1)
    samples: dict[str, list[float]] = {LOOKUP: [], STATE_LOOKUP: [], COMMIT: []}
    alone = Pool(PoolSpec(2 * blocks, (window,)))
    _compute(alone, dice.randbytes(blocks * DIGEST_BYTES))
    states, known = _with_checkpoints(dice)
    for _ in range(ROUNDS):
        digests = dice.randbytes(blocks * DIGEST_BYTES)
        for name, pool, prompt in ((LOOKUP, alone, digests), (STATE_LOOKUP, states, known)):
            cost, matched = cpu_us(pool.match, [("", prompt)])
            assert matched == [0]
            samples[name].append(cost)
        samples[COMMIT].append(_compute(Pool(PoolSpec(2 * blocks + 2, (full, window))), digests))
    return {name: statistics.median(costs) for name, costs in samples.items()}


def _with_checkpoints(dice: random.Random) -> tuple[Pool, bytes]:
    """Returns a pool and the digests of one of its prompts. The pool has full attention and states. Another prompt has
    a checkpoint every 512 tokens; the returned one has its blocks of full attention cached, and no checkpoint."""
    count = TOKENS // CHECKPOINT_TOKENS
    full = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS)
    state = GroupSpec(GroupKind.STATE, CHECKPOINT_TOKENS)
    pool = Pool(PoolSpec(2 * TOKENS // BLOCK_TOKENS + 4 * count, (full, state)))
    step = CHECKPOINT_TOKENS // BLOCK_TOKENS * DIGEST_BYTES
    assert pool.allocate(1, CHECKPOINT_TOKENS).result is Result.OK
    for end in range(CHECKPOINT_TOKENS, TOKENS + 1, CHECKPOINT_TOKENS):
        _, others = pool.grow_many(array("Q", [1]), [end])
        assert all(grown.result is Result.OK for _, grown in others)
        assert pool.commit(1, end, dice.randbytes(step)).result is Result.OK
    scope = pool.blocks.namespaces[""].scopes[1]
    assert scope.held + scope.cached >= count, "checkpoints were dropped"
    other = dice.randbytes(TOKENS // BLOCK_TOKENS * DIGEST_BYTES)
    assert pool.allocate(2, TOKENS, other).result is Result.OK
    assert pool.commit(2, TOKENS, other).result is Result.OK
    return pool, other


def _compute(pool: Pool, digests: bytes) -> float:
    """Allocates and commits a prompt; returns the cost of the commit in microseconds."""
    assert pool.allocate(1, TOKENS, digests).result is Result.OK
    cost, _ = cpu_us(pool.commit, [(1, TOKENS, digests)])
    return cost
