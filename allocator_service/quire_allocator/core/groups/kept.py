"""Own blocks of a sequence that replace published ones in its table, in an append-only pool.

An engine that cannot replace an entry of a table cannot follow a swap. If a commit finds that another sequence holds a
published block of the same digest, the committing sequence therefore

    1. keeps     its own block, and also holds the published one, its *twin*: blocks after it can then be published
                 below a published parent, and hit by others
    2. takes over: once no other sequence holds the twin and its block is needed, the own block replaces it
    3. frees     the own block and the twin

If no sequence holds the published block, the own block replaces it at once, and no twin exists. In a windowed group
the own block and its twin fall out of the window together.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class KeptBlocks:
    """The kept blocks of one sequence: rising stretches, each a first position and `width` blocks for each position."""

    __slots__ = ("_stretches",)

    def __init__(self) -> None:
        self._stretches: list[tuple[int, array[int]]] = []

    def __iter__(self) -> Iterator[tuple[int, array[int]]]:
        return iter(self._stretches)

    def add(self, position: int, blocks: array[int], width: int) -> None:
        """Keeps blocks from `position` on, behind all kept ones. Takes ownership of the array."""
        if self._stretches:
            first, before = self._stretches[-1]
            if first + len(before) // width == position:
                before.extend(blocks)
                return
        self._stretches.append((position, blocks))

    def lay_over(self, blocks: array[int], width: int) -> None:
        """Writes the kept blocks over the published ones in a table."""
        for position, own in self._stretches:
            blocks[position * width : position * width + len(own)] = own

    def take_from(self, first: int, width: int) -> list[tuple[int, array[int]]]:
        """Takes out the kept blocks from a position on, the deepest stretch first."""
        taken: list[tuple[int, array[int]]] = []
        while self._stretches:
            position, own = self._stretches[-1]
            if position + len(own) // width <= first:
                break
            self._stretches.pop()
            cut = max(first - position, 0)
            if cut:
                self._stretches.append((position, own[: cut * width]))
            taken.append((position + cut, own[cut * width :]))
            if cut:
                break
        return taken

    def take_before(self, end: int, width: int) -> list[array[int]]:
        """Takes out the kept blocks before a position, the deepest stretch first."""
        taken: list[array[int]] = []
        while self._stretches and self._stretches[0][0] < end:
            position, own = self._stretches.pop(0)
            cut = (end - position) * width
            if cut < len(own):
                self._stretches.insert(0, (end, own[cut:]))
            taken.insert(0, own[:cut])
        return taken
