"""A limited number of places, and how many of them one caller may have.

Pure: no clock, no wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class CallerShares:
    """Places that callers take and leave. A caller may have as many as are left free: alone it gets half of them, and
    of n callers that want all, each gets one of n + 1 parts. So there is a place for a caller who has none.

    Args:
        alone_max: places of a caller that is alone; there are twice as many.
    """

    def __init__(self, alone_max: int) -> None:
        self.count_max = 2 * alone_max
        self.count = 0
        self._held: Counter[Hashable] = Counter()

    def take(self, caller: Hashable, count: int = 1) -> bool:
        """Returns whether the caller has them from now on; all of them or none."""
        held = self._held[caller] + count
        if held > self.count_max - self.count - count + 1:
            if held == count:
                del self._held[caller]
            return False
        self._held[caller] = held
        self.count += count
        return True

    def leave(self, caller: Hashable, count: int = 1) -> None:
        """Gives back some of the places that a caller has."""
        self.count -= count
        self._held[caller] -= count
        if not self._held[caller]:
            del self._held[caller]

    def held_by(self, caller: Hashable) -> int:
        """Counts those that a caller has."""
        return self._held.get(caller, 0)
