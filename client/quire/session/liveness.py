"""Silence of the other side of a stream, in seconds during which this process could hear it."""

from __future__ import annotations


class Silence:
    """Seconds of silence, counted in ticks.

    A tick that comes late counts as two at most. A process that was paused reads its messages only when it
    continues: the time of its pause says nothing about the other side.
    """

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self.seconds = 0.0

    def heard(self) -> None:
        """Starts the count anew, because something came."""
        self.seconds = 0.0

    def tick(self, now: float, tick_s: float) -> float:
        """Time has passed, `tick_s` seconds if this tick came in time; returns the seconds of silence until now."""
        self.seconds += min(now - self._ticked_at, 2 * tick_s)
        self._ticked_at = now
        return self.seconds
