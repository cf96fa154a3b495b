"""The part of one sequence in a windowed group."""

from __future__ import annotations

from array import array

from quire_allocator.core.groups.fallen import WindowScope
from quire_allocator.core.groups.kept import KeptBlocks
from quire_allocator.core.retention.stop import Unit
from quire_allocator.core.scopes import Scoped
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import NEVER, NO_BLOCKS, NULL_BLOCK


class WindowPart(Part):
    """The blocks of one sequence in a manager of windows.

    Attributes:
        units: the units in its table, from position `first` on.
        tail: blocks behind them, `width` for each position.
        falling: units and stretches that a commit lets fall out, rising; empty once the commit is settled.
        needed: fallen units that a hit at the last edge before the committed tokens would take.
        kept: its own blocks that replace published ones in its table; None before the first.
    """

    __slots__ = ("falling", "first", "kept", "needed", "scope", "tail", "units")

    def __init__(self, scope: WindowScope, first: int, units: list[Unit]) -> None:
        self.scope = scope
        self.first = first
        self.units = units
        self.tail = NO_BLOCKS  # All empty tails share this array, which never changes.
        self.falling: tuple[Scoped, ...] = ()
        self.needed: tuple[Unit, ...] = ()
        self.kept: KeptBlocks | None = None

    def end(self, width: int) -> int:
        """Returns the position behind the end of the table; each position has `width` blocks."""
        return self.first + len(self.units) + len(self.tail) // width

    def add(self, blocks: array[int]) -> None:
        """Adds blocks, and takes ownership of the array: while decoding, the array becomes the tail."""
        self.scope.held += len(blocks)
        if self.tail:
            self.tail.extend(blocks)
        else:
            self.tail = blocks

    def is_shared(self, position: int) -> bool:
        """Tells whether the half-filled block at a position is shared or published."""
        if self.tail or position != self.first + len(self.units) - 1:
            return False
        unit = self.units[-1]
        return unit.live > 1 or unit.is_published

    def published(self, positions: range) -> list[Unit]:
        """Returns the published units at these positions that the sequence has or remembers."""
        first, units, found = self.first, self.units, list[Unit]()
        if positions and positions.start < first:
            found = [unit for unit in self.fallen() if unit.first_position in positions]
        found += [units[position - first] for position in positions if first <= position]
        return [unit for unit in found if unit.is_published]

    def fallen(self) -> list[Unit]:
        """Returns the published units that fell out, or are about to, and that the sequence still remembers."""
        known = [*self.needed, *[entry for entry in self.falling if isinstance(entry, Unit)]]
        return [unit for unit in known if unit.is_published]

    def first_alone(self, width: int) -> int:
        """Returns the first kept position from which on no other sequence holds a published block that a kept one
        replaces; `NEVER` if there is none."""
        first = NEVER
        for position, own in reversed(list(self.kept or ())):
            alone, start = 0, position - self.first
            for unit in reversed(self.units[start : start + len(own) // width]):
                if unit.live > 1:
                    break
                alone += 1
            if alone:
                first = position + len(own) // width - alone
            if alone < len(own) // width:
                break
        return first

    def tables(self, width: int) -> list[array[int]]:
        """Returns one table for each of `width` groups."""
        nulls = array("I", [NULL_BLOCK]) * self.first
        tables = [
            nulls + array("I", [unit.blocks[column] for unit in self.units]) + self.tail[column::width]
            for column in range(width)
        ]
        for position, own in self.kept or ():
            for column, table in enumerate(tables):
                table[position : position + len(own) // width] = own[column::width]
        return tables
