"""Slots of append-only pools that stay in a table although another slot, their twin, is published in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.allocator.twin.kinds import Kind
from tests.allocator.twin.state import Slot

if TYPE_CHECKING:
    from tests.allocator.twin.pool_twin import TwinPool


def exchange(table: list[Slot | None], index: int, other: Slot) -> None:
    """Puts the published slot into the table, with the blocks that the table had there. The sequence's own blocks are
    given up.
    """
    own = table[index]
    assert own is not None
    table[index], own.twin = other, None
    own.blocks, other.blocks = other.blocks, own.blocks


def keep_or_exchange(pool: TwinPool, table: list[Slot | None], index: int, other: Slot) -> bool:
    """Keeps the own slot together with a slot that is already published, and returns True. If the published slot has no
    holders, exchanges it with the own one instead, and returns False."""
    own = table[index]
    assert own is not None
    if not pool.is_held(other):
        exchange(table, index, other)
        return False
    own.twin = other
    return True


def count_tail(kind: Kind, slots: list[Slot], length: int, committed: int) -> int:
    """Counts the slots at the end of a table (the last one first) that are still to be written, or never published."""
    count = 0
    for position, slot in zip(reversed(range(length)), slots, strict=False):
        if kind.keeps_prefixes:
            is_of_the_tail = slot.key is None and slot.twin is None
        else:
            is_of_the_tail = kind.is_windowed and (position + 1) * kind.block_size > committed
        if not is_of_the_tail:
            break
        count += 1
    return count


def release_kept(pool: TwinPool, slots: list[Slot]) -> list[Slot]:
    """Releases, in this order, slots with a twin that are in no table. Returns the other slots, and the twins."""
    for slot in slots:
        if slot.twin is not None:
            pool._released(slot)
    return [slot.twin or slot for slot in slots]


def take_over(pool: TwinPool) -> bool:
    """Gives up twins without other holders, because blocks are short; returns whether there were any. In each table,
    takes twins from the last one on, up to the first one with another holder."""
    found = False
    for sequence in pool.sequences.values():
        for table in sequence.tables:
            for index, own in reversed(list(enumerate(table))):
                if own is not None and own.twin is not None:
                    if pool.holders(own.twin) > 1:
                        break
                    exchange(table, index, own.twin)
                    pool._released(own)
                    pool.taken_over += 1
                    found = True
    return found
