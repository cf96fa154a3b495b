"""Speed of this worker, as measured in its own passes."""

from __future__ import annotations

from collections import deque

PASSES = 128  # that are remembered


class Pace:
    """The latest passes: how many tokens each computed, and how long it took. Nothing is known before the first."""

    def __init__(self) -> None:
        self._passes = deque[tuple[int, float]](maxlen=PASSES)

    def observe(self, token_count: int, seconds: float) -> None:
        """Notes a pass that computed something."""
        if token_count:
            self._passes.append((token_count, seconds))

    @property
    def pass_s(self) -> float:
        """Returns the seconds of the shortest pass; no pass is expected to be shorter. 0 while nothing is known."""
        return min((seconds for _, seconds in self._passes), default=0.0)

    def seconds_for(self, token_count: int) -> float | None:
        """Returns the seconds that so many tokens of a prompt take, by the pass that computed most tokens; None while
        nothing is known."""
        most = max(self._passes, default=None)
        return None if most is None else token_count * most[1] / most[0]
