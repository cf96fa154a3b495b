"""A GPU's time by kernel, from torch's profiler."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})  # categories of events on the device
LAUNCHES = re.compile(r"Launch|Memcpy|Memset")  # host calls that give the device work
NAME_CHARS = 80


class Line(NamedTuple):
    """One kernel's launches in all turns of a trace."""

    kernel: str
    count: int  # type: ignore[assignment]  # as `tuple.count` is called
    ms: float


class Trace(NamedTuple):
    """A device's work between its first and its last kernel.

    Attributes:
        lines: one for each kernel, the longest first.
        span_ms: time from the first kernel to the last.
        busy_ms: time in which at least one kernel ran.
        launch_count: host calls that gave the device work; the replay of a graph is one call.
    """

    lines: list[Line]
    span_ms: float
    busy_ms: float
    launch_count: int

    @property
    def idle_share(self) -> float | None:
        """Returns the idle share of the span; None without kernels."""
        return None if not self.span_ms else 1.0 - self.busy_ms / self.span_ms


def read_trace(path: Path) -> Trace:
    """Reads a file that `torch.profiler.profile.export_chrome_trace` wrote."""
    events: list[dict[str, Any]] = json.loads(path.read_text(errors="replace"))["traceEvents"]
    kernels = sorted(
        (float(each["ts"]), float(each["ts"]) + float(each["dur"]), str(each["name"]))
        for each in events
        if each.get("cat") in ON_GPU and "dur" in each
    )
    counts: dict[str, int] = defaultdict(int)
    times_us: dict[str, float] = defaultdict(float)
    busy_us, busy_until = 0.0, 0.0
    for start, end, name in kernels:
        counts[short_name(name)] += 1
        times_us[short_name(name)] += end - start
        busy_us += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    lines = [Line(name, counts[name], us / 1e3) for name, us in times_us.items()]
    span_us = busy_until - kernels[0][0] if kernels else 0.0
    launches = [each for each in events if each.get("cat") in {"cuda_runtime", "cuda_driver"}]
    launch_count = sum(bool(LAUNCHES.search(str(each.get("name")))) for each in launches)
    return Trace(sorted(lines, key=lambda line: -line.ms), span_us / 1e3, busy_us / 1e3, launch_count)


def short_name(kernel: str) -> str:
    """Returns a kernel's name without its return type. A long name also loses its template arguments."""
    name = kernel.removeprefix("void ")
    return name if len(name) <= NAME_CHARS else re.sub(r"\s+", " ", name)[:NAME_CHARS]
