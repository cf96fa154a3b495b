"""At which positions a namespace has something of any prefix: where hits are looked for, and nowhere else."""

from __future__ import annotations

from bisect import bisect_left, insort


class Depths:
    """Positions, each with how often it counts.

    Attributes:
        positions: those that count, each once; rising.
    """

    __slots__ = ("_counts", "positions")

    def __init__(self) -> None:
        self.positions: list[int] = []
        self._counts: dict[int, int] = {}

    def add(self, position: int) -> None:
        """One more stands there."""
        count = self._counts.get(position, 0)
        self._counts[position] = count + 1
        if not count:
            insort(self.positions, position)

    def remove(self, position: int) -> None:
        """One fewer stands there."""
        count = self._counts[position] - 1
        if count:
            self._counts[position] = count
        else:
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
