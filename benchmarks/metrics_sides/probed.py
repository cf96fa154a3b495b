"""A server that adds up the CPU time of its own metrics and log lines, and writes the sums to a file at its end.

    QUIRE_PROBED=quire_worker QUIRE_SPENT=FILE python -m metrics_sides.probed ARGUMENT...

Time of a part inside another one counts only for the inner one. Reading the clock is not part of the sums.
The log line's part notes the end of a request, makes its line, and writes the line on the log's thread.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

COUNTERS: Final = "counters"
SHADOW_INDEX: Final = "shadow index"
LOG_LINE: Final = "log line"
# Functions of each server: part, module, class, method.
PROBED: Final = {
    "quire_allocator": (
        (COUNTERS, "quire_allocator.metrics.counters", "PoolCounters", "observe_step"),
        (SHADOW_INDEX, "quire_allocator.metrics.counters", "PoolCounters", "observe_blocks"),
    ),
    "quire_worker": (
        (COUNTERS, "quire_worker.telemetry", "WorkerTelemetry", "observe_pass"),
        (COUNTERS, "quire_worker.telemetry", "WorkerTelemetry", "observe_first_token"),
        (COUNTERS, "quire_worker.telemetry", "WorkerTelemetry", "observe_blocks"),
        (COUNTERS, "quire._serving.metrics", "Histogram", "observe"),
        (COUNTERS, "quire._serving.metrics", "Histogram", "exemplify"),
        (LOG_LINE, "quire_worker.calls.request_calls", "RequestRecords", "_note_end"),
        (LOG_LINE, "quire._serving.request_log", "RequestLog", "_write_all"),
        (LOG_LINE, "quire._serving.never_blocking", "NeverBlockingText", "_write_whole"),
    ),
    "quire_gateway": (
        (COUNTERS, "quire_gateway.metrics", "Telemetry", "note"),
        (COUNTERS, "quire._serving.metrics", "Histogram", "observe"),
        (COUNTERS, "quire._serving.metrics", "Histogram", "exemplify"),
        (LOG_LINE, "quire._serving.request_log", "RequestLog", "ended"),
        (LOG_LINE, "quire._serving.request_log", "RequestLog", "_write_all"),
        (LOG_LINE, "quire._serving.never_blocking", "NeverBlockingText", "_write_whole"),
    ),
}
_spent_ns: dict[str, int] = {}
_counts: dict[str, int] = {}


class _Nested(threading.local):
    """For each running part of a thread, the time of the parts inside it."""

    def __init__(self) -> None:
        self.inner_ns = [0]


_nested = _Nested()


def probe(part: str, owner: type, method: str) -> None:
    """Replaces a method by one that adds its CPU time to a part."""
    inner: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(inner)
    def timed(*arguments: Any, **options: Any) -> Any:
        inner_ns = _nested.inner_ns
        inner_ns.append(0)
        started_ns = time.thread_time_ns()
        try:
            return inner(*arguments, **options)
        finally:
            own_ns = time.thread_time_ns() - started_ns
            _spent_ns[part] = _spent_ns.get(part, 0) + own_ns - inner_ns.pop()
            inner_ns[-1] += own_ns
            _counts[part] = _counts.get(part, 0) + 1

    setattr(owner, method, timed)


def clock_cost_ns() -> int:
    """Returns the time between two readings of the clock, the median of many."""
    times = [time.thread_time_ns() for _ in range(1_001)]
    return int(statistics.median([after - before for before, after in pairwise(times)]))


def main() -> None:
    """Runs the server that the variable names."""
    package = os.environ["QUIRE_PROBED"]
    for part, module, owner, method in PROBED[package]:
        probe(part, getattr(importlib.import_module(module), owner), method)
    try:
        folder = "process." if package == "quire_worker" else ""
        importlib.import_module(f"{package}.{folder}server").main(sys.argv[1:])
    finally:
        clock_ns = clock_cost_ns()
        spent = {
            part: {"seconds": (ns - clock_ns * _counts[part]) / 1e9, "calls": _counts[part]}
            for part, ns in _spent_ns.items()
        }
        Path(os.environ["QUIRE_SPENT"]).write_text(json.dumps(spent))


if __name__ == "__main__":
    main()
