"""Divides an amount among callers so that some is always left for another caller: pure."""

from __future__ import annotations


class Shares:
    """A caller may have as much as is free when it takes it: alone half of it, one of three greedy ones a quarter.

    Args:
        total: the amount that is divided.
        is_for_several: whether there are several callers; a single one may have all.
    """

    def __init__(self, total: int, *, is_for_several: bool) -> None:
        self._free = total
        self.is_for_several = is_for_several
        self._taken: dict[str, int] = {}

    def take(self, caller: str, amount: int) -> bool:
        """Takes an amount for a caller, and returns whether it may have it."""
        taken = self._taken.get(caller, 0) + amount
        if (taken if self.is_for_several else amount) > self._free:
            return False
        self._free -= amount
        self._taken[caller] = taken
        return True

    def give_back(self, caller: str, amount: int) -> None:
        """Frees what a caller has taken."""
        self._free += amount
        left = self._taken.get(caller, 0) - amount
        if left:
            self._taken[caller] = left
        else:
            self._taken.pop(caller, None)


class Charge:
    """The amount that one request takes of its caller's share, until it ends.

    Args:
        shares: the shares that it takes from.
        caller: of the request.

    Attributes:
        amount: what it has taken so far.
    """

    def __init__(self, shares: Shares, caller: str) -> None:
        self._shares, self._caller = shares, caller
        self._has_ended = False
        self.amount = 0

    def another(self) -> Charge:
        """Returns the charge of another request of the same caller."""
        return Charge(self._shares, self._caller)

    def add(self, amount: int) -> bool:
        """Takes more, and returns whether the caller may have it."""
        if self._has_ended or not self._shares.take(self._caller, amount):
            return False
        self.amount += amount
        return True

    def give_back(self, amount: int) -> None:
        """Frees a part of what was taken, unless the end has."""
        if not self._has_ended:
            self._shares.give_back(self._caller, amount)
            self.amount -= amount

    def end(self) -> None:
        """Frees all of it; no more can be taken."""
        self.give_back(self.amount)
        self._has_ended = True
