"""Counters as plain integers, which `collector.py` reads at scrape: counting costs nanoseconds, not microseconds.

Labels are pool (at most `limits.POOLS_MAX` at a time), group (at most 17 of a pool), operation, result, method and
code, and namespaces that the operator has named; never a sequence, digest or other namespace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Final

from quire._serving.metrics import Histogram
from quire.protocol.packing import unpack_uint32
from quire.v1 import _packed_pb2 as packed

from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import Result
from quire_allocator.metrics.block_sample import BlockSample
from quire_allocator.wire.step_columns import StepColumns

STEP_SECONDS_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)
RECOVERY_SECONDS_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
OTHER: Final = "other"  # the label of namespaces that the operator has not named

_COMMITTED: Final = ("commit", int(Result.OK))
_FREED: Final = ("free", int(Result.OK))
_FORKED: Final = ("fork", int(Result.OK))
_GROWN: Final = ("grow", int(Result.OK))


class PoolCounters:
    """Counts what happened in one pool.

    Attributes:
        operations: counts by operation and result.
        short_blocks: blocks that refused grows were short of, by result.
        foreign_evictions: blocks by the labels of the namespace that lost and of the one that took them.
        sample: a sample of the blocks of the pool in force; None before its first step.
        reported_block_count, recovered_block_count, recovered_sequence_count: sums over all reports that became pools.
    """

    def __init__(self, namespaces: Collection[str] = ()) -> None:
        self.operations: dict[tuple[str, int], int] = {}
        self.short_blocks = {int(result): 0 for result in (Result.NO_SPACE, Result.QUOTA, Result.PASS_TOO_LONG)}
        self.foreign_evictions = {(OTHER, OTHER): 0}
        self.step_count = 0
        self.step_seconds = Histogram(STEP_SECONDS_BOUNDS)
        self.recovery_seconds = Histogram(RECOVERY_SECONDS_BOUNDS)
        self.reported_block_count = self.recovered_block_count = self.recovered_sequence_count = 0
        self.disagreement_count = 0
        self.sample: BlockSample | None = None
        self._namespaces = namespaces

    def count(self, operation: str, result: int, number: int = 1) -> None:
        """Counts operations of one kind and result."""
        self._add((operation, result), number)

    def observe_step(self, pool: Pool, step: StepColumns, reply: packed.StepReply, seconds: float, now: float) -> None:
        """Counts a step that was applied at `now` and took `seconds`: one update per phase if all results are OK."""
        self.step_count += 1
        self.step_seconds.observe(seconds)
        if self.sample is None or self.sample.log is not pool.log:
            self.sample = BlockSample(pool)
        self.sample.observe(pool, step, reply, now)
        if pool.blocks.foreign_evictions:
            self._take_evictions(pool)
        if step.has_refused:
            self._count_short(reply)
            self._count_phase(_COMMITTED, len(step.commit_sequences), reply.commit_results)
            self._count_phase(_FREED, len(step.frees), reply.free_results)
            self._count_phase(_FORKED, len(step.parents), reply.fork_results)
            self._count_phase(_GROWN, len(step.grow_sequences), reply.grow_results)
            return
        if step.commit_sequences:
            self._add(_COMMITTED, len(step.commit_sequences))
        if step.frees:
            self._add(_FREED, len(step.frees))
        if step.parents:
            self._add(_FORKED, len(step.parents))
        if step.grow_sequences:
            self._add(_GROWN, len(step.grow_sequences))

    def observe_recovery(self, pool: Pool, reported_block_count: int, seconds: float) -> None:
        """Counts a report that became a pool, `seconds` after it was asked for."""
        self.recovery_seconds.observe(seconds)
        self.reported_block_count += reported_block_count
        self.recovered_block_count += pool.blocks.used_count
        self.recovered_sequence_count += len(pool.sequences)

    def _take_evictions(self, pool: Pool) -> None:
        for (victim, taker), count in pool.blocks.foreign_evictions.items():
            key = self._label(victim), self._label(taker)
            self.foreign_evictions[key] = self.foreign_evictions.get(key, 0) + count
        pool.blocks.foreign_evictions.clear()

    def _label(self, namespace: str) -> str:
        return namespace if namespace in self._namespaces else OTHER

    def _count_short(self, reply: packed.StepReply) -> None:
        for result, short in zip(reply.grow_results, unpack_uint32(reply.refusals.shortfalls), strict=False):
            if short:
                self.short_blocks[result] = self.short_blocks.get(result, 0) + short

    def _count_phase(self, done: tuple[str, int], number: int, results: Sequence[int]) -> None:
        for result in results:
            self._add((done[0], result), 1)
        if number and not results:
            self._add(done, number)

    def _add(self, key: tuple[str, int], number: int) -> None:
        self.operations[key] = self.operations.get(key, 0) + number


class Counters:
    """Counts what happened in the whole process. The counters of a pool are dropped with the pool.

    Args:
        namespaces: the namespaces that labels may name.

    Attributes:
        namespaces: the same in order, without `OTHER`.
    """

    def __init__(self, namespaces: Collection[str] = ()) -> None:
        self.rpcs: Counter[tuple[str, str]] = Counter()  # (method, code)
        self.quarantine_count = 0
        self.refused_pool_count: Callable[[], int] = lambda: 0  # `AllocatorService` sets it
        self.namespaces = sorted({*namespaces} - {OTHER})
        self._pools: defaultdict[str, PoolCounters] = defaultdict(lambda: PoolCounters(namespaces))

    def count_rpc(self, method: str, code: str) -> None:
        """Counts one call that ended with this status code."""
        self.rpcs[method, code] += 1

    def of(self, pool: str) -> PoolCounters:
        """Returns the counters of one pool, to be increased."""
        return self._pools[pool]

    def seen(self, pool: str) -> PoolCounters:
        """Returns the counters of one pool, to be read. Another thread calls this, and the pool may be gone by then. In
        that case the returned counters are new, and are not kept."""
        return self._pools.get(pool) or PoolCounters()

    def forget(self, pool: str) -> None:
        """Drops the counters of a pool that is gone."""
        self._pools.pop(pool, None)
