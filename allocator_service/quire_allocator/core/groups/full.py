"""Full attention: a sequence is a path in a tree of runs, and a tail of its own.

Who owns which part of a sequence's table, in positions:

    [0, published)     the runs from the root down to `run`; shareable by anyone, immutable
    [published, end)   `tail`: granted; only this sequence writes it; only the first one can be shared (after a fork)

A half-filled block that a fork shares is in the tails of all its *sharers*. When one sharer fills and publishes this
block, the block becomes a run of its own. The other sharers *borrow* this run until they copy it or end.

In an append-only pool (`kept.py`), a table may keep the sequence's own blocks at some published positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.kept import KeptBlocks
from quire_allocator.core.groups.manager import Commit, IndexedStretch, Manager
from quire_allocator.core.groups.run_tree import RunTree, behind_hit, holders_of_runs
from quire_allocator.core.groups.runs import RunHit, RunScope
from quire_allocator.core.retention.partings import Behind
from quire_allocator.core.retention.retention import Retention
from quire_allocator.core.retention.stop import Run, Unit
from quire_allocator.core.scopes import Namespace, Scoped
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import DIGEST_BYTES, NO_BLOCKS, Copy, GroupSpec, PoolSpec, Swap
from quire_allocator.core.stretches import common_positions, every, filled


class RunPart(Part):
    """The blocks of one sequence in this manager.

    Attributes:
        run: the deepest run of its prefix.
        published: positions from the root to the end of that run.
        tail: blocks behind them, `width` for each position.
        borrowed: the run that another sharer made by publishing the half-filled first position of this tail; or None.
        kept: its own blocks that replace published ones in its table; None before the first.
    """

    __slots__ = ("borrowed", "kept", "published", "run", "scope", "tail")

    def __init__(self, scope: RunScope, run: Run, published: int, tail: array[int]) -> None:
        self.scope = scope
        self.run = run
        self.published = published
        self.tail = tail
        self.borrowed: Run | None = None
        self.kept: KeptBlocks | None = None


class FullAttentionManager(Manager[RunScope, RunHit, RunPart]):
    """All full-attention groups of one block size. The base class `Manager` documents the methods."""

    def __init__(
        self, spec: GroupSpec, groups: Sequence[int], pool: PoolSpec, log: EventLog, retention: Retention
    ) -> None:
        super().__init__(spec, groups, pool, log, retention)
        self.tree = RunTree(self.width, spec.block_size, log, retention)
        self._sharers: dict[int, list[RunPart]] = {}  # first block of a shared unpublished position -> its sharers

    def new_scope(self, namespace: Namespace) -> RunScope:
        return RunScope(namespace, self)

    # -- matching ------------------------------------------------------------------------------------------------------

    def find(self, scope: RunScope, digests: bytes, token_limit: int) -> RunHit:
        if self._stride > 1:
            digests = every(digests, self._stride)
        return self.tree.find(scope.root, digests, token_limit)

    def cut_after(self, hit: RunHit) -> None:
        """Splits the run where the hit ends. The lower part does not count as left behind by the prompt."""
        if hit.cut:
            hit.runs[-1], hit.cut = self.tree.cut(hit.runs[-1], hit.cut), 0

    # -- the life of a sequence ----------------------------------------------------------------------------------------

    def needed_after(self, hit: RunHit, token_count: int) -> int:
        return -(-token_count // self.block_size) * self.width - hit.block_count

    def open(self, scope: RunScope, hit: RunHit) -> RunPart:
        runs = hit.runs
        run = runs[-1] if runs else scope.root
        if hit.cut:
            run = self.tree.split(run, hit.cut)
            runs = [*runs[:-1], run]
        for shared in runs:
            self._blocks.policy.hit(shared)
        self.tree.hold(run)
        return RunPart(scope, run, hit.token_count // self.block_size, NO_BLOCKS[:])

    def needed(self, part: RunPart, token_count: int, until: int) -> int:
        entries = -(-until // self.block_size) * self.width
        missing = entries - part.published * self.width - len(part.tail)
        return missing + self.width * self._must_copy(part, token_count)

    def footprint(self, part: RunPart, token_count: int) -> int:
        return -(-token_count // self.block_size) * self.width

    def peak(self, token_count: int, pass_token_count: int) -> int:
        return -(-token_count // self.block_size) * self.width

    def room(self, part: RunPart, token_count: int) -> int:
        if self._must_copy(part, token_count):
            return token_count
        return (part.published + len(part.tail) // self.width) * self.block_size

    def grow(self, part: RunPart, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        part.scope.held += len(blocks)
        if token_count % self.block_size and self._must_copy(part, token_count):
            copies.extend(map(Copy, part.tail, blocks))
            self._leave_shared(part)
            part.tail = blocks
        else:
            part.tail.extend(blocks)
        return (part.published + len(part.tail) // self.width) * self.block_size

    def append_row(self, part: RunPart, blocks: array[int], first: int) -> None:
        width = self.width
        part.scope.held += width
        if width == 1:
            part.tail.append(blocks[first])
        else:
            part.tail.extend(blocks[first : first + width])

    def replaced_count(self, part: RunPart, token_count: int) -> int:
        """Counts the half-filled block if this sequence is the last one that borrows it."""
        return self.width if part.borrowed is not None and part.borrowed.live == 1 else 0

    def commit(self, part: RunPart, new: Commit) -> None:
        committed, swaps = new.committed, new.swaps
        digests = filled(new.digests, self._stride, committed, self.block_size)
        if not digests:
            return
        if part.published < committed // self.block_size:  # an earlier block has no digest: later blocks lack a parent
            return
        width = self.width
        count = len(digests) // DIGEST_BYTES
        if self._sharers and part.tail[0] in self._sharers:
            taken = self._commit_shared(part, digests, swaps)
            digests = digests[taken * DIGEST_BYTES :]
            count -= taken
        if count and part.run.children:
            taken = self._adopt(part, digests, swaps)
            if taken:
                digests = digests[taken * DIGEST_BYTES :]
                count -= taken
        if count:
            blocks = part.tail
            part.tail = blocks[count * width :]
            del blocks[count * width :]
            self._publish(part, digests, blocks, count)

    def fork(self, part: RunPart, committed: int) -> RunPart:
        child = RunPart(part.scope, part.run, part.published, NO_BLOCKS[:])
        self.tree.hold(part.run)
        if committed > part.published * self.block_size:
            child.tail = part.tail[: self.width]
            if part.borrowed is not None:
                child.borrowed = part.borrowed
                self.tree.hold(part.borrowed)
            else:
                self._sharers.setdefault(child.tail[0], [part]).append(child)
        return child

    def shrink(self, part: RunPart, until: int) -> None:
        keep = -(-until // self.block_size) * self.width - part.published * self.width
        if keep < len(part.tail):
            self._give_back(part.scope, part.tail[keep:])
            del part.tail[keep:]

    def free(self, part: RunPart) -> None:
        tail = part.tail
        if tail:
            if part.borrowed is not None or tail[0] in self._sharers:
                self._give_back(part.scope, tail[self.width :])
                self._leave_shared(part)
            else:
                self._give_back(part.scope, tail)
        if part.kept is not None:
            for _, own in part.kept.take_from(0, self.width):
                self._give_back(part.scope, own)
        self.tree.release(part.run)

    def tables(self, part: RunPart) -> list[array[int]]:
        blocks = self.tree.path_blocks(part.run, part.tail)
        if part.kept is not None:
            part.kept.lay_over(blocks, self.width)
        return [blocks] if self.width == 1 else self.added(blocks)

    def shared_token_count(self, part: RunPart) -> int:
        run, position = part.run, part.published
        # A run that only this sequence holds has one holder. The deepest run has two if the sequence borrows its child,
        # and no other sequence holds that child: the child is the second holder.
        own = 2 if part.borrowed is not None and part.borrowed.live == 1 else 1
        while run.parent is not None and run.live == own:
            position = run.first_position
            run, own = run.parent, 1
        return position * self.block_size

    # -- publishing ----------------------------------------------------------------------------------------------------

    def _publish(self, part: RunPart, digests: bytes, blocks: array[int], count: int) -> None:
        """Publishes new blocks below the sequence's run; no child of it begins with their first digest."""
        if self.tree.is_extendable(part.run):
            self.tree.extend(part.run, digests, blocks, part.published)
        else:
            part.run = self.tree.add_child(part.run, digests, blocks, part.published)
        part.published += count

    def _adopt(self, part: RunPart, digests: bytes, swaps: list[Swap]) -> int:
        """Moves the sequence down the tree along blocks that are published already; returns how many positions.

        The sequence gives its own copies back, so that no child is ever published under a private parent. In an
        append-only pool its copies stay in its table: they replace published blocks without holders, and are kept
        beside held ones.
        """
        width, taken, returned = self.width, 0, NO_BLOCKS[:]
        count = len(digests) // DIGEST_BYTES
        while taken < count:
            start = taken * DIGEST_BYTES
            child = part.run.children.get(digests[start : start + DIGEST_BYTES])
            if child is None:
                break
            same = common_positions(child.digests, digests, start, len(digests))
            if same * DIGEST_BYTES < child.size:
                goes_another_way = start + same * DIGEST_BYTES < len(digests)
                child = self.tree.split(child, same) if goes_another_way else self.tree.cut(child, same)
            own = part.tail[taken * width : (taken + same) * width]
            if self._append_only and not child.live:
                returned.extend(child.blocks)
                child.blocks = own
            else:
                for position in range(same):
                    for column, group in enumerate(self.groups):
                        swaps.append(Swap(group, part.published + position, child.blocks[position * width + column]))
                if self._append_only:
                    part.kept = part.kept or KeptBlocks()
                    part.kept.add(part.published, own, width)
                else:
                    returned.extend(own)
            self._move_to(part, child)
            taken += same
        del part.tail[: taken * width]
        self._give_back(part.scope, returned)
        return taken

    def _move_to(self, part: RunPart, child: Run) -> None:
        """Makes the sequence end in a child run with the same blocks that it has computed."""
        if not child.live:
            self._blocks.policy.hit(child)
        self.tree.hold(child)
        self.tree.release(part.run)
        part.run = child
        part.published = child.end_position

    def take_over(self, part: RunPart) -> int | None:
        if part.kept is None:
            return None
        taken = part.kept.take_from(self.shared_token_count(part) // self.block_size, self.width)
        for position, own in taken:
            self._give_back(part.scope, self.tree.exchange(part.run, position, own))
        return taken[-1][0] if taken else None

    def _commit_shared(self, part: RunPart, digests: bytes, swaps: list[Swap]) -> int:
        """Publishes the full positions of a tail. Forks share its first position.

        Returns how many positions: all, or only the first if its digest is already published.
        """
        width, count = self.width, 1
        child = part.run.children.get(digests[:DIGEST_BYTES])
        if child is not None:  # the digest is published: the sequence takes its block, and leaves the shared block
            if child.size > DIGEST_BYTES:
                child = self.tree.cut(child, 1)
            swaps.extend(Swap(g, part.published, b) for g, b in zip(self.groups, child.blocks))
            self._leave_shared(part)
            self._move_to(part, child)
        else:
            count = len(digests) // DIGEST_BYTES
            blocks = part.tail[: count * width]
            others = [sharer for sharer in self._sharers.pop(blocks[0]) if sharer is not part]
            first, part.run = self.tree.add_fork(part.run, digests, blocks, part.published)
            for sharer in others:
                sharer.borrowed = first
                first.live += 1
            part.published += count
        del part.tail[: count * width]
        return count

    # -- sharing -------------------------------------------------------------------------------------------------------

    def _must_copy(self, part: RunPart, token_count: int) -> bool:
        """Tells whether the next token falls into a shared or published block, which must not be written."""
        position, offset = divmod(token_count, self.block_size)
        if not offset or position != part.published:
            return False
        return part.borrowed is not None or part.tail[0] in self._sharers

    def _leave_shared(self, part: RunPart) -> None:
        """Drops the sequence's reference on the shared first position of its tail. Other sequences keep theirs."""
        if part.borrowed is not None:
            borrowed, part.borrowed = part.borrowed, None
            self.tree.release(borrowed)
            return
        first = part.tail[0]
        sharers = self._sharers[first]
        sharers.remove(part)
        if len(sharers) == 1:
            del self._sharers[first]

    # -- where hits can end -------------------------------------------------------------------------------------------

    def run_at(self, part: RunPart, token_count: int) -> Run:
        """Returns the run with the published block of a sequence that ends after `token_count` tokens."""
        run, position = part.run, token_count // self.block_size - 1
        while run.first_position > position:
            assert run.parent is not None, "the run is not published"
            run = run.parent
        return run

    def digest_at(self, part: RunPart, token_count: int) -> bytes:
        """Returns the digest of the first `token_count` tokens of a sequence. A published block must end there."""
        return self.run_at(part, token_count).digest_at(token_count // self.block_size - 1)

    def units_at(self, part: RunPart, token_count: int, digest: bytes) -> list[Unit] | None:
        """Returns no units: a hit takes whole runs."""
        return []

    def entries_at(self, part: RunPart, token_count: int, digest: bytes) -> Sequence[Scoped]:
        run, path = self.run_at(part, token_count), list[Scoped]()
        positions = token_count // self.block_size - run.first_position
        if positions * DIGEST_BYTES < run.size:
            run = self.tree.cut(run, positions)
        while run.parent is not None:
            path.append(run)
            run = run.parent
        return path

    def other_way_count(self, part: RunPart, token_count: int) -> int:
        run = self.run_at(part, token_count)
        if run.token_count() != token_count:
            return 0
        return len(run.children) - (run is not part.run)

    def behind(self, scope: RunScope, hit: RunHit, digests: bytes, token_count: int) -> Behind | None:
        if token_count > hit.token_count:
            hit = self.find(scope, digests, token_count)
        return behind_hit(hit, self._edge_tokens // self.block_size)

    # -- for readers and for eviction ----------------------------------------------------------------------------------

    def walk(self, scope: RunScope) -> Iterator[IndexedStretch]:
        name = scope.namespace.name
        for run in self.tree.walk(scope.root):
            parent = run.parent.last_digest if run.parent is not None else b""
            yield IndexedStretch(name, self.groups, self.spec, parent, bytes(run.digests), run.first_position)

    def mark(self, states: BlockStates, scopes: Sequence[RunScope], parts: Sequence[RunPart]) -> None:
        runs = [run for scope in scopes for run in self.tree.runs(scope.root)]
        holders = holders_of_runs(runs, [part.run for part in parts])
        for run in runs:
            states.mark(run.blocks, holders[run], published=True)
        for part in parts:
            states.mark(part.tail, 1, published=False)
            for _, own in part.kept or ():
                states.mark(own, 1, published=False)

    def drop_path(self, scope: RunScope, digests: bytes, kept_digest_count: int) -> None:
        if self._stride > 1:
            digests = every(digests, self._stride)
        top = self.tree.cut_at(scope.root, digests, kept_digest_count // self._stride)
        if top is not None:
            for run in reversed(list(self.tree.runs(top))):
                if not run.live and not run.children:
                    self._blocks.evict_whole(run)

    def evict(self, entry: Scoped, wanted: int) -> int:
        return self.tree.evict(entry, wanted)
