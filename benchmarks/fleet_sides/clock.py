"""A virtual clock: runs calls in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Keeps calls until their times. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0

    def at(self, time: float, call: Callable[[], object]) -> None:
        """Runs `call` at this time; calls of one time run in the order in which they were added."""
        self._number += 1
        heapq.heappush(self._calls, (max(time, self.now), self._number, call))

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Runs `call` after this many seconds."""
        self.at(self.now + seconds, call)

    def run(self) -> None:
        """Runs all calls, those that calls add included."""
        while self._calls:
            self.now, _, call = heapq.heappop(self._calls)
            call()
