"""Rebuilds full attention: published blocks into a tree, the tree into runs, sequences onto their ends.

The stretches of `tree.py` are cut into runs where a sequence ends, where prefixes diverge, between held and cached
blocks, and where the order of release is interrupted. Blocks are then evicted in the same order as in the lost pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.kept import KeptBlocks
from quire_allocator.core.groups.manager import AnyManager
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.rebuild.report import BlockUse, ReportedSequence, ReportedStretch, refuse
from quire_allocator.core.rebuild.tree import Forest, JoinedStretch, Spot
from quire_allocator.core.scopes import Namespace, Scoped
from quire_allocator.core.spec import DIGEST_BYTES, NULL_BLOCK


class ReportedRunPart(NamedTuple):
    """A sequence's path: the `end` of its published part (None if it has none), and its unpublished blocks.

    Attributes:
        borrowed: the position under which the first of its own blocks is published.
        shares: whether the first block is half filled, so that another sequence may have it, too.
        owns: number of its tail and kept blocks that count as held for this sequence.
        kept: its own blocks in place of published ones; None if there are none.
    """

    scope: RunScope
    end: Spot | None
    published: int
    tail: array[int]
    borrowed: Spot | None
    shares: bool
    owns: int
    kept: KeptBlocks | None


class RunBuilder:
    """Builds the part of full attention, as `rebuild.Builder` says."""

    def __init__(self, manager: AnyManager, pool: Pool, use: BlockUse) -> None:
        assert isinstance(manager, FullAttentionManager)
        self._manager = manager
        self._pool = pool
        self._use = use
        self._number = pool.managers.index(manager)
        self._forest = Forest(manager.width, use)
        self._is_linked = False
        # First block of a half-filled position -> namespace and end of the prefix before it, and the position's blocks.
        self._sharers: dict[int, tuple[str, Spot | None, array[int]]] = {}
        self._parts: dict[int, list[RunPart]] = {}

    def read(self, prefix: ReportedStretch, column: int, first_place: int) -> None:
        """Takes in published blocks of the manager's group number `column`."""
        self._forest.read(prefix, column, first_place)

    def locate(self, space: Namespace, sequence: ReportedSequence) -> Callable[[], RunPart]:
        """Finds the end of the published part, and claims the rest."""
        rebuilt = self._rebuilt(space, sequence)
        return lambda: self._part(rebuilt)

    def _rebuilt(self, space: Namespace, sequence: ReportedSequence) -> ReportedRunPart:
        self._link()
        manager, committed, size = self._manager, sequence.committed_token_count, self._manager.block_size
        tables = [sequence.tables[group] for group in manager.groups]
        length, published = -(-sequence.token_count // size), committed // size
        if any(len(table) != length for table in tables):
            refuse(f"the tables of sequence {sequence.sequence_id} do not fit its {sequence.token_count} tokens")
        end = None
        if published:
            end = self._forest.spot(space.name, tables[0][published - 1], published - 1)
            if end is None:
                refuse(f"block {tables[0][published - 1]} of sequence {sequence.sequence_id} has no chain of digests")
            end.stretch.end_at(end.offset)
        tail = array("I", [table[position] for position in range(published, length) for table in tables])
        scope = space.scopes[self._number]
        assert isinstance(scope, RunScope)
        shares = bool(committed % size)
        borrowed = self._forest.spot(space.name, tail[0], published) if shares else None
        half_filled = tail[: manager.width]
        if borrowed is not None and _before(borrowed) == end:
            if self._forest.blocks_at(borrowed) != half_filled:
                refuse(f"sequence {sequence.sequence_id} shares a half-filled position in some groups only")
            borrowed.stretch.cuts.append(borrowed.offset)
            borrowed.stretch.end_at(borrowed.offset)
            owned = tail[manager.width :]
        elif shares and tail[0] in self._sharers:
            if self._sharers[tail[0]] != (space.name, end, half_filled):
                refuse(f"block {tail[0]} is shared by sequences with different prefixes")
            borrowed, owned = None, tail[manager.width :]
        else:
            if shares:
                self._sharers[tail[0]] = (space.name, end, half_filled)
            borrowed, owned = None, tail
        self._use.claim(owned)
        kept, kept_count = None, 0
        if sequence.kept:
            kept = claim_kept(manager.groups, self._use, sequence, range(published), length)
            kept_count = sum([len(own) for _, own in kept])
        return ReportedRunPart(scope, end, published, tail, borrowed, shares, len(owned) + kept_count, kept)

    def build(self, spaces: dict[str, Namespace], ranks: array[int]) -> list[tuple[int, int, Scoped]]:
        """Files every stretch with a path to the root as runs."""
        self._link()
        order = self._forest.take_order()
        order.reverse()
        for stretch in order:
            parent = stretch.parent
            if parent is not None:
                parent.cuts.append(stretch.parent_index + 1)
                if stretch.held:
                    parent.held = max(parent.held, stretch.parent_index + 1)
        cached: list[tuple[int, int, Scoped]] = []
        while order:  # `pop` frees each stretch once its runs are made, unless a sequence or another stretch needs it
            stretch = order.pop()
            scope = spaces[stretch.namespace].scopes[self._number]
            assert isinstance(scope, RunScope)
            self._file(scope, stretch, ranks, cached)
        return cached

    def _part(self, rebuilt: ReportedRunPart) -> RunPart:
        """Holds the run, and shares the half-filled block."""
        tree = self._manager.tree
        run = rebuilt.end.stretch.run_at(rebuilt.end.offset) if rebuilt.end is not None else rebuilt.scope.root
        tree.hold(run)
        part = RunPart(rebuilt.scope, run, rebuilt.published, rebuilt.tail)
        part.kept = rebuilt.kept
        rebuilt.scope.held += rebuilt.owns
        if rebuilt.borrowed is not None:
            part.borrowed = rebuilt.borrowed.stretch.run_at(rebuilt.borrowed.offset)
            tree.hold(part.borrowed)
        elif rebuilt.shares:
            parts = self._parts.setdefault(rebuilt.tail[0], [])
            parts.append(part)
            if len(parts) == 2:
                self._manager._sharers[rebuilt.tail[0]] = parts
        return part

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _link(self) -> None:
        if not self._is_linked:
            self._is_linked = True
            self._forest.link()

    def _file(
        self, scope: RunScope, stretch: JoinedStretch, ranks: array[int], cached: list[tuple[int, int, Scoped]]
    ) -> None:
        """Makes the runs of a stretch, cached until sequences hold them."""
        width, reach, held = self._manager.width, stretch.reach, min(stretch.held, stretch.reach)
        own_ranks = _ranks(stretch.blocks[held * width : reach * width], width, ranks)
        cuts = {*stretch.cuts, held, *[held + jump for jump in _jumps(own_ranks, width)]}
        stretch.starts = starts = [0, *sorted([cut for cut in cuts if 0 < cut < reach])]
        above = stretch.parent
        parent = above.run_at(stretch.parent_index) if above is not None else scope.root
        for start, end in zip(starts, [*starts[1:], reach], strict=True):
            if start == end:  # The first position of the stretch lacks a block.
                break
            digests, blocks = stretch.digests[start * DIGEST_BYTES : end * DIGEST_BYTES], stretch.blocks
            own = blocks[start * width : end * width]
            run = self._manager.tree.add_child(parent, digests, own, stretch.first_position + start)
            run.live = 0
            scope.cached += len(own)
            self._pool.blocks.cached_count += len(own)
            stretch.runs.append(run)
            if start >= held:
                cached.append((own_ranks[end - 1 - held], stretch.first_position + end - 1, run))
            parent = run


def claim_kept(
    groups: Sequence[int], use: BlockUse, sequence: ReportedSequence, published: range, length: int
) -> KeptBlocks:
    """Claims the blocks that a sequence keeps in place of published ones at some positions, and returns them."""
    tables, kept = [sequence.kept[group] for group in groups], KeptBlocks()
    if any(len(table) != length for table in tables):
        refuse(f"sequence {sequence.sequence_id} has tables of kept blocks with another length than its tables")
    for position, own in enumerate(zip(*tables)):
        gaps = own.count(NULL_BLOCK)
        if gaps == len(own):
            continue
        if gaps or position not in published:
            refuse(f"sequence {sequence.sequence_id} keeps a block at position {position}, which is not published")
        use.claim(own)
        kept.add(position, array("I", own), len(tables))
    return kept


def _before(spot: Spot) -> Spot | None:
    """Returns the position before a spot; None at the root."""
    stretch, offset = spot
    if offset:
        return Spot(stretch, offset - 1)
    return Spot(stretch.parent, stretch.parent_index) if stretch.parent is not None else None


def _ranks(blocks: array[int], width: int, ranks: array[int]) -> list[int]:
    """Returns for each position the highest rank of its blocks."""
    found = [ranks[block] for block in blocks]
    return found if width == 1 else list(map(max, *[found[column::width] for column in range(width)]))


def _jumps(ranks: list[int], width: int) -> list[int]:
    """Returns the positions whose blocks were not evicted right after the block at the next position."""
    count = len(ranks)
    if not count or ranks.count(-1) == count or ranks == list(range(ranks[0], ranks[0] - count * width, -width)):
        return []
    return [
        index
        for index in range(1, count)
        if ranks[index - 1] - ranks[index] != width and not ranks[index - 1] == ranks[index] == -1
    ]
