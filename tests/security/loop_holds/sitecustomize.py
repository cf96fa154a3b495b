"""For servers under test, which find it on their PYTHONPATH: notes what held their event loop, and for how long.

A timer of the loop comes as often as it can. Between two of them the loop has waited for it, waited for a processor,
and done something else: computed, or waited for the interpreter's lock while another thread did. That rest is what
callers beside have to wait for. It is no longer than the processors' time of this process, so that a machine that is
busy otherwise does not count. The file $LOOP_HOLDS/PID gets a line for each rest of `NOTED_S` and more: when it ended
on the scale of `time.monotonic`, and its seconds.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

TICK_S = 0.002
NOTED_S = 0.01


class Holds:
    """Notes holds of the event loop that runs on this thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: str) -> None:
        self._loop = loop
        self._scheduler = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._notes = os.open(Path(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._last_s, self._last_wait_s, self._last_cpu_s = time.monotonic(), self._wait_s(), time.process_time()
        loop.call_soon(self._tick)

    def _wait_s(self) -> float:
        """Seconds for which this thread was ready to run, and had no processor."""
        return int(os.pread(self._scheduler, 100, 0).split()[1]) / 1e9

    def _tick(self) -> None:
        now_s, wait_s, cpu_s = time.monotonic(), self._wait_s(), time.process_time()
        busy_s = now_s - self._last_s - (wait_s - self._last_wait_s)
        held_s = min(busy_s, cpu_s - self._last_cpu_s) - TICK_S
        if held_s >= NOTED_S:
            os.write(self._notes, f"{now_s} {held_s}\n".encode())
        self._last_s, self._last_wait_s, self._last_cpu_s = now_s, wait_s, cpu_s
        self._loop.call_later(TICK_S, self._tick)


def _watched(run: Any) -> Any:
    def run_watched(self: asyncio.Runner, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Any:
        loop = self.get_loop()
        loop.call_soon(lambda: Holds(loop, os.environ["LOOP_HOLDS"]))
        return run(self, coroutine, **options)

    return run_watched


if "LOOP_HOLDS" in os.environ:
    asyncio.Runner.run = _watched(asyncio.Runner.run)  # type: ignore[method-assign]
