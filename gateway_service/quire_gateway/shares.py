"""So much of something, dealt to callers so that there is always some left for another one: pure."""

from __future__ import annotations

from collections import Counter


class Shares:
    """A caller may have as much as is free when it takes it: alone half of it, one of three greedy ones a quarter.

    Args:
        total: that there is.
        is_for_several: whether there are several callers; a single one may have all.
    """

    def __init__(self, total: int, *, is_for_several: bool) -> None:
        self._free = total
        self.is_for_several = is_for_several
        self._taken: Counter[str] = Counter()

    def take(self, caller: str, amount: int) -> bool:
        """Takes an amount for a caller, and returns whether it may have it."""
        of_caller = self._taken[caller] + amount if self.is_for_several else amount
        if of_caller > self._free:
            return False
        self._free -= amount
        self._taken[caller] += amount
        return True

    def give_back(self, caller: str, amount: int) -> None:
        """Frees what a caller has taken."""
        self._free += amount
        self._taken[caller] -= amount
        if not self._taken[caller]:
            del self._taken[caller]
