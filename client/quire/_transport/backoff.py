"""The pauses between attempts of calls, watches and sessions: they grow as long as no attempt helps."""

from __future__ import annotations

from typing import Final

from quire.errors import jittered_s

BACKOFF_FACTOR: Final = 3


class Backoff:
    """Pauses from `shortest_s` to `longest_s`, each three times as long as the one before.

    Every pause is made up to a quarter longer at random, so that clients that failed together do not come back
    together. From 0.05 to 0.5 s they are at least 0.05, 0.15, 0.45 and then 0.5 s.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = self._next_s = shortest_s
        self._longest_s = longest_s

    def reset(self) -> None:
        """Starts again from the shortest pause, because an attempt has helped."""
        self._next_s = self._shortest_s

    def next_s(self, asked_s: float | None = None) -> float:
        """Returns the seconds to wait before the next attempt, never fewer than the server has asked for."""
        pause_s = max(self._next_s, asked_s or 0.0)
        self._next_s = min(BACKOFF_FACTOR * self._next_s, self._longest_s)
        return jittered_s(pause_s)
