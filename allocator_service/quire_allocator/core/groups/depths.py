"""Lists the positions where a namespace has published blocks of any prompt. Only these positions are searched."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

_NEAR: Final = 4_096  # most positions are below this number; a list has the counts of these


class Depths:
    """Positions, each with a count.

    Attributes:
        positions: the positions with a count above 0, each once; rising.
    """

    __slots__ = ("_far", "_near", "positions")

    def __init__(self) -> None:
        self.positions: list[int] = []
        self._near: list[int] = []  # counts of the positions below `_NEAR`, up to the highest one that was added
        self._far: dict[int, int] = {}

    def add(self, position: int) -> None:
        """Adds one to the count of a position."""
        near = self._near
        if position < len(near):
            count = near[position]
            near[position] = count + 1
        elif position < _NEAR:
            near.extend([0] * (position + 1 - len(near)))
            near[position], count = 1, 0
        else:
            count = self._far.get(position, 0)
            self._far[position] = count + 1
        if not count:
            insort(self.positions, position)

    def remove(self, position: int) -> None:
        """Subtracts one from the count of a position."""
        if position < _NEAR:
            self._near[position] = left = self._near[position] - 1
        else:
            left = self._far[position] - 1
            if left:
                self._far[position] = left
            else:
                del self._far[position]
        if not left:
            del self.positions[bisect_left(self.positions, position)]

    def has(self, position: int) -> bool:
        """Tells whether the count of a position is above 0."""
        if position < _NEAR:
            return position < len(self._near) and self._near[position] > 0
        return position in self._far

    def between(self, first: int, end: int) -> list[int]:
        """Returns the positions in [first, end)."""
        positions = self.positions
        return positions[bisect_left(positions, first) : bisect_left(positions, end)]

    def count_before(self, end: int) -> int:
        """Counts the positions before `end`."""
        return bisect_left(self.positions, end)
