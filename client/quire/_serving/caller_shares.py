"""Shares a limited number of places fairly between callers. A place is one running call, or one byte of a message.

Pure: no clock, no wire.
"""

from __future__ import annotations

from collections.abc import Hashable


class CallerShares:
    """Places that callers take and leave. A caller may hold at most as many places as stay free.

    So a single caller gets half of all places. If n callers want all of them, each gets 1 / (n + 1). A place is always
    left for a caller that has none.

    Args:
        alone_max: places that a single caller may hold, which is half of all places.
        each_max: places that any caller may hold, if this is less.
    """

    def __init__(self, alone_max: int, each_max: int | None = None) -> None:
        self.count_max = 2 * alone_max
        self.each_max = alone_max if each_max is None else each_max
        self.count = 0
        self._held: dict[Hashable, int] = {}

    def take(self, caller: Hashable, count: int = 1) -> bool:
        """Takes `count` places, or none if there are too few for this caller. Returns whether the places were taken."""
        held = self._held.get(caller, 0) + count
        if held > self.each_max or held > self.count_max - self.count - count + 1:
            return False
        self._held[caller] = held
        self.count += count
        return True

    def leave(self, caller: Hashable, count: int = 1) -> None:
        """Gives back `count` of a caller's places."""
        self.count -= count
        held = self._held.pop(caller) - count
        if held:
            self._held[caller] = held

    def held_by(self, caller: Hashable) -> int:
        """Returns the number of places that a caller holds."""
        return self._held.get(caller, 0)
