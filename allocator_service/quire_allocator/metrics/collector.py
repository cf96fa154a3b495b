"""The allocator's metrics, read from directory and counters at scrape.

The class is not in `counters.py` because that module is compiled: compiled classes with an interpreted base class fail
in some releases of Python.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from quire._serving.logs import dropped_lines

from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.readers import retention, usage
from quire_allocator.core.spec import GroupKind, Result
from quire_allocator.metrics.block_sample import OUTCOMES, SIZES
from quire_allocator.metrics.counters import OTHER, Counters, PoolCounters
from quire_allocator.metrics.route_metrics import route_metrics

METRIC_NAMES = frozenset(
    {
        "quire_allocator_blocks",
        "quire_allocator_group_blocks",
        "quire_allocator_group_bytes",
        "quire_allocator_namespace_blocks",
        "quire_allocator_sequences",
        "quire_allocator_pools",
        "quire_allocator_sessions",
        "quire_allocator_operations_total",
        "quire_allocator_steps_total",
        "quire_allocator_step_seconds",
        "quire_allocator_prefix_tokens_total",
        "quire_allocator_group_prefix_tokens_total",
        "quire_allocator_granted_blocks_total",
        "quire_allocator_short_blocks_total",
        "quire_allocator_sampled_tokens_total",
        "quire_allocator_what_if_tokens_total",
        "quire_allocator_block_lifetime_seconds",
        "quire_allocator_block_idle_seconds",
        "quire_allocator_block_reuse_gap_seconds",
        "quire_allocator_saved_blocks",
        "quire_allocator_foreign_evictions_total",
        "quire_allocator_recovery_seconds",
        "quire_allocator_recovered_blocks_total",
        "quire_allocator_recovered_sequences_total",
        "quire_allocator_state_disagreements_total",
        "quire_allocator_evictions_total",
        "quire_allocator_dropped_blocks_total",
        "quire_allocator_copies_total",
        "quire_allocator_rpc_total",
        "quire_allocator_lease_expirations_total",
        "quire_allocator_quarantines_total",
        "quire_allocator_refused_pools",
        "quire_allocator_reservations_total",
        "quire_allocator_routed_tokens_total",
        "quire_allocator_routes_total",
        "quire_allocator_log_lines_dropped_total",
    }
)


class AllocatorCollector(Collector):
    """Reads directory and counters at scrape.

    The collector runs in the metrics server's thread, so it copies collections before it iterates over them. A number
    may be one step old.
    """

    def __init__(self, directory: Directory, counters: Counters) -> None:
        self._directory = directory
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, as Prometheus' client asks for them at a scrape."""
        yield from self._process()
        yield from self._pool_gauges()
        yield from self._namespaces()
        yield from self._pool_counters()
        yield self._group_hits()
        yield from self._evictions()
        yield from self._recoveries()
        yield from self._sampled()
        yield from route_metrics(self._counters.routes)

    def _counted(self) -> Iterator[tuple[Ownership, PoolCounters]]:
        return ((owner, self._counters.seen(owner.name)) for owner in self._directory.open_pools())

    def _process(self) -> Iterator[Metric]:
        owners = self._directory.open_pools()
        yield GaugeMetricFamily("quire_allocator_pools", "Pools attached.", value=len(owners))
        sessions = GaugeMetricFamily("quire_allocator_sessions", "Open sessions by kind of owner.", labels=["kind"])
        sessions.add_metric(["stream"], sum(not owner.unary for owner in owners))
        sessions.add_metric(["unary"], sum(owner.unary for owner in owners))
        yield sessions
        rpcs = CounterMetricFamily("quire_allocator_rpc", "Ended calls, by method and code.", labels=["method", "code"])
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
            "Pools that were stopped because one of their invariants broke.",
            value=self._counters.quarantine_count,
        )
        yield GaugeMetricFamily(
            "quire_allocator_refused_pools",
            "Pools that broke so often that they cannot be attached for now.",
            value=self._counters.refused_pool_count(),
        )
        yield dropped_lines("quire_allocator")

    def _pool_gauges(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("quire_allocator_blocks", "Blocks by state.", labels=["pool", "state"])
        groups = GaugeMetricFamily(
            "quire_allocator_group_blocks",
            "Blocks of the groups of one specification: held, cached to be hit (kept), or cached until another "
            "needs them (spare).",
            labels=["pool", "group", "state"],
        )
        group_bytes = GaugeMetricFamily(
            "quire_allocator_group_bytes",
            "Bytes of `quire_allocator_group_blocks`, for pools whose owner reports the bytes of a block.",
            labels=["pool", "group", "state"],
        )
        sequences = GaugeMetricFamily("quire_allocator_sequences", "Live sequences.", labels=["pool"])
        saved = GaugeMetricFamily(
            "quire_allocator_saved_blocks",
            "Additional blocks that sequences would hold if no block were shared.",
            labels=["pool"],
        )
        for owner in self._directory.open_pools():
            pool = owner.pool
            blocks.add_metric([owner.name, "empty"], pool.blocks.empty_count)
            blocks.add_metric([owner.name, "cached"], pool.blocks.cached_count)
            blocks.add_metric([owner.name, "held"], pool.blocks.block_count - pool.blocks.free_count)
            for use in retention.use(pool):
                for state, count in (("held", use.held), ("kept", use.kept), ("spare", use.spare)):
                    groups.add_metric([owner.name, use.name, state], count)
                    if owner.spec.block_bytes:
                        group_bytes.add_metric([owner.name, use.name, state], count * owner.spec.block_bytes)
            sequences.add_metric([owner.name], len(pool.sequences))
            saved.add_metric([owner.name], max(0, usage.table_entry_count(pool) - usage.held_count(pool)))
        yield blocks
        yield groups
        yield group_bytes
        yield sequences
        yield saved

    def _namespaces(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "quire_allocator_namespace_blocks",
            "Blocks that sequences of a namespace hold, and blocks cached for it.",
            labels=["pool", "namespace", "state"],
        )
        for owner in self._directory.open_pools():
            blocks = owner.pool.blocks
            held, cached = blocks.block_count - blocks.free_count, blocks.cached_count
            for name in self._counters.namespaces:
                space = blocks.namespaces.get(name)
                own_held, own_cached = (0, 0) if space is None else (space.held_count, space.cached_count)
                family.add_metric([owner.name, name, "held"], own_held)
                family.add_metric([owner.name, name, "cached"], own_cached)
                held, cached = held - own_held, cached - own_cached
            # The pool may change during the sums above, so a difference may be negative.
            family.add_metric([owner.name, OTHER, "held"], max(0, held))
            family.add_metric([owner.name, OTHER, "cached"], max(0, cached))
        yield family

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
            "Tokens of new sequences, all and cached; and the same for preempted requests that return.",
            labels=["pool", "outcome"],
        )
        granted = CounterMetricFamily("quire_allocator_granted_blocks", "Blocks granted.", labels=["pool"])
        short = CounterMetricFamily(
            "quire_allocator_short_blocks",
            "Blocks that were missing for refused grows, by result.",
            labels=["pool", "code"],
        )
        dropped = CounterMetricFamily(
            "quire_allocator_dropped_blocks", "Cached blocks that owners and DropCache dropped.", labels=["pool"]
        )
        copies = CounterMetricFamily(
            "quire_allocator_copies", "Copy-on-write copies that owners were told to make.", labels=["pool"]
        )
        for owner, numbers in self._counted():
            name, pool = owner.name, owner.pool
            for result, count in list(numbers.short_blocks.items()):
                short.add_metric([name, Result(result).name], count)
            for (operation, result), count in numbers.operations.items():
                operations.add_metric([name, operation, Result(result).name], count)
            buckets = numbers.step_seconds.buckets()
            steps.add_metric([name], buckets[-1][1])
            seconds.add_metric([name], buckets, numbers.step_seconds_sum)
            tokens.add_metric([name, "queried"], pool.queried_token_count)
            tokens.add_metric([name, "hit"], pool.matched_token_count)
            tokens.add_metric([name, "returned"], pool.returned_token_count)
            tokens.add_metric([name, "returned_hit"], pool.returned_matched_token_count)
            granted.add_metric([name], pool.granted_block_count)
            dropped.add_metric([name], pool.blocks.dropped_count)
            copies.add_metric([name], pool.copy_count)
        yield from (operations, steps, seconds, tokens, granted, short, dropped, copies)

    def _group_hits(self) -> Metric:
        hits = CounterMetricFamily(
            "quire_allocator_group_prefix_tokens",
            "Tokens of new sequences that the groups of one specification had cached. A hit is what all groups can "
            "serve, so only full attention may have more, counted to where a checkpoint could be.",
            labels=["pool", "group"],
        )
        for owner, numbers in self._counted():
            of_group = dict[str, int]()
            for manager, use in zip(owner.pool.managers, retention.use(owner.pool), strict=False):
                is_full = manager.spec.kind is GroupKind.FULL_ATTENTION
                of_group[use.name] = owner.pool.matched_token_count + is_full * numbers.attended_token_count
            for name, count in of_group.items():
                hits.add_metric([owner.name, name], count)
        return hits

    def _evictions(self) -> Iterator[Metric]:
        evictions = CounterMetricFamily(
            "quire_allocator_evictions",
            "Evicted cached blocks: for their own namespace, for another one, or above the quota.",
            labels=["pool", "reason"],
        )
        foreign = CounterMetricFamily(
            "quire_allocator_foreign_evictions",
            "Cached blocks of one namespace (victim) evicted for another (taker).",
            labels=["pool", "victim", "taker"],
        )
        for owner, numbers in self._counted():
            blocks = owner.pool.blocks
            quota, other = blocks.quota_evicted_count, blocks.foreign_evicted_count
            evictions.add_metric([owner.name, "own"], blocks.evicted_count - quota - other)
            evictions.add_metric([owner.name, "other"], other)
            evictions.add_metric([owner.name, "quota"], quota)
            for (victim, taker), count in list(numbers.foreign_evictions.items()):
                foreign.add_metric([owner.name, victim, taker], count)
        yield from (evictions, foreign)

    def _recoveries(self) -> Iterator[Metric]:
        seconds = HistogramMetricFamily(
            "quire_allocator_recovery_seconds",
            "Time from asking an owner for its report to the rebuilt pool, without reports of empty pools.",
            labels=["pool"],
        )
        blocks = CounterMetricFamily(
            "quire_allocator_recovered_blocks",
            "Blocks in owners' reports: all, and those that the pool kept.",
            labels=["pool", "state"],
        )
        sequences = CounterMetricFamily(
            "quire_allocator_recovered_sequences",
            "Sequences in owners' reports. All of them continue, or the report is refused.",
            labels=["pool"],
        )
        disagreements = CounterMetricFamily(
            "quire_allocator_state_disagreements",
            "Open sessions that their owner gave up to report its pool again.",
            labels=["pool"],
        )
        for owner, numbers in self._counted():
            seconds.add_metric([owner.name], numbers.recovery_seconds.buckets(), numbers.recovery_seconds.sum)
            blocks.add_metric([owner.name, "reported"], numbers.reported_block_count)
            blocks.add_metric([owner.name, "kept"], numbers.recovered_block_count)
            sequences.add_metric([owner.name], numbers.recovered_sequence_count)
            disagreements.add_metric([owner.name], numbers.disagreement_count)
        yield from (seconds, blocks, sequences, disagreements)

    def _sampled(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "quire_allocator_sampled_tokens",
            "Tokens of new prompts, estimated from a sample of blocks: found in the cache, cut by another group,"
            " evicted before, being computed by another prompt, or new.",
            labels=["pool", "outcome"],
        )
        what_if = CounterMetricFamily(
            "quire_allocator_what_if_tokens",
            "Sampled tokens that pools of other sizes would have hit with LRU eviction.",
            labels=["pool", "size"],
        )
        lifetimes, idles, gaps = (
            HistogramMetricFamily(
                f"quire_allocator_block_{name}_seconds", f"Time of sampled blocks {text}.", labels=["pool"]
            )
            for name, text in (
                ("lifetime", "from their publication to their eviction"),
                ("idle", "from their last use by a new prompt to their eviction"),
                ("reuse_gap", "from one use by a new prompt to the next"),
            )
        )
        for owner, numbers in self._counted():
            name, sample = owner.name, numbers.sample
            if sample is None or not sample.tokens:
                continue
            for outcome, count in zip(OUTCOMES, sample.outcomes, strict=True):
                tokens.add_metric([name, outcome], count * sample.tokens)
            for size, count in zip(SIZES, sample.would_hit, strict=True):
                what_if.add_metric([name, f"{size:g}"], count * sample.tokens)
            for family, histogram in ((lifetimes, sample.lifetimes), (idles, sample.idles), (gaps, sample.gaps)):
                family.add_metric([name], histogram.buckets(), histogram.sum)
        yield from (tokens, what_if, lifetimes, idles, gaps)
