"""Counters as plain integers, read by `collector.py` at scrape: counting costs nanoseconds, not microseconds.

Labels are pool (at most `limits.POOLS_MAX` at a time), operation, result, method and code; never a sequence, tenant or
digest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from quire._serving.metrics import Histogram
from quire.v1 import allocator_pb2 as pb

from quire_allocator.arrays import StepArrays
from quire_allocator.core.spec import Result

STEP_SECONDS_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)

_OK = int(Result.OK)


class PoolTelemetry:
    """What happened in one pool."""

    def __init__(self) -> None:
        self.operations: Counter[tuple[str, int]] = Counter()  # (operation, result)
        self.step_count = 0
        self.step_seconds = Histogram(STEP_SECONDS_BOUNDS)

    def count(self, operation: str, result: int, number: int = 1) -> None:
        """Counts operations of one kind and result."""
        self.operations[operation, result] += number

    def observe_step(self, step: StepArrays, reply: pb.StepReply, seconds: float) -> None:
        """Counts a step that was applied: one update per phase unless something was refused."""
        self.step_count += 1
        self.step_seconds.observe(seconds)
        if step.commit_sequences:
            self._count_phase("commit", len(step.commit_sequences), reply.commit_results)
        if step.frees:
            self._count_phase("free", len(step.frees), reply.free_results)
        if step.parents:
            self._count_phase("fork", len(step.parents), reply.fork_results)
        if step.grow_sequences:
            self._count_phase("grow", len(step.grow_sequences), reply.grow_results)

    def _count_phase(self, operation: str, number: int, results: Sequence[int]) -> None:
        if results:
            for result in results:
                self.operations[operation, result] += 1
        else:
            self.operations[operation, _OK] += number


class Telemetry:
    """Of the whole process. A pool's numbers go with the pool."""

    def __init__(self) -> None:
        self.rpcs: Counter[tuple[str, str]] = Counter()  # (method, code)
        self.quarantine_count = 0
        self.refused_pool_count: Callable[[], int] = lambda: 0  # set by who knows
        self._pools: defaultdict[str, PoolTelemetry] = defaultdict(PoolTelemetry)

    def count_rpc(self, method: str, code: str) -> None:
        """One call ended."""
        self.rpcs[method, code] += 1

    def of(self, pool: str) -> PoolTelemetry:
        """Numbers of one pool."""
        return self._pools[pool]

    def forget(self, pool: str) -> None:
        """The pool is gone."""
        self._pools.pop(pool, None)
