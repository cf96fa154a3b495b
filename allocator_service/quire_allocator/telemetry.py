"""Counters as plain integers, read by a custom collector at scrape: counting costs nanoseconds, not microseconds.

Labels are pool (at most `limits.POOLS_MAX` at a time), operation, result, method and code; never a sequence, tenant or
digest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from quire._serving.metrics import Histogram
from quire.v1 import allocator_pb2 as pb

from quire_allocator.arrays import StepArrays
from quire_allocator.core.directory import Directory
from quire_allocator.core.spec import Result

STEP_SECONDS_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)

_OK = int(Result.OK)
METRIC_NAMES = frozenset(
    {
        "quire_allocator_blocks",
        "quire_allocator_sequences",
        "quire_allocator_pools",
        "quire_allocator_sessions",
        "quire_allocator_operations_total",
        "quire_allocator_steps_total",
        "quire_allocator_step_seconds",
        "quire_allocator_prefix_tokens_total",
        "quire_allocator_granted_blocks_total",
        "quire_allocator_evictions_total",
        "quire_allocator_copies_total",
        "quire_allocator_rpc_total",
        "quire_allocator_lease_expirations_total",
        "quire_allocator_quarantines_total",
        "quire_allocator_refused_pools",
    }
)


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


class AllocatorCollector(Collector):
    """Reads directory and telemetry at scrape.

    It runs in the metrics server's thread: it copies what it iterates over, and a number may be one step old.
    """

    def __init__(self, directory: Directory, telemetry: Telemetry) -> None:
        self._directory = directory
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        """The families of `METRIC_NAMES`."""
        yield from self._process()
        yield from self._gauges()
        yield from self._counters()

    def _process(self) -> Iterator[Metric]:
        owners = self._directory.open_pools()
        yield GaugeMetricFamily("quire_allocator_pools", "Pools attached.", value=len(owners))
        sessions = GaugeMetricFamily("quire_allocator_sessions", "Open sessions by kind of owner.", labels=["kind"])
        sessions.add_metric(["stream"], sum(not owner.unary for owner in owners))
        sessions.add_metric(["unary"], sum(owner.unary for owner in owners))
        yield sessions
        rpcs = CounterMetricFamily("quire_allocator_rpc", "Calls ended, by method and code.", labels=["method", "code"])
        for (method, code), count in list(self._telemetry.rpcs.items()):
            rpcs.add_metric([method, code], count)
        yield rpcs
        yield CounterMetricFamily(
            "quire_allocator_lease_expirations",
            "Pools dropped because their owner fell silent.",
            value=self._directory.expired_count,
        )
        yield CounterMetricFamily(
            "quire_allocator_quarantines",
            "Pools stopped because an invariant of theirs broke.",
            value=self._telemetry.quarantine_count,
        )
        yield GaugeMetricFamily(
            "quire_allocator_refused_pools",
            "Pools that broke so often that nobody may attach them for now.",
            value=self._telemetry.refused_pool_count(),
        )

    def _gauges(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("quire_allocator_blocks", "Blocks by state.", labels=["pool", "state"])
        sequences = GaugeMetricFamily("quire_allocator_sequences", "Live sequences.", labels=["pool"])
        for owner in self._directory.open_pools():
            pool = owner.pool
            blocks.add_metric([owner.name, "empty"], pool.blocks.empty_count)
            blocks.add_metric([owner.name, "cached"], pool.blocks.cached_count)
            blocks.add_metric([owner.name, "held"], pool.blocks.block_count - pool.blocks.free_count)
            sequences.add_metric([owner.name], len(pool.sequences))
        yield blocks
        yield sequences

    def _counters(self) -> Iterator[Metric]:
        operations = CounterMetricFamily(
            "quire_allocator_operations", "Operations applied, by result.", labels=["pool", "op", "code"]
        )
        steps = CounterMetricFamily("quire_allocator_steps", "Steps applied.", labels=["pool"])
        seconds = HistogramMetricFamily(
            "quire_allocator_step_seconds", "Time to check, apply and answer a step.", labels=["pool"]
        )
        tokens = CounterMetricFamily(
            "quire_allocator_prefix_tokens",
            "Tokens of new sequences: all, and those found in the cache.",
            labels=["pool", "outcome"],
        )
        granted = CounterMetricFamily("quire_allocator_granted_blocks", "Blocks granted.", labels=["pool"])
        evictions = CounterMetricFamily("quire_allocator_evictions", "Cached blocks granted anew.", labels=["pool"])
        copies = CounterMetricFamily("quire_allocator_copies", "Copy-on-write copies ordered.", labels=["pool"])
        for owner in self._directory.open_pools():
            name, pool, numbers = owner.name, owner.pool, self._telemetry.of(owner.name)
            for (operation, result), count in list(numbers.operations.items()):
                operations.add_metric([name, operation, Result(result).name], count)
            steps.add_metric([name], numbers.step_count)
            seconds.add_metric([name], numbers.step_seconds.buckets(), numbers.step_seconds.sum)
            tokens.add_metric([name, "queried"], pool.queried_token_count)
            tokens.add_metric([name, "hit"], pool.matched_token_count)
            granted.add_metric([name], pool.granted_block_count)
            evictions.add_metric([name], pool.blocks.evicted_count)
            copies.add_metric([name], pool.copy_count)
        yield from (operations, steps, seconds, tokens, granted, evictions, copies)
