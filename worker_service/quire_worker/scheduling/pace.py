"""Speed of this worker, measured in its own passes."""

from __future__ import annotations

from collections import deque

PASSES = 128  # number of passes to remember


class Pace:
    """The latest passes: the number of tokens and the seconds of each."""

    def __init__(self) -> None:
        self._passes = deque[tuple[int, float]](maxlen=PASSES)

    def observe(self, token_count: int, seconds: float) -> None:
        """Records a pass that computed any tokens."""
        if token_count:
            self._passes.append((token_count, seconds))

    @property
    def pass_s(self) -> float:
        """Returns the seconds of the shortest pass: a lower bound for any pass. 0 before the first one."""
        return min((seconds for _, seconds in self._passes), default=0.0)

    def tokens_per_s(self, least: int) -> float | None:
        """Returns the rate of the latest large pass, with the most tokens; None if no pass had `least` tokens."""
        most = max(self._passes, default=(0, 0.0))
        return most[0] / most[1] if most[0] >= least and most[1] > 0 else None

    def seconds_for(self, token_count: int) -> float | None:
        """Returns the seconds for tokens of a prompt, judged by the pass with most tokens; None before any pass."""
        most = max(self._passes, default=None)
        return None if most is None else token_count * most[1] / most[0]
