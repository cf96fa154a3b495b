"""A timer of an event loop: rings at the earliest of the times that it was set to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

LATE_S: Final = 0.1  # from which on a loop counts as one that stood still


class LoopTimer:
    """A timer that rings once for all times that it was set to. `ring` has to set it to the next time.

    A loop that stood still (a process that was stopped, a machine that is overloaded) has timers that are due and
    messages that came in time but were not read. A timer that is late rings `LATE_S` later still, so that they are
    read first: what such a message renews must not have ended.

    Args:
        ring: called on the loop.
        clock: of the times that it is set to, in seconds.
    """

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due_s: float) -> None:
        """Lets it ring at this time, unless it rings before."""
        loop = asyncio.get_running_loop()
        when_s = loop.time() + max(0.0, due_s - self._clock())
        if when_s < (math.inf if self._timer is None else self._timer.when()):
            self._come(when_s, self._look)

    def _come(self, when_s: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when_s, then)

    def _look(self) -> None:
        assert self._timer is not None
        now_s = asyncio.get_running_loop().time()
        if now_s - self._timer.when() > LATE_S:
            self._come(now_s + LATE_S, self._ring_now)
        else:
            self._ring_now()

    def _ring_now(self) -> None:
        self._timer = None
        self._ring()
