"""Divides an amount among callers. Each caller leaves a part for the others. Pure."""

from __future__ import annotations


class Shares:
    """Shares of an amount. A caller may take at most as much as it leaves free.

    So a caller alone may take half, and three greedy callers may take a quarter each.

    Args:
        total: the amount that is divided.
        is_for_several: whether there are several callers. A single caller may take everything.
    """

    def __init__(self, total: int, *, is_for_several: bool) -> None:
        self._free = total
        self.is_for_several = is_for_several
        self._taken: dict[str, int] = {}

    def take(self, caller: str, amount: int) -> bool:
        """Takes an amount for a caller, if its share allows that. Returns whether it did."""
        taken = self._taken.get(caller, 0) + amount
        if (taken if self.is_for_several else amount) > self._free:
            return False
        self._free -= amount
        self._taken[caller] = taken
        return True

    def give_back(self, caller: str, amount: int) -> None:
        """Gives back an amount that a caller has taken."""
        self._free += amount
        left = self._taken.get(caller, 0) - amount
        if left:
            self._taken[caller] = left
        else:
            self._taken.pop(caller, None)


class Charge:
    """The amount that one request takes of its caller's share, until it ends.

    Args:
        shares: the shares to take from.
        caller: the caller of the request.

    Attributes:
        amount: the amount taken so far.
    """

    def __init__(self, shares: Shares, caller: str) -> None:
        self._shares, self._caller = shares, caller
        self._has_ended = False
        self.amount = 0

    def another(self) -> Charge:
        """Returns a new charge for another request of the same caller."""
        return Charge(self._shares, self._caller)

    def add(self, amount: int) -> bool:
        """Takes a further amount, if the caller's share allows that. Returns whether it did."""
        if self._has_ended or not self._shares.take(self._caller, amount):
            return False
        self.amount += amount
        return True

    def give_back(self, amount: int) -> None:
        """Gives back a part of the amount. Does nothing after the end."""
        if not self._has_ended:
            self._shares.give_back(self._caller, amount)
            self.amount -= amount

    def end(self) -> None:
        """Gives back the whole amount. Nothing can be taken afterwards."""
        self.give_back(self.amount)
        self._has_ended = True
