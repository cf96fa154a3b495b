"""The reported blocks of full attention, joined to trees: one for each namespace of one manager.

    1. read   prefixes as they come: every block and every digest gets a *place*, a number that only rises
    2. link   prefixes that follow one another become one *stretch*; stretches are hung below one another

A single block costs only its entries in two tables, by block and by digest. Everything else is slices. A digest names
the whole prefix before it, so the last block of a table leads to its whole path.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from quire_allocator.core.rebuild.report import BlockUse, ReportedStretch, refuse
from quire_allocator.core.retention.stop import Run
from quire_allocator.core.spec import DIGEST_BYTES, NULL_BLOCK


class JoinedStretch:
    """Consecutive positions of one prefix.

    Attributes:
        blocks: one per group for each position; `NULL_BLOCK` where the report has none.
        reach: how many positions have a block in every group; later positions are not taken over.
        parent, parent_index: the position before the first one; None at the root, and if it is unknown.
        is_rooted: whether there is a path to the root.
        held: how many positions some sequence holds.
        cuts: positions other than 0 at which a run must begin.
        starts, runs: the first position of each run made of this stretch, and these runs.
    """

    __slots__ = (
        *("blocks", "cuts", "digests", "first_position", "held", "is_rooted", "namespace", "parent", "parent_digest"),
        *("parent_index", "reach", "runs", "starts"),
    )

    def __init__(self, first: ReportedStretch, digests: bytes, blocks: array[int]) -> None:
        self.namespace = first.namespace
        self.first_position = first.first_position
        self.parent_digest = first.parent_digest
        self.digests = digests
        self.blocks = blocks
        self.reach = len(digests) // DIGEST_BYTES
        self.parent: JoinedStretch | None = None
        self.parent_index = 0
        self.is_rooted = False
        self.held = 0
        self.cuts: list[int] = []
        self.starts: list[int] = []
        self.runs: list[Run] = []

    def digest_before(self, index: int) -> bytes:
        """Returns the digest of the position before index `index`."""
        return self.digests[(index - 1) * DIGEST_BYTES : index * DIGEST_BYTES] if index else self.parent_digest

    def end_at(self, index: int) -> None:
        """Notes that a sequence ends in this position, and holds all before it."""
        self.cuts.append(index + 1)
        self.held = max(self.held, index + 1)

    def run_at(self, index: int) -> Run:
        """Returns the run that has this position."""
        return self.runs[bisect_right(self.starts, index) - 1]


class Spot(NamedTuple):
    """One position of a stretch."""

    stretch: JoinedStretch
    offset: int


class Piece:
    """A reported prefix of the manager's first group, and the offset of its blocks in a stretch."""

    __slots__ = ("first_place", "offset", "prefix", "stretch")

    def __init__(self, prefix: ReportedStretch, first_place: int) -> None:
        self.prefix = prefix
        self.first_place = first_place
        self.stretch: JoinedStretch | None = None  # None until the piece is linked
        self.offset = 0

    @property
    def end_position(self) -> int:
        """Returns the position behind its last block."""
        return self.prefix.first_position + len(self.prefix.blocks)


class Tree:
    """The reported prefixes of one namespace.

    Attributes:
        pieces: the prefixes of the manager's first group.
        places: the place of every digest in `pieces`.
        others: the prefixes of the further groups, each with its column.
    """

    __slots__ = ("others", "pieces", "places")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.places: dict[bytes, int] = {}
        self.others: list[tuple[int, ReportedStretch]] = []


class Forest:
    """The trees of all namespaces in a manager with `width` groups.

    Attributes:
        order: once linked, the stretches with a path to the root, parents first.
    """

    def __init__(self, width: int, use: BlockUse) -> None:
        self.order: list[JoinedStretch] = []
        self._width = width
        self._use = use
        self._trees: dict[str, Tree] = {}
        self._pieces: list[Piece] = []
        self._first_places: list[int] = []  # the first place of each piece

    def read(self, prefix: ReportedStretch, column: int, first_place: int) -> None:
        """Takes in blocks of group number `column`. The first block has place `first_place`, and the others follow."""
        if bool(prefix.parent_digest) != bool(prefix.first_position):
            refuse("a prefix must have a parent digest unless it begins at position 0, and none if it does")
        tree = self._trees.get(prefix.namespace)
        if tree is None:
            tree = self._trees[prefix.namespace] = Tree()
        if column:
            tree.others.append((column, prefix))
            return
        piece = Piece(prefix, first_place)
        tree.pieces.append(piece)
        self._pieces.append(piece)
        self._first_places.append(first_place)
        digests, known = prefix.digests, len(tree.places)
        own = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
        tree.places.update(zip(own, range(first_place, first_place + len(own)), strict=True))
        if len(tree.places) != known + len(own):
            _refuse_repeated(tree.pieces)

    def spot(self, namespace: str, block: int, position: int) -> Spot | None:
        """Returns the spot of a first group's block; None if it is not at this position, or not taken over."""
        place = self._use.place(block)
        if place is None:
            return None
        number = bisect_right(self._first_places, place) - 1
        if number < 0:
            return None
        piece = self._pieces[number]
        stretch, index = piece.stretch, place - piece.first_place
        if stretch is None or index >= len(piece.prefix.blocks):
            return None
        index += piece.offset
        fits = stretch.namespace == namespace and stretch.first_position + index == position
        return Spot(stretch, index) if fits and stretch.is_rooted and index < stretch.reach else None

    def blocks_at(self, spot: Spot) -> array[int]:
        """Returns the blocks of a position, one for each group."""
        first = spot.offset * self._width
        return spot.stretch.blocks[first : first + self._width]

    def link(self) -> None:
        """Joins the reported pieces once, and finds those with a path to the root."""
        for tree in self._trees.values():
            stretches = [self._join(chain) for chain in _chains(tree.pieces)]
            for column, prefix in tree.others:
                self._fill(tree, column, prefix)
            if self._width > 1:
                for stretch in stretches:
                    if NULL_BLOCK in stretch.blocks:
                        stretch.reach = stretch.blocks.index(NULL_BLOCK) // self._width
            self._hang(tree, stretches)
            for stretch in stretches:
                kept = stretch.reach if stretch.is_rooted else 0
                self._use.drop(stretch.blocks[kept * self._width :])

    def take_order(self) -> list[JoinedStretch]:
        """Returns `order`, and forgets the prefixes: runs of as many blocks are made next."""
        self._trees, self._pieces, self._first_places = {}, [], []
        return self.order

    def _join(self, chain: list[Piece]) -> JoinedStretch:
        """Makes one stretch of consecutive prefixes."""
        first, offset = chain[0].prefix, 0
        digests, blocks = first.digests, first.blocks
        if len(chain) > 1:
            digests = b"".join([piece.prefix.digests for piece in chain])
            blocks = array("I", b"".join([piece.prefix.blocks for piece in chain]))
        stretch = JoinedStretch(first, digests, blocks)
        for piece in chain:
            piece.stretch, piece.offset = stretch, offset
            offset += len(piece.prefix.blocks)
        if self._width > 1:
            stretch.blocks = array("I", [NULL_BLOCK]) * (self._width * len(blocks))
            stretch.blocks[:: self._width] = blocks
        return stretch

    def _fill(self, tree: Tree, column: int, prefix: ReportedStretch) -> None:
        """Puts the blocks of a further group next to the first group's blocks with the same digests."""
        width, digests, blocks, done = self._width, prefix.digests, prefix.blocks, 0
        parent = prefix.parent_digest
        while done < len(blocks):
            start, taken = done * DIGEST_BYTES, 1
            place = tree.places.get(digests[start : start + DIGEST_BYTES])
            if place is None:
                self._use.drop(blocks[done : done + 1])
            else:
                stretch, index = self._spot_at(place)
                if stretch.first_position + index != prefix.first_position + done:
                    refuse(f"the digest of block {blocks[done]} is at two places")
                if stretch.digest_before(index) != parent:
                    refuse(f"the digest of block {blocks[done]} is at two places")
                most = min(len(digests) - start, len(stretch.digests) - index * DIGEST_BYTES)
                if stretch.digests.startswith(digests[start : start + most], index * DIGEST_BYTES):
                    taken = most // DIGEST_BYTES
                first, end = index * width + column, (index + taken) * width
                for there, block in zip(stretch.blocks[first:end:width], blocks[done:], strict=False):
                    if there != NULL_BLOCK:
                        refuse(f"blocks {there} and {block} have the same digest")
                stretch.blocks[first:end:width] = blocks[done : done + taken]
            done += taken
            parent = digests[(done - 1) * DIGEST_BYTES : done * DIGEST_BYTES]

    def _hang(self, tree: Tree, stretches: list[JoinedStretch]) -> None:
        """Links each stretch to the position before it, and lists in `order` those with a path to the root."""
        children: dict[JoinedStretch, list[JoinedStretch]] = {}
        pending: list[JoinedStretch] = []
        for stretch in reversed(stretches):
            if not stretch.first_position:
                pending.append(stretch)
                continue
            place = tree.places.get(stretch.parent_digest)
            if place is not None:
                above, index = self._spot_at(place)
                if above.first_position + index + 1 == stretch.first_position and index < above.reach:
                    stretch.parent, stretch.parent_index = above, index
                    children.setdefault(above, []).append(stretch)
        while pending:
            stretch = pending.pop()
            stretch.is_rooted = True
            self.order.append(stretch)
            pending.extend(children.get(stretch, ()))

    def _spot_at(self, place: int) -> Spot:
        """Returns the spot of the digest with this place."""
        piece = self._pieces[bisect_right(self._first_places, place) - 1]
        assert piece.stretch is not None, "the tree must be joined before a lookup"
        return Spot(piece.stretch, piece.offset + place - piece.first_place)


def _chains(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Joins pieces that follow one another without a branch."""
    ends: dict[bytes, Piece] = {piece.prefix.digests[-DIGEST_BYTES:]: piece for piece in pieces}
    counts = Counter([piece.prefix.parent_digest for piece in pieces])
    after: dict[int, Piece] = {}  # pieces by the first place of the previous piece
    heads: list[Piece] = []
    for piece in pieces:
        prefix = piece.prefix
        above = ends.get(prefix.parent_digest)
        if above is not None and counts[prefix.parent_digest] == 1 and above.end_position == prefix.first_position:
            after[above.first_place] = piece
        else:
            heads.append(piece)
    for head in heads:
        chain = [head]
        following = after.get(head.first_place)
        while following is not None:
            chain.append(following)
            following = after.get(following.first_place)
        yield chain


def _refuse_repeated(pieces: list[Piece]) -> None:
    """Refuses pieces that contain a digest twice, and names the block."""
    seen: dict[bytes, tuple[int, int, bytes]] = {}
    for piece in pieces:
        prefix = piece.prefix
        parent = prefix.parent_digest
        for offset, block in enumerate(prefix.blocks):
            digest = prefix.digests[offset * DIGEST_BYTES : (offset + 1) * DIGEST_BYTES]
            other, position, before = seen.setdefault(digest, (block, prefix.first_position + offset, parent))
            if (position, before) != (prefix.first_position + offset, parent):
                refuse(f"the digest of block {block} is at two places")
            if other != block:
                refuse(f"blocks {other} and {block} have the same digest")
            parent = digest
