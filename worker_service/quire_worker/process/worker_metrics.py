"""Metrics of one worker, and the collector that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from quire._serving.logs import dropped_lines

from quire_worker.engine import Engine
from quire_worker.execution.failures import FailureKind

METRIC_NAMES = frozenset(
    {
        "quire_worker_samples",
        "quire_worker_requests_total",
        "quire_worker_tokens_total",
        "quire_worker_speculation_tokens_total",
        "quire_worker_preemptions_total",
        "quire_worker_backfilled_total",
        "quire_worker_swapped_bytes_total",
        "quire_worker_queue_seconds",
        "quire_worker_inter_token_seconds",
        "quire_worker_request_seconds",
        "quire_worker_batch_samples",
        "quire_worker_recomputed_tokens_total",
        "quire_worker_failures_total",
        "quire_worker_retries_total",
        "quire_worker_block_reports_total",
        "quire_worker_state_disagreements_total",
        "quire_worker_step_seconds",
        "quire_worker_time_to_first_token_seconds",
        "quire_worker_allocator_wait_seconds_total",
        "quire_worker_allocator_connected",
        "quire_worker_forward_seconds_total",
        "quire_worker_sampling_seconds_total",
        "quire_worker_swap_seconds_total",
        "quire_worker_saved_prefill_seconds_total",
        "quire_worker_queued_seconds_total",
        "quire_worker_kv_event_lag_seconds",
        "quire_worker_blocks",
        "quire_worker_kv_bytes",
        "quire_worker_kv_events_total",
        "quire_worker_log_lines_dropped_total",
    }
)


class WorkerCollector(Collector):
    """Reads engine and telemetry in the thread of the metrics server. A number may be one step old.

    Args:
        engine: the worker's engine.
        beside: yields further families; None for no further families.
    """

    def __init__(self, engine: Engine, beside: Collector | None = None) -> None:
        self._engine, self._beside = engine, beside

    def collect(self) -> Iterator[Metric]:
        """Yields the families of `METRIC_NAMES`, and the families of `beside`."""
        if self._beside is not None:
            yield from self._beside.collect()
        yield from self._gauges()
        yield from self._counters()
        yield from self._times()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        samples = GaugeMetricFamily("quire_worker_samples", "Samples running and waiting.", labels=["state"])
        samples.add_metric(["running"], len(engine.scheduler.roster.running))
        samples.add_metric(["waiting"], len(engine.scheduler.roster.waiting))
        yield samples
        yield GaugeMetricFamily("quire_worker_blocks", "Blocks of the pool.", value=engine.cache.block_count)
        yield GaugeMetricFamily("quire_worker_kv_bytes", "Bytes of the pool.", value=engine.cache.pool_bytes)
        connected = GaugeMetricFamily(
            "quire_worker_allocator_connected",
            "Whether the session with the allocator is up.",
            value=int(engine.session.connected),
        )
        yield connected
        yield GaugeMetricFamily(
            "quire_worker_kv_event_lag_seconds",
            "How long the oldest unpublished KV event has waited, or the allocator's next message has been overdue; 0 "
            "if none are published.",
            value=engine.telemetry.kv_event_lag_s(),
        )
        yield dropped_lines("quire_worker")

    def _counters(self) -> Iterator[Metric]:
        numbers = self._engine.telemetry
        requests = CounterMetricFamily("quire_worker_requests", "Requests ended.", labels=["outcome"])
        for outcome in ("finished", "cancelled", "rejected", "failed"):
            requests.add_metric([outcome], numbers.outcomes[outcome])
        yield requests
        failures = CounterMetricFamily(
            "quire_worker_failures", "Requests that failed because of the worker.", labels=["kind"]
        )
        for kind in FailureKind:
            failures.add_metric([kind.value], numbers.failures[kind])
        yield failures
        tokens = CounterMetricFamily(
            "quire_worker_tokens", "Tokens of prompts, cached tokens among them, and generated tokens.", labels=["kind"]
        )
        tokens.add_metric(["prompt"], numbers.prompt_token_count)
        tokens.add_metric(["cached"], numbers.cached_token_count)
        tokens.add_metric(["output"], numbers.output_token_count)
        yield tokens
        speculation = CounterMetricFamily(
            "quire_worker_speculation_tokens",
            "Drafted tokens, and the accepted ones among them.",
            labels=["kind"],
        )
        speculation.add_metric(["drafted"], numbers.drafted_token_count)
        speculation.add_metric(["accepted"], numbers.accepted_token_count)
        yield speculation
        events = CounterMetricFamily(
            "quire_worker_kv_events",
            "KV events published, items dropped because the publisher was behind, and stored blocks that could not be "
            "published.",
            labels=["outcome"],
        )
        for outcome in ("published", "dropped", "unknown"):
            events.add_metric([outcome], numbers.kv_events[outcome])
        yield events
        roster = self._engine.scheduler.roster
        preemptions = CounterMetricFamily(
            "quire_worker_preemptions", "Preempted samples, by how they resume.", labels=["kind"]
        )
        preemptions.add_metric(["recompute"], roster.preemption_count - roster.swap.swap_count)
        preemptions.add_metric(["swap"], roster.swap.swap_count)
        yield preemptions
        swapped = CounterMetricFamily(
            "quire_worker_swapped_bytes", "Bytes of pages moved to host memory and back.", labels=["direction"]
        )
        block_bytes = self._engine.cache.spec.bytes_per_block
        swapped.add_metric(["out"], roster.swap.out_count * block_bytes)
        swapped.add_metric(["in"], roster.swap.in_count * block_bytes)
        yield swapped
        for name, text, value in (
            (
                "backfilled",
                "Samples that were admitted before an earlier one that did not fit.",
                self._engine.scheduler.roster.backfilled_count,
            ),
            ("recomputed_tokens", "Tokens recomputed after a preemption.", roster.recomputed_token_count),
            ("retries", "Passes that failed and were computed in parts.", numbers.retry_count),
            ("block_reports", "Reports that an allocator asked for.", self._engine.session.report_count),
            (
                "state_disagreements",
                "Times that the allocator's state differed from the worker's.",
                self._engine.session.disagreement_count,
            ),
        ):
            yield CounterMetricFamily(f"quire_worker_{name}", text, value=value)

    def _times(self) -> Iterator[Metric]:
        numbers = self._engine.telemetry
        queued = CounterMetricFamily(
            "quire_worker_queued_seconds",
            "Time of `quire_worker_queue_seconds` by reason, found at most ten times a second; a shorter wait counts "
            "for next_pass.",
            labels=["reason"],
        )
        for reason, seconds in numbers.queued_s.items():
            queued.add_metric([reason.name.lower()], seconds)
        yield queued
        for name, text, value in (
            ("allocator_wait_seconds", "Time spent waiting for the allocator.", numbers.allocator_wait_s),
            ("forward_seconds", "Time spent in copies, forward passes and sampling.", numbers.forward_s),
            (
                "sampling_seconds",
                "Time of `quire_worker_forward_seconds_total` spent on choosing tokens. Greedy passes choose in the "
                "forward pass and count none; on a GPU this includes waiting for its kernels.",
                numbers.sampling_s,
            ),
            (
                "swap_seconds",
                "Time of `quire_worker_forward_seconds_total` spent on moving pages to host memory and back.",
                self._engine.scheduler.roster.swap.cost.seconds,
            ),
            (
                "saved_prefill_seconds",
                "Estimate of the time that hits saved: cached tokens times the measured seconds per token of passes "
                "that mostly computed prompts.",
                numbers.saved_prefill_s,
            ),
        ):
            yield CounterMetricFamily(f"quire_worker_{name}", text, value=value)

    def _histograms(self) -> Iterator[Metric]:
        numbers = self._engine.telemetry
        for name, text, histogram in (
            ("step_seconds", "Time of a step that ran the model.", numbers.step_seconds),
            ("queue_seconds", "Time from a request's arrival to its first granted blocks.", numbers.queue_seconds),
            (
                "time_to_first_token_seconds",
                "Time from a request's arrival to its first token.",
                numbers.first_token_seconds,
            ),
            (
                "inter_token_seconds",
                "Time between two tokens of a sample; not counted for beams.",
                numbers.inter_token_seconds,
            ),
            (
                "request_seconds",
                "Time from a request's arrival to its end, whatever the outcome.",
                numbers.request_seconds,
            ),
            ("batch_samples", "Samples in a forward pass.", numbers.batch_samples),
        ):
            yield HistogramMetricFamily(
                f"quire_worker_{name}", text, buckets=histogram.buckets(), sum_value=histogram.sum
            )
