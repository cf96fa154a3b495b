"""Blocks of a sequence's own that stand in its table in the place of published ones, in an append-only pool.

An engine that cannot replace an entry of a table cannot follow a swap. Where a commit finds a digest published already,
by a block that another sequence holds, the sequence therefore

    1. keeps     its own block, and holds the published one beside it, its *twin*: so what follows can be published
                 below a published parent, and hit by others
    2. takes over: once nobody else holds the twin and somebody needs its block, the own block is published in its place
    3. frees     both

Where nobody holds the published block, the own one takes its place at once, and there are never two. In a windowed
group both fall out of the window together.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator


class KeptBlocks:
    """What one sequence keeps: stretches of positions, rising, as first position and blocks, `width` a position."""

    __slots__ = ("_stretches",)

    def __init__(self) -> None:
        self._stretches: list[tuple[int, array[int]]] = []

    def __iter__(self) -> Iterator[tuple[int, array[int]]]:
        return iter(self._stretches)

    def add(self, position: int, blocks: array[int], width: int) -> None:
        """Keeps blocks from a position on that is behind all others; the array is this object's from now on."""
        if self._stretches:
            first, before = self._stretches[-1]
            if first + len(before) // width == position:
                before.extend(blocks)
                return
        self._stretches.append((position, blocks))

    def lay_over(self, blocks: array[int], width: int) -> None:
        """Writes what is kept into a table that names the published blocks."""
        for position, own in self._stretches:
            blocks[position * width : position * width + len(own)] = own

    def take_from(self, first: int, width: int) -> list[tuple[int, array[int]]]:
        """Takes out what is kept from a position on, the deepest stretch first."""
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
        """Takes out what is kept before a position, the deepest stretch first."""
        taken: list[array[int]] = []
        while self._stretches and self._stretches[0][0] < end:
            position, own = self._stretches.pop(0)
            cut = (end - position) * width
            if cut < len(own):
                self._stretches.insert(0, (end, own[cut:]))
            taken.insert(0, own[:cut])
        return taken

    def take_all(self) -> list[array[int]]:
        """Takes out everything, the deepest stretch first."""
        taken = [own for _, own in reversed(self._stretches)]
        self._stretches = []
        return taken
