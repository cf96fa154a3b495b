"""Counters of one worker as plain integers, read by a custom collector at scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from quire._serving.logs import dropped_lines
from quire._serving.metrics import Histogram
from quire.errors import RETRY_AFTER_S_MAX
from quire.protocol.outcomes import StepOutcome

from quire_worker.execution.failures import FailureKind
from quire_worker.scheduling.request import Request, Sample

if TYPE_CHECKING:
    from quire_worker.engine import Engine

RETRY_AFTER_S_MIN = 0.25
SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

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
        "quire_worker_failures_total",
        "quire_worker_retries_total",
        "quire_worker_block_reports_total",
        "quire_worker_state_disagreements_total",
        "quire_worker_step_seconds",
        "quire_worker_time_to_first_token_seconds",
        "quire_worker_allocator_wait_seconds_total",
        "quire_worker_allocator_connected",
        "quire_worker_forward_seconds_total",
        "quire_worker_blocks",
        "quire_worker_kv_bytes",
        "quire_worker_log_lines_dropped_total",
    }
)


class WorkerTelemetry:
    """What happened since start."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()  # finished, cancelled, rejected, failed
        self.failures: Counter[FailureKind] = Counter()
        self.retry_count = 0  # passes, copies and samplings that had to be tried again in parts
        self.prompt_token_count = 0
        self.cached_token_count = 0
        self.output_token_count = 0
        self.drafted_token_count = 0  # computed behind the last token of a sample
        self.accepted_token_count = 0  # of these, those that were what was sampled
        self.held_block_count_max = 0
        self.table_entry_count_max = 0
        self.allocator_wait_s = 0.0
        self.forward_s = 0.0
        self.step_seconds = Histogram(SECONDS_BOUNDS)
        self.first_token_seconds = Histogram(SECONDS_BOUNDS)
        self.queue_seconds = Histogram(SECONDS_BOUNDS)

    @property
    def retry_after_s(self) -> float | None:
        """Returns when a full queue has room again, roughly: half of what those who were let in have waited on the
        average, because a queue has half its places anew by then. None before anybody was."""
        histogram = self.queue_seconds
        count = histogram.buckets()[-1][1]
        return min(max(histogram.sum / count / 2, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX) if count else None

    def observe_first_token(self, request: Request, seconds: float) -> None:
        """A request's first token came, `seconds` after the request."""
        self.first_token_seconds.observe(seconds)
        self.prompt_token_count += len(request.prompt)
        self.cached_token_count += request.usage.cached_token_count

    def observe_blocks(self, outcome: StepOutcome, running: Sequence[Sample], block_count: int) -> None:
        """Notes how many blocks are held and how many separate caches would hold, after a step that asked for any."""
        if outcome.grows:
            self.held_block_count_max = max(self.held_block_count_max, block_count - outcome.free_block_count)
            entries = sum(sample.held_block_count for sample in running)
            self.table_entry_count_max = max(self.table_entry_count_max, entries)


class WorkerCollector(Collector):
    """Reads engine and telemetry at scrape, in the metrics server's thread; a number may be one step old."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Returns the families of `METRIC_NAMES`."""
        yield from self._gauges()
        yield from self._counters()
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
        yield dropped_lines("quire_worker")

    def _counters(self) -> Iterator[Metric]:
        numbers = self._engine.telemetry
        requests = CounterMetricFamily("quire_worker_requests", "Requests ended.", labels=["outcome"])
        for outcome in ("finished", "cancelled", "rejected", "failed"):
            requests.add_metric([outcome], numbers.outcomes[outcome])
        yield requests
        failures = CounterMetricFamily(
            "quire_worker_failures", "Requests that the worker itself could not finish.", labels=["kind"]
        )
        for kind in FailureKind:
            failures.add_metric([kind.value], numbers.failures[kind])
        yield failures
        tokens = CounterMetricFamily(
            "quire_worker_tokens", "Tokens of prompts, of these found in the cache, and generated.", labels=["kind"]
        )
        tokens.add_metric(["prompt"], numbers.prompt_token_count)
        tokens.add_metric(["cached"], numbers.cached_token_count)
        tokens.add_metric(["output"], numbers.output_token_count)
        yield tokens
        speculation = CounterMetricFamily(
            "quire_worker_speculation_tokens",
            "Tokens that were drafted behind others, and of these the accepted ones.",
            labels=["kind"],
        )
        speculation.add_metric(["drafted"], numbers.drafted_token_count)
        speculation.add_metric(["accepted"], numbers.accepted_token_count)
        yield speculation
        roster = self._engine.scheduler.roster
        preemptions = CounterMetricFamily(
            "quire_worker_preemptions", "Samples whose blocks were taken back, by how they come back.", labels=["kind"]
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
            ("backfilled", "Samples that passed one that did not fit.", self._engine.scheduler.roster.backfilled_count),
            ("retries", "Passes that failed and were computed in parts.", numbers.retry_count),
            ("block_reports", "Reports that an allocator asked for.", self._engine.session.report_count),
            (
                "state_disagreements",
                "Times that the allocator's state was another than the worker's.",
                self._engine.session.disagreement_count,
            ),
            ("allocator_wait_seconds", "Time spent waiting for the allocator.", numbers.allocator_wait_s),
            ("forward_seconds", "Time spent in copies, forward passes and sampling.", numbers.forward_s),
        ):
            yield CounterMetricFamily(f"quire_worker_{name}", text, value=value)

    def _histograms(self) -> Iterator[Metric]:
        numbers = self._engine.telemetry
        for name, text, histogram in (
            ("step_seconds", "Time of a step that ran the model.", numbers.step_seconds),
            ("queue_seconds", "From a request to the first blocks that it was granted.", numbers.queue_seconds),
            ("time_to_first_token_seconds", "From a request to its first token.", numbers.first_token_seconds),
        ):
            yield HistogramMetricFamily(
                f"quire_worker_{name}", text, buckets=histogram.buckets(), sum_value=histogram.sum
            )
