"""What one sequence has of a windowed group, and what publishing does where a digest is published already.

In an append-only pool (`kept.py`) a commit leaves the sequence's own block in its table:

    nobody holds the published one      the own block takes its place at once
    another sequence holds it           it is held beside the own one, until the position falls out or is taken over
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.fallen import FallenManager, WindowScope
from quire_allocator.core.groups.kept import KeptBlocks
from quire_allocator.core.retention.retention import Retention
from quire_allocator.core.retention.stop import Unit, UnitKey
from quire_allocator.core.scopes import Scoped
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import NEVER, NO_BLOCKS, GroupSpec, PoolSpec, Swap


class WindowPart(Part):
    """What one sequence has here.

    Attributes:
        units: those in its table, from position `first` on.
        tail: blocks behind them, `width` for each position.
        falling: what a commit lets fall out, rising; only until it is settled.
        needed: units that fell out, which a hit at the last edge before the committed tokens would take.
        kept: blocks of its own that stand in its table in the place of published ones; None while there were none.
    """

    __slots__ = (
        "falling",
        "first",
        "kept",
        "needed",
        "scope",
        "tail",
        "units",
    )

    def __init__(self, scope: WindowScope, first: int, units: list[Unit]) -> None:
        self.scope = scope
        self.first = first
        self.units = units
        self.tail = NO_BLOCKS  # which nobody adds to
        self.falling: tuple[Scoped, ...] = ()
        self.needed: tuple[Unit, ...] = ()
        self.kept: KeptBlocks | None = None


class PublishingManager(FallenManager[WindowPart]):
    """What managers of windows do to publish a position, and with blocks that are kept beside published ones."""

    def __init__(
        self, spec: GroupSpec, groups: Sequence[int], pool: PoolSpec, log: EventLog, retention: Retention
    ) -> None:
        super().__init__(spec, groups, pool, log, retention)
        self._append_only = pool.append_only

    def _publish_own(self, part: WindowPart, unit: Unit, key: UnitKey, swaps: list[Swap]) -> Unit:
        """Gives a private unit its key. Returns the unit to use from now on: another one where the key was published
        before. In an append-only pool that one gets the blocks if nobody holds it, or they are kept beside it."""
        other = part.scope.find(key[0], key[1]) if self._append_only else None
        if other is None:
            return self._publish(part.scope, unit, key, swaps, key[0])
        own, position = unit.blocks, key[0]
        if other.live:
            swaps.extend(Swap(group, position, block) for group, block in zip(self.groups, other.blocks))
            part.kept = part.kept or KeptBlocks()
            part.kept.add(position, own, self.width)
            self._hold(other)
        else:
            self._hold(other)
            self._give_back(part, other.blocks)
            other.blocks = own
        return other

    def take_over(self, part: WindowPart) -> int | None:
        """Looks at positions from the last kept one on, up to one that another sequence holds, too."""
        if part.kept is None:
            return None
        width, first = self.width, NEVER
        for position, own in reversed(list(part.kept)):
            alone = 0
            for unit in reversed(part.units[position - part.first : position - part.first + len(own) // width]):
                if unit.live > 1:
                    break
                alone += 1
            if alone:
                first = position + len(own) // width - alone
            if alone < len(own) // width:
                break
        taken = part.kept.take_from(first, width)
        for position, own in taken:
            returned = NO_BLOCKS[:]
            for start in range(0, len(own), width):
                unit = part.units[position - part.first + start // width]
                returned.extend(unit.blocks)
                unit.blocks = own[start : start + width]
            self._give_back(part, returned)
        return first if taken else None

    def _give_back(self, part: WindowPart, blocks: array[int]) -> None:
        part.scope.held -= len(blocks)
        self._blocks.give_back(blocks)
