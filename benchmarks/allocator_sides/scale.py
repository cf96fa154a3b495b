"""Costs of a larger pool: time of each operation, memory and start, from 1 k to 1 M blocks.

Every pool is full of cached prompts of 512 tokens, so that each admission evicts. Only the core is measured.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import statistics
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from pathlib import Path
from typing import Final

from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import Result

from allocator_sides.core_side import new_pool
from allocator_sides.workload import BLOCK_TOKENS, DIGEST_BYTES, SHORT_BLOCKS, SHORT_TOKENS, cpu_us

SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
HELD: Final = 8  # sequences in a round; together they fill a quarter of the smallest pool
ROUNDS: Final = 60
GROWN_TOKENS: Final = SHORT_TOKENS + 1


def measure_operations(block_count: int) -> dict[str, float]:
    """Returns the median microseconds of each operation on sequences of 512 tokens, in a pool of this many blocks."""
    pool, ids, dice = new_pool(block_count=block_count), count(1), random.Random(block_count)
    fill(pool, ids, dice)
    samples: dict[str, list[float]] = {}
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        for name, cost in _round(pool, ids, dice).items():
            samples.setdefault(name, []).append(cost)
    gc.unfreeze()
    return {name: statistics.median(costs) for name, costs in samples.items()}


def fill(pool: Pool, ids: count[int], dice: random.Random) -> None:
    """Publishes and frees prompts until every block has been used."""
    for _ in range(pool.spec.block_count // SHORT_BLOCKS):
        sequence, digests = next(ids), dice.randbytes(SHORT_BLOCKS * DIGEST_BYTES)
        assert pool.allocate(sequence, SHORT_TOKENS, digests).result is Result.OK
        pool.commit(sequence, SHORT_TOKENS, digests)
        pool.free(sequence)


def _round(pool: Pool, ids: count[int], dice: random.Random) -> dict[str, float]:
    costs: dict[str, float] = {}
    prompts = [dice.randbytes(SHORT_BLOCKS * DIGEST_BYTES) for _ in range(HELD)]

    def admit(name: str, matched: int) -> list[int]:
        held = [next(ids) for _ in prompts]
        calls = [(sequence, GROWN_TOKENS, digests) for sequence, digests in zip(held, prompts, strict=True)]
        costs[name], results = cpu_us(pool.allocate, calls)
        assert {(result.result, result.matched_token_count) for result in results} == {(Result.OK, matched)}
        return held

    held = admit("admit, evicting", 0)
    calls = [(sequence, SHORT_TOKENS, digests) for sequence, digests in zip(held, prompts, strict=True)]
    costs["commit"], _ = cpu_us(pool.commit, calls)
    children = [next(ids) for _ in held]
    costs["fork"], _ = cpu_us(pool.fork, list(zip(held, children, strict=True)))
    costs["free"], _ = cpu_us(pool.free, [(sequence,) for sequence in (*children, *held)])
    held = admit("admit, full hit", SHORT_TOKENS)
    steps = [(array("Q", held), [tokens] * HELD) for tokens in range(GROWN_TOKENS + 1, GROWN_TOKENS + BLOCK_TOKENS)]
    cost, _ = cpu_us(pool.grow_many, steps)
    costs["append, a sequence"] = cost / HELD
    for sequence in held:
        pool.free(sequence)
    return costs


def measure_memory(block_count: int) -> tuple[float, float]:
    """Returns the seconds to make an empty pool, and the resident bytes per block when all blocks are in use or cached.
    Long prompts have half of the blocks."""
    gc.collect()
    before = _resident_bytes()
    started = time.perf_counter()
    pool = new_pool(block_count=block_count)
    start_s = time.perf_counter() - started
    ids, dice = count(1), random.Random(0)
    while pool.blocks.free_count > block_count // 2:
        sequence, blocks = next(ids), 2_048
        digests = dice.randbytes(blocks * DIGEST_BYTES)
        assert pool.allocate(sequence, blocks * BLOCK_TOKENS, digests).result is Result.OK
        pool.commit(sequence, blocks * BLOCK_TOKENS, digests)
    for _ in range(pool.blocks.free_count // SHORT_BLOCKS):
        sequence, digests = next(ids), dice.randbytes(SHORT_BLOCKS * DIGEST_BYTES)
        assert pool.allocate(sequence, SHORT_TOKENS, digests).result is Result.OK
        pool.commit(sequence, SHORT_TOKENS, digests)
        if sequence % 2:
            pool.free(sequence)
    return start_s, (_resident_bytes() - before) / block_count


def measure_memory_apart(block_count: int) -> tuple[float, float]:
    """Calls `measure_memory` in a new process, where no other measurement has used memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(measure_memory, block_count).result()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
