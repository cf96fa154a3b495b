"""Records how long a server's event loop was blocked. Servers under test find this module on their PYTHONPATH.

A timer of the loop fires as often as it can. The time between two firings has three parts. The loop waits for the
timer, and it waits for a processor. In the rest it computes, or waits for the interpreter's lock while another thread
computes. Other callers have to wait for that rest. The time is at most the process's CPU time, so other load of the
machine does not count. The file $LOOP_HOLDS/PID gets a line for each rest of `NOTED_S` or more: its end on the scale of
`time.monotonic`, and its seconds.
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
    """Records when the event loop of this thread is blocked."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: str) -> None:
        self._loop = loop
        self._scheduler = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._notes = os.open(Path(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._last_s, self._last_wait_s, self._last_cpu_s = time.monotonic(), self._wait_s(), time.process_time()
        loop.call_soon(self._tick)

    def _wait_s(self) -> float:
        """Returns for how many seconds this thread was ready to run but had no processor."""
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
