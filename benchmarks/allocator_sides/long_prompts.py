"""What a prompt of a million tokens costs in a pool with a window: a lookup that misses, and its commit."""

from __future__ import annotations

import random
import statistics
from typing import Final

from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result

from allocator_sides.workload import BLOCK_TOKENS, DIGEST_BYTES, cpu_us

TOKENS: Final = 1_000_000
WINDOW_TOKENS: Final = 1_024
ROUNDS: Final = 5
LOOKUP: Final = "1 M tokens: lookup that misses, window alone"
COMMIT: Final = "1 M tokens: commit, full attention and a window"


def measure() -> dict[str, float]:
    """Median microseconds of each."""
    window = GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, WINDOW_TOKENS)
    full = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS)
    blocks, dice = TOKENS // BLOCK_TOKENS, random.Random(1)
    samples: dict[str, list[float]] = {LOOKUP: [], COMMIT: []}
    alone = Pool(PoolSpec(2 * blocks, (window,)))
    _compute(alone, dice.randbytes(blocks * DIGEST_BYTES))
    for _ in range(ROUNDS):
        digests = dice.randbytes(blocks * DIGEST_BYTES)
        cost, matched = cpu_us(alone.match, [("", digests)])
        assert matched == [0]
        samples[LOOKUP].append(cost)
        samples[COMMIT].append(_compute(Pool(PoolSpec(2 * blocks + 2, (full, window))), digests))
    return {name: statistics.median(costs) for name, costs in samples.items()}


def _compute(pool: Pool, digests: bytes) -> float:
    """Allocates and commits a prompt; returns what the commit cost, in microseconds."""
    assert pool.allocate(1, TOKENS, digests).result is Result.OK
    cost, _ = cpu_us(pool.commit, [(1, TOKENS, digests)])
    return cost
