"""Pauses between attempts, longer and longer as long as none of them helps."""

from __future__ import annotations

import random


class Backoff:
    """Each pause is up to twice as long as the one before, from `shortest_s` to `longest_s`; of that it is half to all,
    so that those who failed together do not come back together."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = self._next_s = shortest_s
        self._longest_s = longest_s

    def reset(self) -> None:
        """An attempt has helped."""
        self._next_s = self._shortest_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return pause_s
