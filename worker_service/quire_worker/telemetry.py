"""Counters of one worker as plain integers; `process/worker_metrics.py` reads them at scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from quire._serving.metrics import Histogram
from quire.errors import RETRY_AFTER_S_MAX
from quire.protocol.outcomes import StepOutcome
from quire.views import WaitReason

from quire_worker.execution.failures import FailureKind
from quire_worker.scheduling.pace import Pace
from quire_worker.scheduling.request import Request, Sample

RETRY_AFTER_S_MIN = 0.25
# The last bound is the gateway's longest request time, so that quantiles of both histograms can be compared.
SECONDS_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
BATCH_BOUNDS = tuple(float(1 << power) for power in range(11))  # buckets of 1 to 1024 samples


class WorkerTelemetry:
    """Counts and durations since start."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()  # number of requests by outcome: finished, cancelled, rejected, failed
        self.failures: Counter[FailureKind] = Counter()
        self.retry_count = 0  # passes, copies and samplings that were retried in parts
        self.prompt_token_count = 0
        self.cached_token_count = 0
        self.output_token_count = 0
        self.drafted_token_count = 0  # draft tokens computed after a sample's last token
        self.accepted_token_count = 0  # drafted tokens that equal the sampled tokens
        self.held_block_count = 0  # as of the last answered step
        self.kv_events: Counter[str] = Counter()  # see `kv_events.publisher`
        self.held_block_count_max = 0
        self.table_entry_count_max = 0
        self.allocator_wait_s = 0.0
        self.forward_s = 0.0
        self.sampling_s = 0.0  # part of `forward_s`
        self.saved_prefill_s = 0.0  # an estimate: see `Pace.prefill_seconds_for`
        self.queued_s = dict.fromkeys(WaitReason, 0.0)  # see `requests.queue_times`
        self.kv_event_lag_s: Callable[[], float] = lambda: 0.0  # set by `kv_events_of`
        self.step_seconds = Histogram(SECONDS_BOUNDS)
        self.first_token_seconds = Histogram(SECONDS_BOUNDS)
        self.queue_seconds = Histogram(SECONDS_BOUNDS)
        self.inter_token_seconds = Histogram(SECONDS_BOUNDS)
        self.request_seconds = Histogram(SECONDS_BOUNDS)
        self.batch_samples = Histogram(BATCH_BOUNDS)

    @property
    def retry_after_s(self) -> float | None:
        """Estimates the seconds until a full queue has space: half of the admitted requests' average waiting time.
        By then half of a queue's places are free again. None before the first admission."""
        histogram = self.queue_seconds
        count = histogram.buckets()[-1][1]
        return min(max(histogram.sum / count / 2, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX) if count else None

    def observe_pass(self, sample_count: int, forward_s: float, sampling_s: float, step_s: float) -> None:
        """Records a step that ran the model for `sample_count` samples: all its seconds, the seconds in the model,
        and the seconds of choosing tokens."""
        self.batch_samples.observe(sample_count)
        self.forward_s += forward_s
        self.sampling_s += sampling_s
        self.step_seconds.observe(step_s)

    def observe_first_token(self, request: Request, seconds: float, pace: Pace) -> None:
        """Records a request's first token, `seconds` after the request arrived."""
        self.first_token_seconds.observe(seconds)
        self.observe_prompt(len(request.prompt), request.usage.cached_token_count, pace)

    def observe_prompt(self, token_count: int, cached_token_count: int, pace: Pace) -> None:
        """Records a prompt, and estimates from the worker's pace the time that the prompt's cached tokens saved."""
        self.prompt_token_count += token_count
        if cached_token_count:
            self.cached_token_count += cached_token_count
            self.saved_prefill_s += pace.prefill_seconds_for(cached_token_count)

    def observe_blocks(self, outcome: StepOutcome, running: Sequence[Sample], block_count: int) -> None:
        """Records how many blocks a step leaves held, with and without sharing. An empty outcome changes nothing."""
        if outcome.grows or outcome.free_block_count:
            self.held_block_count = block_count - outcome.free_block_count
        if outcome.grows:
            self.held_block_count_max = max(self.held_block_count_max, self.held_block_count)
            entries = sum(sample.held_block_count for sample in running)
            self.table_entry_count_max = max(self.table_entry_count_max, entries)
