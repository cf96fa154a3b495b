"""An owner's report of a pool that this allocator lost, as values; `rebuild.py` makes a pool from it.

The owner is always right, because it has the pages. Only the report can be wrong. A wrong report is refused as a whole,
with a sentence that names the sequence, the block or the digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import NULL_BLOCK, PoolSpec


class ReportedSequence(NamedTuple):
    """One live sequence.

    Attributes:
        tables: one per group; `NULL_BLOCK` where a windowed group gave a block back.
        prompt_token_count, chunk_token_count: counts of its first grow; 0 for a fork.
        told: token counts where later hits should end, as answered to its first grow.
        kept: one table per group, with its own blocks where they replace published ones (which are in `tables`) and
            `NULL_BLOCK` elsewhere; empty if it keeps none.
    """

    sequence_id: int
    namespace: str
    token_count: int
    committed_token_count: int
    tables: Sequence[array[int]]
    priority: int = 0
    prompt_token_count: int = 0
    chunk_token_count: int = 0
    told: tuple[int, ...] = ()
    kept: Sequence[array[int]] = ()


class ReportedStretch(NamedTuple):
    """Consecutive published blocks of one prefix in one group.

    Attributes:
        first_position: index of the first block in the table; for STATE, the number of digest blocks to its end.
        parent_digest: the digest of the block before the first one. Empty at the root and, except for full
            attention, if the owner no longer knows it.
        digests: 32 bytes for each block.
    """

    namespace: str
    group: int
    first_position: int
    parent_digest: bytes
    digests: bytes
    blocks: array[int]


@dataclass(slots=True)
class Report:
    """A whole pool.

    Attributes:
        sequences: the live sequences, by rising id.
        prefixes: every published block, held or not; if the report came in parts, only the ones not read before.
        released: published blocks without holders, in order of release.
        last_sequence_id: the highest id that was ever created.
    """

    sequences: list[ReportedSequence] = field(default_factory=list)
    prefixes: list[ReportedStretch] = field(default_factory=list)
    released: Sequence[int] = ()
    last_sequence_id: int = 0


def refuse(message: str) -> NoReturn:
    """Refuses a wrong report. Nothing has changed.

    Raises:
        Refusal: MALFORMED, always.
    """
    raise Refusal("MALFORMED", f"report: {message}")


_PRIVATE, _UNUSED, _DROPPED = -1, -2, -3


def check_block_ids(spec: PoolSpec, blocks: Sequence[int]) -> None:
    """Refuses blocks that the pool does not have."""
    if blocks and not spec.first_block_id <= min(blocks) <= max(blocks) < spec.block_id_end:
        wrong = next(block for block in blocks if not spec.first_block_id <= block < spec.block_id_end)
        refuse(f"block {wrong} is out of range: the pool has {spec.block_count} blocks, from {spec.first_block_id}")


class BlockUse:
    """Users of each block: every block is published at most once, or belongs to one sequence."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._places = array("i", [_UNUSED]) * spec.block_id_end  # place of each published block, by block id
        self._place_count = 0
        self.block_count = 0  # blocks that have a use, including blocks that the rebuilt pool leaves out

    def publish(self, blocks: array[int]) -> int:
        """Gives published blocks consecutive places; returns the first place."""
        places = self._places
        first = place = self._place_count
        check_block_ids(self._spec, blocks)
        for block in blocks:
            if places[block] != _UNUSED:
                refuse(f"block {block} is published twice")
            places[block] = place
            place += 1
        self._place_count = place
        self.block_count += len(blocks)
        return first

    def place(self, block: int) -> int | None:
        """Returns the place of a published block; None for any other."""
        place = self._places[block] if block < len(self._places) else _UNUSED
        return place if place >= 0 else None

    def drop(self, blocks: array[int]) -> None:
        """Marks published blocks that the rebuilt pool leaves out."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._places[block] = _DROPPED

    def claim(self, blocks: Sequence[int]) -> None:
        """Marks blocks as one sequence's own, and refuses any that has another use."""
        check_block_ids(self._spec, blocks)
        self.block_count += len(blocks)
        for block in blocks:
            place = self._places[block]
            if place == _PRIVATE:
                refuse(f"block {block} is held twice")
            if place != _UNUSED:  # The block is published, even if the rebuilt pool leaves it out.
                refuse(f"block {block} has a digest, but a sequence holds it as not yet written")
            self._places[block] = _PRIVATE

    def unused(self) -> array[int]:
        """Returns the blocks without users, the lowest first."""
        first = self._spec.first_block_id
        return array("I", (block for block, place in enumerate(self._places) if place < _PRIVATE and block >= first))
