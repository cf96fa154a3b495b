"""The slow twin of `rebuild_tree` and `rebuild_runs`: an object for every position, linked one by one."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.kept import KeptBlocks
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.rebuild.report import BlockUse, ReportedSequence, ReportedStretch, refuse
from quire_allocator.core.retention.stop import Run
from quire_allocator.core.scopes import Namespace, Scoped
from quire_allocator.core.spec import DIGEST_BYTES, NULL_BLOCK

_NONE: list[Node] = []  # the children of every node without children; never appended to


class Node:
    """One published position.

    Attributes:
        blocks: one per group; `NULL_BLOCK` where the report has none.
        ends: sequences whose published part ends here, or that borrow it.
        is_borrowed: whether it is a sequence's half-filled block, which must be a run of its own.
        is_held: whether a sequence ends here or below.
        run: the run that it became a part of.
    """

    # A report may have a million nodes, so defaults that rarely change belong to the class.
    children = _NONE
    parent: Node | None = None
    ends = 0
    is_borrowed = False
    is_held = False
    rank = -1
    run: Run | None = None

    def __init__(self, digest: bytes, parent_digest: bytes, position: int, blocks: list[int]) -> None:
        self.digest = digest
        self.parent_digest = parent_digest
        self.position = position
        self.blocks = blocks


class ReportedRunPart(NamedTuple):
    """A sequence's path: the `end` of its published part (None if it has none), and its unpublished blocks.

    Attributes:
        borrowed: the node as which the first of those blocks is published.
        shares: whether the first block is half filled, so that another sequence may have it, too.
        owns: number of blocks of the tail that count for this sequence.
    """

    scope: RunScope
    end: Node | None
    published: int
    tail: array[int]
    borrowed: Node | None
    shares: bool
    owns: int
    kept: KeptBlocks | None


class NodeBuilder:
    """Does the work of `RunBuilder`, position by position."""

    def __init__(self, manager: FullAttentionManager, pool: Pool, use: BlockUse) -> None:
        self._manager = manager
        self._pool = pool
        self._use = use
        self._trees: dict[str, dict[bytes, Node]] = {}
        self._orders: dict[str, list[Node]] = {}  # per namespace, the nodes with a path to the root, parents first
        self._by_block: dict[int, tuple[str, Node]] | None = None
        # first block of a half-filled position -> (namespace, last node before the position)
        self._sharers: dict[int, tuple[str, Node | None]] = {}
        self._parts: dict[int, list[RunPart]] = {}

    def read(self, prefix: ReportedStretch, column: int, first_place: int) -> None:
        """Takes in published blocks of the manager's group number `column`."""
        nodes = self._trees.setdefault(prefix.namespace, {})
        width, parent = self._manager.width, prefix.parent_digest
        if bool(parent) != bool(prefix.first_position):
            refuse("a prefix must have a parent digest unless it begins at position 0, and none if it does")
        digests, position = prefix.digests, prefix.first_position
        for start, block in zip(range(0, len(digests), DIGEST_BYTES), prefix.blocks, strict=True):
            digest = digests[start : start + DIGEST_BYTES]
            node = nodes.get(digest)
            if node is None:
                blocks = [NULL_BLOCK] * width
                blocks[column] = block
                nodes[digest] = Node(digest, parent, position, blocks)
            elif node.position != position or node.parent_digest != parent:
                refuse(f"the digest of block {block} is at two places")
            elif node.blocks[column] != NULL_BLOCK:
                refuse(f"blocks {node.blocks[column]} and {block} have the same digest")
            else:
                node.blocks[column] = block
            parent = digest
            position += 1

    def locate(self, space: Namespace, sequence: ReportedSequence) -> Callable[[], RunPart]:
        """Finds the end of the published part, and claims the rest."""
        rebuilt = self._rebuilt(space, sequence)
        return lambda: self._part(rebuilt)

    def _rebuilt(self, space: Namespace, sequence: ReportedSequence) -> ReportedRunPart:
        manager, committed, size = self._manager, sequence.committed_token_count, self._manager.block_size
        if self._by_block is None:
            self._by_block = self._link()
        tables = [sequence.tables[group] for group in manager.groups]
        length, published = -(-sequence.token_count // size), committed // size
        if any(len(table) != length for table in tables):
            refuse(f"the tables of sequence {sequence.sequence_id} do not fit its {sequence.token_count} tokens")
        end = None
        if published:
            end = self._node_of(space, tables[0][published - 1], published - 1)
            if end is None:
                refuse(f"block {tables[0][published - 1]} of sequence {sequence.sequence_id} has no chain of digests")
            end.ends += 1
        tail = array("I", [table[position] for position in range(published, length) for table in tables])
        scope = space.scopes[self._pool.managers.index(manager)]
        assert isinstance(scope, RunScope)
        shares = bool(committed % size)
        borrowed = self._node_of(space, tail[0], published) if shares else None
        if borrowed is not None and borrowed.parent is end:
            borrowed.ends += 1
            borrowed.is_borrowed = True
            owned = tail[manager.width :]
        elif shares and tail[0] in self._sharers:
            if self._sharers[tail[0]] != (space.name, end):
                refuse(f"block {tail[0]} is shared by sequences with different prefixes")
            borrowed, owned = None, tail[manager.width :]
        else:
            if shares:
                self._sharers[tail[0]] = (space.name, end)
            borrowed, owned = None, tail
        self._use.claim(owned)
        kept, count = None, len(owned)
        for position in range(length if sequence.kept else 0):
            own = array("I", [sequence.kept[group][position] for group in manager.groups])
            if own[0] != NULL_BLOCK:
                kept = kept or KeptBlocks()
                kept.add(position, own, manager.width)
                self._use.claim(own)
                count += manager.width
        return ReportedRunPart(scope, end, published, tail, borrowed, shares, count, kept)

    def build(self, spaces: dict[str, Namespace], ranks: array[int]) -> list[tuple[int, int, Scoped]]:
        """Files all nodes with a path to the root as runs."""
        if self._by_block is None:
            self._by_block = self._link()
        cached: list[tuple[int, int, Scoped]] = []
        number = self._pool.managers.index(self._manager)
        for name, order in self._orders.items():
            scope = spaces[name].scopes[number]
            assert isinstance(scope, RunScope)
            for node in order:
                if node.ends:
                    _mark_held(node)
                node.rank = max([ranks[block] for block in node.blocks])
            for stretch in _stretches(order, self._manager.width):
                run = self._file(scope, stretch)
                if not stretch[0].is_held:
                    cached.append((stretch[-1].rank, stretch[-1].position, run))
        return cached

    def _part(self, rebuilt: ReportedRunPart) -> RunPart:
        """Holds the run, and shares the half-filled block."""
        tree = self._manager.tree
        run = rebuilt.end.run if rebuilt.end is not None else rebuilt.scope.root
        assert run is not None, "a located node was filed"
        tree.hold(run)
        part = RunPart(rebuilt.scope, run, rebuilt.published, rebuilt.tail)
        part.kept = rebuilt.kept
        rebuilt.scope.held += rebuilt.owns
        if rebuilt.borrowed is not None:
            assert rebuilt.borrowed.run is not None, "a located node was filed"
            part.borrowed = rebuilt.borrowed.run
            tree.hold(part.borrowed)
        elif rebuilt.shares:
            parts = self._parts.setdefault(rebuilt.tail[0], [])
            parts.append(part)
            if len(parts) == 2:
                self._manager._sharers[rebuilt.tail[0]] = parts
        return part

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _link(self) -> dict[int, tuple[str, Node]]:
        """Links parents and children of complete nodes; returns nodes with a path to the root, by first block."""
        by_block = {}
        for name, nodes in self._trees.items():
            roots = []
            for node in nodes.values():
                if NULL_BLOCK in node.blocks:
                    continue
                if not node.position:
                    roots.append(node)
                    continue
                parent = nodes.get(node.parent_digest)
                if parent is not None and parent.position == node.position - 1:
                    node.parent = parent
                    if parent.children is _NONE:
                        parent.children = []
                    parent.children.append(node)
            order = self._orders[name] = _preorder(roots)
            for node in order:
                by_block[node.blocks[0]] = (name, node)
            for node in set(nodes.values()) - set(order):
                self._use.drop(array("I", node.blocks))
        return by_block

    def _node_of(self, space: Namespace, block: int, position: int) -> Node | None:
        assert self._by_block is not None
        name, node = self._by_block.get(block, ("", None))
        return node if node is not None and name == space.name and node.position == position else None

    def _file(self, scope: RunScope, stretch: list[Node]) -> Run:
        """Makes one run of these nodes, cached until a sequence holds it."""
        first = stretch[0]
        parent = first.parent.run if first.parent is not None else scope.root
        assert parent is not None, "parents come first"
        blocks = array("I")
        for node in stretch:
            blocks.extend(node.blocks)
        digests = b"".join([node.digest for node in stretch])
        run = self._manager.tree.add_child(parent, digests, blocks, first.position)
        run.live = 0
        scope.cached += len(blocks)
        self._pool.blocks.cached_count += len(blocks)
        for node in stretch:
            node.run = run
        return run


def _preorder(roots: list[Node]) -> list[Node]:
    """Returns every node below the roots: parents before children, only children right after their parents."""
    order, pending = [], list(reversed(roots))
    while pending:
        node = pending.pop()
        order.append(node)
        pending.extend(node.children)
    return order


def _mark_held(node: Node) -> None:
    """Marks everything before a sequence's end as held."""
    above: Node | None = node
    while above is not None and not above.is_held:
        above.is_held = True
        above = above.parent


def _stretches(order: list[Node], width: int) -> list[list[Node]]:
    """Returns the nodes of each run, in the same order."""
    stretches: list[list[Node]] = []
    for node in order:
        above = node.parent
        goes_on = (
            above is not None
            and len(above.children) == 1
            and not above.ends
            and not node.is_borrowed
            and above.is_held == node.is_held
            and (node.is_held or above.rank == node.rank + width or above.rank == node.rank == -1)
        )
        if goes_on:
            stretches[-1].append(node)
        else:
            stretches.append([node])
    return stretches
