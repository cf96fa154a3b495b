"""A worker's metrics for Prometheus, in the format that Prometheus asks for first."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from quire_worker.process.worker_metrics import METRIC_NAMES, WorkerCollector

from tests.worker.engine_harness import running

DEMO = Path("models/demo").resolve()


async def test_the_metrics_are_valid_openmetrics_under_the_names_that_are_documented() -> None:
    async with running(DEMO, blocks=8) as harness:
        registry = CollectorRegistry()
        registry.register(WorkerCollector(harness.engine))
        page = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(page))  # strict: refuses names that clash
    assert {f"{family.name}_total" if family.type == "counter" else family.name for family in families} == METRIC_NAMES
    assert not [family.name for family in families if family.name.endswith("_total")]  # of counters alone
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert samples["quire_worker_blocks",] == 8
    assert samples["quire_worker_samples", "running"] == samples["quire_worker_samples", "waiting"] == 0
    assert samples["quire_worker_allocator_connected",] == 1
