"""A worker's numbers under the names of vLLM's metrics, for dashboards and autoscalers made for vLLM.

Names, labels and meanings are as in vLLM 0.32. vLLM has further series; buckets are the worker's own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from quire.views import WaitReason

from quire_worker.engine import Engine

LABELS: Final = ("model_name", "engine")
ANSWER_S: Final = 1.0  # time for the event loop to report why samples wait
CAPACITY, DEFERRED = "capacity", "deferred"
# Reasons for waiting other than capacity: waits that end although no block and no running sample's place become free.
_DEFERRED: Final = (WaitReason.PREFIX, WaitReason.NO_SESSION)


class VllmCollector(Collector):
    """Reads engine and telemetry in the thread of the metrics server, as `WorkerCollector` does.

    Args:
        engine: the worker's engine.
        model_name: the value of the label `model_name`.
        loop: the event loop of the engine; None outside a server.
    """

    def __init__(self, engine: Engine, model_name: str, loop: asyncio.AbstractEventLoop | None) -> None:
        self._engine = engine
        self._labels = (model_name, "0")
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Yields each family. `vllm:num_requests_waiting_by_reason` is empty while the event loop does not answer."""
        roster, numbers = self._engine.scheduler.roster, self._engine.telemetry
        held_share = numbers.held_block_count / self._engine.cache.block_count
        for name, text, value in (
            ("num_requests_running", "Samples that run.", len(roster.running)),
            ("num_requests_waiting", "Samples that wait.", len(roster.waiting)),
            ("kv_cache_usage_perc", "Share of blocks that are held, from 0 to 1.", held_share),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield self._by_reason()
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", numbers.prompt_token_count),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", numbers.cached_token_count),
            ("prompt_tokens", "Tokens of prompts.", numbers.prompt_token_count),
            ("prompt_tokens_cached", "Prompt tokens found in the cache.", numbers.cached_token_count),
            ("generation_tokens", "Tokens generated.", numbers.output_token_count),
            ("num_preemptions", "Samples whose blocks were taken back.", roster.preemption_count),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        for name, text, histogram in (
            ("time_to_first_token", "Time from a request to its first token.", numbers.first_token_seconds),
            ("inter_token_latency", "Time from a token of a sample to its next one.", numbers.inter_token_seconds),
            ("e2e_request_latency", "Time from a request to its end.", numbers.request_seconds),
            ("request_queue_time", "Time from a request to its first blocks.", numbers.queue_seconds),
        ):
            family = HistogramMetricFamily(f"vllm:{name}_seconds", text, labels=LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family

    def _by_reason(self) -> Metric:
        """Returns the waiting samples by vLLM's two reasons.

        The scheduler's state belongs to the event loop, so the loop counts.
        """
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Samples that wait for a place or blocks (capacity), or for a prefix or the allocator (deferred).",
            labels=(*LABELS, "reason"),
        )
        counts: Counter[str] = Counter()
        done = threading.Event()

        def count() -> None:
            counts.update(self._waiting())
            done.set()

        try:
            if self._loop is None:
                return family
            self._loop.call_soon_threadsafe(count)
        except RuntimeError:  # The event loop is closed.
            return family
        if done.wait(ANSWER_S):
            for reason in (CAPACITY, DEFERRED):
                family.add_metric((*self._labels, reason), counts[reason])
        return family

    def _waiting(self) -> Counter[str]:
        engine = self._engine
        waits = engine.waits()
        samples = engine.scheduler.roster.waiting.in_any_order()
        return Counter(DEFERRED if waits[each.request].reason in _DEFERRED else CAPACITY for each in samples)
