"""Measures the silence of a stream's other side, in seconds during which this process could receive messages."""

from __future__ import annotations


class Silence:
    """Counts seconds of silence in ticks.

    A late tick counts as two at most. A paused process reads its messages only when it continues, so its pause says
    nothing about whether the peer is alive.
    """

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self.seconds = 0.0

    def heard(self) -> None:
        """Restarts the count, because a message arrived."""
        self.seconds = 0.0

    def tick(self, now: float, tick_s: float) -> float:
        """Counts one tick, and returns the seconds of silence until now. Ticks on time are `tick_s` seconds apart."""
        self.seconds += min(now - self._ticked_at, 2 * tick_s)
        self._ticked_at = now
        return self.seconds
