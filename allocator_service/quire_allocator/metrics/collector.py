"""The allocator's metrics, read from directory and counters at scrape.

The class is not in `counters.py` because that module is compiled: a compiled class that derives from one that is not
does not work in every release of Python.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from quire._serving.logs import dropped_lines

from quire_allocator.core.ownership.directory import Directory
from quire_allocator.core.readers import retention
from quire_allocator.core.spec import Result
from quire_allocator.metrics.counters import Counters

METRIC_NAMES = frozenset(
    {
        "quire_allocator_blocks",
        "quire_allocator_group_blocks",
        "quire_allocator_sequences",
        "quire_allocator_pools",
        "quire_allocator_sessions",
        "quire_allocator_operations_total",
        "quire_allocator_steps_total",
        "quire_allocator_step_seconds",
        "quire_allocator_prefix_tokens_total",
        "quire_allocator_granted_blocks_total",
        "quire_allocator_evictions_total",
        "quire_allocator_dropped_blocks_total",
        "quire_allocator_copies_total",
        "quire_allocator_rpc_total",
        "quire_allocator_lease_expirations_total",
        "quire_allocator_quarantines_total",
        "quire_allocator_refused_pools",
        "quire_allocator_log_lines_dropped_total",
    }
)


class AllocatorCollector(Collector):
    """Reads directory and counters at scrape.

    It runs in the metrics server's thread: it copies what it iterates over, and a number may be one step old.
    """

    def __init__(self, directory: Directory, counters: Counters) -> None:
        self._directory = directory
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, as Prometheus' client asks for them at a scrape."""
        yield from self._process()
        yield from self._pool_gauges()
        yield from self._pool_counters()

    def _process(self) -> Iterator[Metric]:
        owners = self._directory.open_pools()
        yield GaugeMetricFamily("quire_allocator_pools", "Pools attached.", value=len(owners))
        sessions = GaugeMetricFamily("quire_allocator_sessions", "Open sessions by kind of owner.", labels=["kind"])
        sessions.add_metric(["stream"], sum(not owner.unary for owner in owners))
        sessions.add_metric(["unary"], sum(owner.unary for owner in owners))
        yield sessions
        rpcs = CounterMetricFamily("quire_allocator_rpc", "Calls ended, by method and code.", labels=["method", "code"])
        for (method, code), count in list(self._counters.rpcs.items()):
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
            value=self._counters.quarantine_count,
        )
        yield GaugeMetricFamily(
            "quire_allocator_refused_pools",
            "Pools that broke so often that nobody may attach them for now.",
            value=self._counters.refused_pool_count(),
        )
        yield dropped_lines("quire_allocator")

    def _pool_gauges(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("quire_allocator_blocks", "Blocks by state.", labels=["pool", "state"])
        groups = GaugeMetricFamily(
            "quire_allocator_group_blocks",
            "Blocks of the groups of one specification: held, cached to be hit (kept), or only until needed (spare).",
            labels=["pool", "group", "state"],
        )
        sequences = GaugeMetricFamily("quire_allocator_sequences", "Live sequences.", labels=["pool"])
        for owner in self._directory.open_pools():
            pool = owner.pool
            blocks.add_metric([owner.name, "empty"], pool.blocks.empty_count)
            blocks.add_metric([owner.name, "cached"], pool.blocks.cached_count)
            blocks.add_metric([owner.name, "held"], pool.blocks.block_count - pool.blocks.free_count)
            for use in retention.use(pool):
                groups.add_metric([owner.name, use.name, "held"], use.held)
                groups.add_metric([owner.name, use.name, "kept"], use.kept)
                groups.add_metric([owner.name, use.name, "spare"], use.spare)
            sequences.add_metric([owner.name], len(pool.sequences))
        yield blocks
        yield groups
        yield sequences

    def _pool_counters(self) -> Iterator[Metric]:
        operations = CounterMetricFamily(
            "quire_allocator_operations", "Operations applied, by result.", labels=["pool", "op", "code"]
        )
        steps = CounterMetricFamily("quire_allocator_steps", "Steps applied.", labels=["pool"])
        seconds = HistogramMetricFamily(
            "quire_allocator_step_seconds", "Time to check, apply and answer a step.", labels=["pool"]
        )
        tokens = CounterMetricFamily(
            "quire_allocator_prefix_tokens",
            "Tokens of new sequences: all, and those found in the cache; the same of preempted requests that return.",
            labels=["pool", "outcome"],
        )
        granted = CounterMetricFamily("quire_allocator_granted_blocks", "Blocks granted.", labels=["pool"])
        evictions = CounterMetricFamily("quire_allocator_evictions", "Cached blocks granted anew.", labels=["pool"])
        dropped = CounterMetricFamily(
            "quire_allocator_dropped_blocks", "Cached blocks that were to be forgotten.", labels=["pool"]
        )
        copies = CounterMetricFamily("quire_allocator_copies", "Copy-on-write copies ordered.", labels=["pool"])
        for owner in self._directory.open_pools():
            name, pool, numbers = owner.name, owner.pool, self._counters.seen(owner.name)
            for (operation, result), count in list(numbers.operations.items()):
                operations.add_metric([name, operation, Result(result).name], count)
            steps.add_metric([name], numbers.step_count)
            seconds.add_metric([name], numbers.step_seconds.buckets(), numbers.step_seconds.sum)
            tokens.add_metric([name, "queried"], pool.queried_token_count)
            tokens.add_metric([name, "hit"], pool.matched_token_count)
            tokens.add_metric([name, "returned"], pool.returned_token_count)
            tokens.add_metric([name, "returned_hit"], pool.returned_matched_token_count)
            granted.add_metric([name], pool.granted_block_count)
            evictions.add_metric([name], pool.blocks.evicted_count)
            dropped.add_metric([name], pool.blocks.dropped_count)
            copies.add_metric([name], pool.copy_count)
        yield from (operations, steps, seconds, tokens, granted, evictions, dropped, copies)
