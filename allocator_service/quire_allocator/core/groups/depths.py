"""At which positions a namespace has something of any prefix: where hits are looked for, and nowhere else."""

from __future__ import annotations

from bisect import bisect_left, insort


class _Count:
    """How often a position counts: changed in place, each time that a block is published."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Depths:
    """Positions, each with how often it counts.

    Attributes:
        positions: those that count, each once; rising.
    """

    __slots__ = ("_counts", "positions")

    def __init__(self) -> None:
        self.positions: list[int] = []
        self._counts: dict[int, _Count] = {}

    def add(self, position: int) -> None:
        """One more stands there."""
        count = self._counts.get(position)
        if count is None:
            self._counts[position] = _Count()
            insort(self.positions, position)
        else:
            count.value += 1

    def remove(self, position: int) -> None:
        """One fewer stands there."""
        count = self._counts[position]
        count.value -= 1
        if not count.value:
            del self._counts[position]
            del self.positions[bisect_left(self.positions, position)]

    def has(self, position: int) -> bool:
        """Tells whether anything stands there."""
        return position in self._counts

    def between(self, first: int, end: int) -> list[int]:
        """Returns those from `first` on and before `end`."""
        positions = self.positions
        return positions[bisect_left(positions, first) : bisect_left(positions, end)]

    def count_before(self, end: int) -> int:
        """Counts the positions before `end`."""
        return bisect_left(self.positions, end)
