"""A timer of an event loop: it fires at the earliest of its set times."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

LATE_S: Final = 0.1  # after this delay, the loop counts as having stalled


class LoopTimer:
    """A timer that rings once, at the earliest time that it was set to. `ring` must set the timer to the next time.

    A loop can stand still, for example because its process was stopped or the machine is overloaded. Afterwards, timers
    are due, and messages that came in time are still unread. A late timer waits `LATE_S` more, so that these messages
    are read first. Otherwise a branch could expire before the message that renews it is read.

    Args:
        ring: called on the loop.
        clock: returns the time in seconds, on the scale of `set`.
    """

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due_s: float) -> None:
        """Makes the timer ring at this time, unless it rings earlier."""
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
