"""Counters as plain integers, which `collector.py` reads at scrape: counting costs nanoseconds, not microseconds.

Labels are pool (at most `limits.POOLS_MAX` at a time), group (at most 17 of a pool), operation, result, method and
code; never a sequence, tenant or digest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from quire._serving.metrics import Histogram
from quire.v1 import _packed_pb2 as packed

from quire_allocator.core.spec import Result
from quire_allocator.wire.step_columns import StepColumns

STEP_SECONDS_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)

_COMMITTED: Final = ("commit", int(Result.OK))
_FREED: Final = ("free", int(Result.OK))
_FORKED: Final = ("fork", int(Result.OK))
_GROWN: Final = ("grow", int(Result.OK))


class PoolCounters:
    """Counts what happened in one pool."""

    def __init__(self) -> None:
        self.operations: dict[tuple[str, int], int] = {}  # (operation, result)
        self.step_count = 0
        self.step_seconds = Histogram(STEP_SECONDS_BOUNDS)

    def count(self, operation: str, result: int, number: int = 1) -> None:
        """Counts operations of one kind and result."""
        self._add((operation, result), number)

    def observe_step(self, step: StepColumns, reply: packed.StepReply, seconds: float) -> None:
        """Counts a step that was applied and took `seconds`: one update per phase where every result is OK."""
        self.step_count += 1
        self.step_seconds.observe(seconds)
        if step.has_refused:
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

    def _count_phase(self, done: tuple[str, int], number: int, results: Sequence[int]) -> None:
        for result in results:
            self._add((done[0], result), 1)
        if number and not results:
            self._add(done, number)

    def _add(self, key: tuple[str, int], number: int) -> None:
        self.operations[key] = self.operations.get(key, 0) + number


class Counters:
    """Counts what happened in the whole process. The counters of a pool are dropped with the pool."""

    def __init__(self) -> None:
        self.rpcs: Counter[tuple[str, str]] = Counter()  # (method, code)
        self.quarantine_count = 0
        self.refused_pool_count: Callable[[], int] = lambda: 0  # `AllocatorService` sets it
        self._pools: defaultdict[str, PoolCounters] = defaultdict(PoolCounters)

    def count_rpc(self, method: str, code: str) -> None:
        """Counts one call that ended with this status code."""
        self.rpcs[method, code] += 1

    def of(self, pool: str) -> PoolCounters:
        """Returns the counters of one pool, to be increased."""
        return self._pools[pool]

    def seen(self, pool: str) -> PoolCounters:
        """Returns the counters of one pool, to be read. Another thread calls this, when the pool may be gone already:
        then the counters returned are new and not kept."""
        return self._pools.get(pool) or PoolCounters()

    def forget(self, pool: str) -> None:
        """Drops the counters of a pool that is gone."""
        self._pools.pop(pool, None)
