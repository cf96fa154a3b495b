"""Writes docs/metrics.md from the collectors of the three services.

    python scripts/metrics_reference.py          write it
    python scripts/metrics_reference.py --check  fail if it differs from the code

The collectors belong to servers that have served nothing: an allocator without pools, a worker with the demo model, and
a gateway without workers. Each collector yields its families, with or without samples.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

import structlog
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from quire import AsyncAllocator
from quire._serving.process_series import BuildCollector
from quire.types import PoolSpec
from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.metrics.collector import AllocatorCollector
from quire_allocator.metrics.counters import Counters
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import GatewayCollector, Telemetry
from quire_worker.engine import Engine
from quire_worker.process.options import parse_arguments
from quire_worker.process.server import build_engine, load
from quire_worker.process.vllm_metrics import VllmCollector
from quire_worker.process.worker_metrics import WorkerCollector

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "metrics.md"
HEAD = """# Metrics

`scripts/metrics_reference.py` writes this page from the code, and `make check` compares both.
Each server answers `GET /metrics` at the address that [operating.md](operating.md#metrics-and-alerts) names.
A histogram has the series `_bucket`, `_sum` and `_count` under its name.
Every server on Linux also has the `process_*` series of Prometheus' Python client: CPU, memory, open files, start.
"""
ALLOCATOR_NOTES = """
Series name only the namespaces of `--metrics-namespaces NAME,...` (at most 20); all others together are `other`.

An allocator follows one block in 64 by its digest, or all if it saw few, and estimates from these why prompts missed:

| outcome | the tokens were | what to do |
| --- | --- | --- |
| `hit` | found in the cache | nothing |
| `evicted` | in the cache before | see what a larger pool would hit |
| `group` | cached by full attention, not by a window or state | [hybrid.md](hybrid.md) |
| `computing` | being computed for another prompt | let prompts wait for a prefix |
| `new` | not named while four pools were filled | nothing |

`quire_allocator_what_if_tokens_total{size="2"}` over the sum of these is the hit rate of a pool of twice the size.
That pool evicts the least recently used block: compare it with `size="1"`, since the default policy may hit more.
Whether another namespace has the same tokens is not known, because a namespace is the salt of its digests.
Pools without full attention have none of these series.
"""


def collectors() -> dict[str, Collector]:
    """Returns the collectors by the title of their table."""
    worker = asyncio.run(unconnected_worker())
    return {
        "Every server": BuildCollector({}, ""),
        "Allocator": AllocatorCollector(Directory(lease_s=limits.LEASE_S, pools_max=limits.POOLS_MAX), Counters()),
        "Worker": WorkerCollector(worker),
        "Worker, with --vllm-metrics": VllmCollector(worker, "", None),
        "Gateway": GatewayCollector(Telemetry(), Fleet([], [])),
    }


async def unconnected_worker() -> Engine:
    """Returns the engine of a worker that is not connected."""
    options = parse_arguments(["--model", str(ROOT / "models" / "demo"), "--blocks", "16"])
    loaded = load(options)
    spec = PoolSpec(block_count=loaded.cache.block_count, groups=loaded.cache.spec.groups)
    return build_engine(options, loaded, AsyncAllocator(options.allocator).session("reference", spec))


def name_of(family: Metric) -> str:
    """Returns a family's name in a scrape."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def row_of(family: Metric) -> str:
    """Returns a family's row. The collector declares the family's labels, so no samples are needed."""
    labels = ", ".join(f"`{label}`" for label in vars(family)["_labelnames"])
    return f"| `{name_of(family)}` | {family.type} | {labels} | {family.documentation} |"


def reference() -> str:
    """Returns the whole document."""
    tables = []
    for title, collector in collectors().items():
        rows = sorted(row_of(family) for family in collector.collect())
        tables.append(
            "\n".join([f"\n## {title}\n", "| name | type | labels | meaning |", "| --- | --- | --- | --- |", *rows])
        )
    tables[1] += "\n" + ALLOCATOR_NOTES.rstrip()  # The notes follow the allocator's table.
    return HEAD + "\n".join(tables) + "\n"


def main() -> None:
    """Writes the document, or compares it with the code."""
    parser = argparse.ArgumentParser(description="Write docs/metrics.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the document is outdated")
    is_check = parser.parse_args().check
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # hides the worker's logs
    if not is_check:
        DOCUMENT.write_text(reference(), encoding="utf-8")
    elif not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != reference():
        sys.exit(f"{DOCUMENT.name} differs from the code: run python scripts/metrics_reference.py")


if __name__ == "__main__":
    main()
