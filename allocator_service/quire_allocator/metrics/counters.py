"""Counters as plain integers, which `collector.py` reads at scrape: counting costs nanoseconds, not microseconds.

Labels are pool (at most `limits.POOLS_MAX` at a time), group (at most 17 of a pool), operation, result, method and
code, and namespaces that the operator has named; never a sequence, digest or other namespace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from typing import Final

from quire._serving.metrics import Histogram
from quire.protocol.packing import entry_uint32, unpack_uint32
from quire.v1 import _packed_pb2 as packed

from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import Result
from quire_allocator.metrics.block_sample import BlockSample
from quire_allocator.routing.router import RouteCounts
from quire_allocator.wire.step_columns import StepColumns

STEP_SECONDS_BOUNDS = (
    1e-5,
    2.5e-5,
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    5e-2,
    0.25,
    1.0,
    10.0,
    60.0,
    600.0,
)
RECOVERY_SECONDS_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
OTHER: Final = "other"  # the label of namespaces that the operator has not named

_PHASES: Final = ("commit", "free", "fork", "grow")


class PoolCounters:
    """Counts what happened in one pool.

    Attributes:
        short_blocks: blocks that refused grows were short of, by result.
        foreign_evictions: evicted blocks, by the labels of the victim's namespace and of the taker's.
        step_seconds_sum: seconds of all steps. The sum in `step_seconds` stays 0, as its class is not compiled.
        attended_token_count: tokens that full attention had cached beyond the hits of new prompts.
        sample: a sample of the blocks of the pool in force; None before its first step.
        reported_block_count, recovered_block_count, recovered_sequence_count: sums over all reports that became pools.
    """

    def __init__(self, namespaces: Collection[str] = ()) -> None:
        self.short_blocks = {int(result): 0 for result in (Result.NO_SPACE, Result.QUOTA, Result.PASS_TOO_LONG)}
        self.foreign_evictions = {(OTHER, OTHER): 0}
        self.step_seconds = Histogram(STEP_SECONDS_BOUNDS)
        self.step_seconds_sum = 0.0
        self.recovery_seconds = Histogram(RECOVERY_SECONDS_BOUNDS)
        self.reported_block_count = self.recovered_block_count = self.recovered_sequence_count = 0
        self.disagreement_count = self.attended_token_count = 0
        self.sample: BlockSample | None = None
        self._namespaces = namespaces
        self._step_buckets: list[int] = self.step_seconds.counts
        self._commit_count = self._free_count = self._fork_count = self._grow_count = 0
        self._refused: dict[tuple[str, int], int] = {}  # refused operations by phase and result

    @property
    def operations(self) -> dict[tuple[str, int], int]:
        """Returns the counts of operations by phase and result, except counts of 0."""
        refused = dict(self._refused)
        counts = dict(refused)
        totals = (self._commit_count, self._free_count, self._fork_count, self._grow_count)
        for phase, total in zip(_PHASES, totals):  # noqa: B905 - mypyc compiles zip without strict=
            done = total - sum([count for (name, _), count in refused.items() if name == phase])
            if done:
                counts[phase, int(Result.OK)] = done
        return counts

    def observe_step(self, pool: Pool, step: StepColumns, reply: packed.StepReply, seconds: float) -> None:
        """Counts a step that took `seconds`."""
        self._step_buckets[bisect_left(STEP_SECONDS_BOUNDS, seconds)] += 1
        self.step_seconds_sum += seconds
        self._commit_count += len(step.commit_sequences)
        self._free_count += len(step.frees)
        self._fork_count += len(step.parents)
        self._grow_count += len(step.grow_sequences)
        if pool.blocks.foreign_evictions:
            self._take_evictions(pool)
        if step.has_refused:
            self._count_refused(reply)
        if step.has_new and reply.unmatched.attended_token_counts:
            self._count_attended(step, reply)

    def observe_blocks(self, pool: Pool, step: StepColumns, reply: packed.StepReply, now: float) -> None:
        """Adds the blocks of a step that was applied at `now` to the sample."""
        if self.sample is None or self.sample.log is not pool.log:
            self.sample = BlockSample(pool)
        self.sample.observe(pool, step, reply, now)

    def observe_recovery(self, pool: Pool, reported_block_count: int, seconds: float) -> None:
        """Counts a report that became a pool, `seconds` after it was asked for."""
        self.recovery_seconds.observe(seconds)
        self.reported_block_count += reported_block_count
        self.recovered_block_count += pool.blocks.used_count
        self.recovered_sequence_count += len(pool.sequences)

    def _count_attended(self, step: StepColumns, reply: packed.StepReply) -> None:
        """Counts the tokens that full attention had cached beyond the hits of new prompts."""
        results = reply.grow_results if step.has_refused else ()
        for row in range(len(step.grow_sequences)):
            attended = entry_uint32(reply.unmatched.attended_token_counts, row)
            if attended and not (results and results[row]) and not (step.returns and step.returns[row]):
                self.attended_token_count += attended - entry_uint32(reply.matched_token_counts, row)

    def _take_evictions(self, pool: Pool) -> None:
        for (victim, taker), count in pool.blocks.foreign_evictions.items():
            key = self._label(victim), self._label(taker)
            self.foreign_evictions[key] = self.foreign_evictions.get(key, 0) + count
        pool.blocks.foreign_evictions.clear()

    def _label(self, namespace: str) -> str:
        return namespace if namespace in self._namespaces else OTHER

    def _count_refused(self, reply: packed.StepReply) -> None:
        for result, short in zip(reply.grow_results, unpack_uint32(reply.refusals.shortfalls), strict=False):
            if short:
                self.short_blocks[result] = self.short_blocks.get(result, 0) + short
        results = (reply.commit_results, reply.free_results, reply.fork_results, reply.grow_results)
        for phase, of_phase in zip(_PHASES, results):  # noqa: B905 - mypyc compiles zip without strict=
            for result in of_phase:
                if int(result) != Result.OK:
                    self._refused[phase, result] = self._refused.get((phase, result), 0) + 1


class Counters:
    """Counts what happened in the whole process. The counters of a pool are dropped with the pool.

    Args:
        namespaces: the namespaces that labels may name.

    Attributes:
        namespaces: the same names in order, without `OTHER`.
    """

    def __init__(self, namespaces: Collection[str] = ()) -> None:
        self.rpcs: Counter[tuple[str, str]] = Counter()  # (method, code)
        self.quarantine_count = 0
        self.refused_pool_count: Callable[[], int] = lambda: 0  # `AllocatorService` sets this function
        self.routes = RouteCounts()  # `AllocatorService` replaces these counters by its router's
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
        that case, the returned counters are new, and are not stored."""
        return self._pools.get(pool) or PoolCounters()

    def forget(self, pool: str) -> None:
        """Drops the counters of a pool that is gone."""
        self._pools.pop(pool, None)
