"""Entries for policies of eviction to rank, without a tree around them."""

from __future__ import annotations

from quire_allocator.core.eviction.queue import Entry


class Stretch(Entry):
    """An entry without a tree."""

    def __init__(self, name: int = 0, blocks: int = 1, position: int = 0) -> None:
        super().__init__()
        self.name, self.blocks, self.position = name, blocks, position

    @property
    def block_count(self) -> int:
        return self.blocks

    @property
    def first_position(self) -> int:
        return self.position

    def key_at(self, offset: int) -> bytes:
        return b"%d:%d" % (self.name, offset)
