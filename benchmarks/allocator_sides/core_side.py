"""Quire's pool in process: the allocator's core without its server, and the worker's hashing."""

from __future__ import annotations

import time
from array import array
from itertools import count

from quire.hashing import block_digests_bytes, root_digest
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result

from allocator_sides.workload import (
    BLOCK_TOKENS,
    DECODE_STEPS,
    DECODES,
    DIGEST_BYTES,
    HASH_COUNT,
    LONG_HIT_TOKENS,
    LONG_TOKENS,
    POOL_BLOCKS,
    SEQUENCES,
    SHORT_TOKENS,
    SLIDING_GROUPS,
    WINDOW_TOKENS,
    Costs,
    Decoded,
    Operation,
    Round,
    cpu_us,
)

ROOT = root_digest(fingerprint=b"benchmark", layout="none")


def new_pool(sliding: int = 0, block_count: int = POOL_BLOCKS) -> Pool:
    """Returns an empty pool with one group of full attention and `sliding` groups of sliding windows."""
    groups = [GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS)]
    groups += [GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, window=WINDOW_TOKENS)] * sliding
    return Pool(PoolSpec(block_count, tuple(groups)))


class CoreSide:
    """Drives the allocator's core in process, as the service would."""

    name = "core"

    def __init__(self, decoded: list[Decoded]) -> None:
        self._decoding = {sliding: _Decoding(sliding, decoded) for sliding in SLIDING_GROUPS}

    def measure(self, work: Round) -> Costs:
        """Runs one round of all operations."""
        costs = _long_prompts(work)
        for operation, tokens in ((Operation.HASH, work.tokens), (Operation.HASH_ARRAY, array("i", work.tokens))):
            costs[operation], _ = cpu_us(block_digests_bytes, [(ROOT, tokens, BLOCK_TOKENS)] * HASH_COUNT)
        costs[Operation.SHORT] = _short_prompts(work)
        costs[Operation.APPEND] = _append()
        for sliding, operation in DECODES.items():
            costs[operation] = self._decoding[sliding].measure()
        return costs


def _long_prompts(work: Round) -> Costs:
    pool, ids = new_pool(), count(1)
    costs: Costs = {}
    # The next lines use each block's memory once, so that the pool resembles the pool of a server that has run for a
    # while.
    unnamed = [next(ids) for _ in work.prompts]
    assert {pool.allocate(sequence, LONG_TOKENS).result for sequence in unnamed} == {Result.OK}
    _free(pool, unnamed)

    def admit(prompts: list[bytes], matched: int) -> tuple[float, float, list[int]]:
        """Returns the cost of allocating, of publishing the missing part, and the sequences."""
        held = [next(ids) for _ in prompts]
        calls = [(i, LONG_TOKENS, d) for i, d in zip(held, prompts, strict=True)]
        grants, results = cpu_us(pool.allocate, calls)
        assert {(result.result, result.matched_token_count) for result in results} == {(Result.OK, matched)}
        rest = [
            (i, LONG_TOKENS, d[matched * DIGEST_BYTES // BLOCK_TOKENS :]) for i, d in zip(held, prompts, strict=True)
        ]
        commits, results = cpu_us(pool.commit, rest)
        assert {result.result for result in results} == {Result.OK}
        return grants, commits, held

    costs[Operation.GRANT], commits, held = admit(work.prompts, 0)
    costs[Operation.ADMIT] = costs[Operation.GRANT] + commits
    children = [next(ids) for _ in held]
    costs[Operation.FORK], _ = cpu_us(pool.fork, list(zip(held, children, strict=True)))
    _free(pool, children)
    costs[Operation.FREE] = _free(pool, held)
    costs[Operation.GRANT_HIT], commits, held = admit(work.prompts, LONG_HIT_TOKENS)
    costs[Operation.ADMIT_HIT] = costs[Operation.GRANT_HIT] + commits
    _free(pool, held)
    for digests in work.fillers:
        _free(pool, admit([digests], 0)[2])
    costs[Operation.GRANT_EVICTING], commits, _ = admit(work.newcomers, 0)
    costs[Operation.ADMIT_EVICTING] = costs[Operation.GRANT_EVICTING] + commits
    return costs


def _free(pool: Pool, sequences: list[int]) -> float:
    cost, results = cpu_us(pool.free, [(sequence,) for sequence in sequences])
    assert set(results) == {Result.OK}
    return cost


def _short_prompts(work: Round) -> float:
    pool, ids = new_pool(), count(1)

    def admit_and_free(tokens: list[int]) -> None:
        digests = block_digests_bytes(ROOT, tokens, BLOCK_TOKENS)
        sequence = next(ids)
        assert pool.allocate(sequence, SHORT_TOKENS, digests).result is Result.OK
        pool.commit(sequence, SHORT_TOKENS, digests)
        pool.free(sequence)

    return cpu_us(admit_and_free, [(tokens,) for tokens in work.short])[0]


def _append() -> float:
    """Returns the microseconds per sequence of a step that fills no block."""
    pool, ids = new_pool(), array("Q", range(1, SEQUENCES + 1))
    for sequence_id in ids:
        assert pool.allocate(sequence_id, SHORT_TOKENS + 1).result is Result.OK
    steps = [(ids, [tokens] * SEQUENCES) for tokens in range(SHORT_TOKENS + 2, SHORT_TOKENS + BLOCK_TOKENS + 1)]
    cost, results = cpu_us(pool.grow_many, steps)
    assert not any(grants.rows or others for grants, others in results)
    return cost / SEQUENCES


class _Decoding:
    """Sequences that get one token in each step. Each filled block is published."""

    def __init__(self, sliding: int, decoded: list[Decoded]) -> None:
        self.pool = new_pool(sliding)
        self.decoded = decoded
        self.ids = array("Q", range(1, SEQUENCES + 1))
        self.token_counts = [sequence.prompt_tokens for sequence in decoded]
        for sequence_id, sequence in zip(self.ids, decoded, strict=True):
            tokens = sequence.prompt_tokens
            assert self.pool.allocate(sequence_id, tokens, sequence.prompt).result is Result.OK
            assert self.pool.commit(sequence_id, tokens, sequence.prompt).result is Result.OK

    def measure(self) -> float:
        """Returns the microseconds per sequence and step."""
        spent_ns = 0
        for _ in range(DECODE_STEPS):
            filled = [
                (sequence_id, tokens, digest)
                for sequence_id, tokens, sequence in zip(self.ids, self.token_counts, self.decoded, strict=True)
                if (digest := sequence.filled(tokens))
            ]
            self.token_counts = [tokens + 1 for tokens in self.token_counts]
            started = time.thread_time_ns()
            for sequence_id, tokens, digest in filled:
                self.pool.commit(sequence_id, tokens, digest)
            self.pool.grow_many(self.ids, self.token_counts)
            self.pool.log.publish(0)  # The service also publishes the log after each acknowledged step.
            spent_ns += time.thread_time_ns() - started
        return spent_ns / 1_000 / DECODE_STEPS / SEQUENCES
