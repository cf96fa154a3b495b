"""Pauses between attempts of calls, watches and sessions. The pauses grow until an attempt succeeds."""

from __future__ import annotations

from typing import Final

from quire.errors import jittered_s

BACKOFF_FACTOR: Final = 3


class Backoff:
    """Pauses from `shortest_s` to `longest_s`, each three times as long as the previous one.

    Each pause is up to a quarter longer at random, so that clients that fail together retry at different times. For
    example, the least pauses from 0.05 to 0.5 s are 0.05, 0.15, 0.45 and then 0.5 s.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = self._next_s = shortest_s
        self._longest_s = longest_s

    def reset(self) -> None:
        """Starts again from the shortest pause, because an attempt has succeeded."""
        self._next_s = self._shortest_s

    def next_s(self, asked_s: float | None = None) -> float:
        """Returns the seconds to wait before the next attempt: at least `asked_s`, the server's own request."""
        pause_s = max(self._next_s, asked_s or 0.0)
        self._next_s = min(BACKOFF_FACTOR * self._next_s, self._longest_s)
        return jittered_s(pause_s)
