"""Full attention: the radix trees of runs (`runs.py`), one for each namespace of a manager, and their changes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.runs import RunHit
from quire_allocator.core.retention.partings import Behind
from quire_allocator.core.retention.retention import Retention
from quire_allocator.core.retention.stop import Run
from quire_allocator.core.scopes import Scoped
from quire_allocator.core.spec import DIGEST_BYTES
from quire_allocator.core.stretches import agreeing


class RunTree:
    """The runs of all namespaces of one manager."""

    def __init__(self, width: int, block_size: int, log: EventLog, retention: Retention) -> None:
        self.width = width
        self.block_size = block_size
        self._blocks = retention.blocks
        self._log = log
        self._retention = retention

    def find(self, root: Run, digests: bytes, token_limit: int) -> RunHit:
        """Returns the longest published prefix of at most `token_limit` tokens. Changes nothing."""
        limit = min(token_limit // self.block_size * DIGEST_BYTES, len(digests))
        run, offset, runs = root, 0, []
        cached = cut = 0  # cached positions of the hit; positions that the hit takes of a run that it cuts
        while offset < limit:
            child = run.children.get(digests[offset : offset + DIGEST_BYTES])
            if child is None:
                break
            runs.append(child)
            size = child.size
            if size > limit - offset or not digests.startswith(child.digests, offset):
                size = agreeing(child.digests, digests, offset, limit)
                cut = size // DIGEST_BYTES if size < child.size else 0
            offset += size
            if not child.live:
                cached += size // DIGEST_BYTES
            if cut:
                break
            run = child
        positions = offset // DIGEST_BYTES
        return RunHit(positions * self.block_size, positions * self.width, cached * self.width, runs, cut)

    def add_child(self, parent: Run, digests: bytes, blocks: array[int], position: int) -> Run:
        """Publishes blocks below a run and returns the new child. No child may begin with their first digest yet.

        The sequence that ended in the parent ends in the child from now on. The parent's count of holders stays: it
        counts the child instead of the sequence.
        """
        self._log.stored(parent.scope, parent.last_digest, digests, position)
        return self._attach(parent, digests, blocks, position)

    def add_fork(self, parent: Run, digests: bytes, blocks: array[int], position: int) -> tuple[Run, Run]:
        """Publishes blocks as `add_child` does, but makes the first position a run of its own, which forks can borrow.
        Returns this run, and the run where the sequence ends now: the same run, if there is only one position."""
        self._log.stored(parent.scope, parent.last_digest, digests, position)
        first = self._attach(parent, digests[:DIGEST_BYTES], blocks[: self.width], position)
        if len(digests) == DIGEST_BYTES:
            return first, first
        return first, self._attach(first, digests[DIGEST_BYTES:], blocks[self.width :], position + 1)

    def _attach(self, parent: Run, digests: bytes, blocks: array[int], position: int) -> Run:
        """Makes a new child of a run, held once."""
        child = Run(parent.scope, parent, position, digests, blocks)
        child.live = 1
        self._blocks.run_count += 1
        if not parent.children:
            parent.children = {}
        parent.children[digests[:DIGEST_BYTES]] = child
        self._blocks.policy.stored(child, parent)
        return child

    def is_extendable(self, run: Run) -> bool:
        """Tells whether a run can take in the next blocks of the sequence that ends in it: all have one history."""
        return run.live == 1 and not (run.children or run.hits or run.keep_until_ms) and run.parent is not None

    def extend(self, run: Run, digests: bytes, blocks: array[int], position: int) -> None:
        """Publishes blocks at the end of an extendable run."""
        self._log.stored(run.scope, run.last_digest, digests, position)
        run.extend(digests, blocks)

    def hold(self, run: Run) -> None:
        """Adds a holder. A run that leaves the cache holds its parent again."""
        while run.parent is not None:
            run.live += 1
            if run.live > 1:
                return
            self._blocks.now_held(run, len(run.blocks))
            run = run.parent

    def release(self, run: Run) -> None:
        """Removes a holder; deeper runs are released before their parents."""
        while run.parent is not None:
            run.live -= 1
            if run.live:
                return
            self._retention.assess(run)
            self._blocks.now_cached(run, len(run.blocks), is_candidate=not run.children)
            run = run.parent

    def split(self, run: Run, positions: int) -> Run:
        """Cuts a run in two where a prompt diverges from it. Returns the upper part, of that length."""
        upper = self._halve(run, positions)
        if self._blocks.policy.split(upper, run) and run.ticket:
            self._blocks.push(run)
        return upper

    def cut(self, run: Run, positions: int) -> Run:
        """Cuts a run in two where a prompt follows both parts, the upper one first. Returns the upper part, which has
        `positions` positions."""
        upper = self._halve(run, positions)
        self._blocks.policy.cut(upper, run)
        return upper

    def _halve(self, run: Run, positions: int) -> Run:
        parent, size, count = run.parent, positions * DIGEST_BYTES, positions * self.width
        assert parent is not None, "a root cannot be split"
        upper = Run(run.scope, parent, run.first_position, run.digests[:size], run.blocks[:count])
        self._blocks.run_count += 1
        upper.copy_history(run)
        upper.live = 1 if run.live else 0
        if upper.keep_until_ms:
            run.scope.namespace.kept.append(upper)
        parent.children[upper.first_digest] = upper
        run.drop_head(upper.size)
        run.parent = upper
        upper.children = {run.first_digest: run}
        self._retention.divided(run, upper)
        return upper

    def cut_at(self, root: Run, digests: bytes, position: int) -> Run | None:
        """Returns the run that begins at a position of a path; splits the run around that position if necessary.
        Returns None if nothing is published there."""
        run, offset, end = root, 0, (position + 1) * DIGEST_BYTES
        while end <= len(digests):
            child = run.children.get(digests[offset : offset + DIGEST_BYTES])
            if child is None:
                return None
            if child.size < end - offset:
                if not digests.startswith(child.digests, offset):
                    return None
                run, offset = child, offset + child.size
                continue
            if child.digests[: end - offset] != digests[offset:end]:
                return None
            if end - offset > DIGEST_BYTES:
                self.split(child, (end - offset) // DIGEST_BYTES - 1)
            return child
        return None

    def exchange(self, run: Run, position: int, blocks: array[int]) -> array[int]:
        """Replaces published blocks of a run and its ancestors, from `position` on, by blocks with the same content.
        Returns the replaced blocks."""
        width, returned = self.width, blocks[:]
        first, end = position * width, position * width + len(blocks)
        while True:
            begin = run.first_position * width
            low, high = max(begin, first), min(begin + len(run.blocks), end)
            if low < high:
                returned[low - first : high - first] = run.blocks[low - begin : high - begin]
                run.blocks[low - begin : high - begin] = blocks[low - first : high - first]
            if begin <= first or run.parent is None:
                return returned
            run = run.parent

    def evict(self, entry: Scoped, wanted: int) -> int:
        """Evicts positions from the deep end of a cached run without children: at least `wanted` blocks, or as many as
        leave at once. The blocks return to the empty stack. Returns how many blocks."""
        assert isinstance(entry, Run)
        run, retention = entry, self._retention
        positions = retention.leaving(run, wanted)
        count, kept = positions * self.width, run.size - positions * DIGEST_BYTES
        moves = self._blocks.policy.evicted(run, count)
        parent = run.parent
        assert parent is not None, "a root cannot be evicted"
        if not kept:
            self._blocks.run_count -= 1
            self._blocks.queue.discard(run)
            del parent.children[run.first_digest]
        size, (source, blocks) = run.size, run.trim(kept)
        end = run.first_position + kept // DIGEST_BYTES
        self._log.removed(run.scope, end, source, kept, size)
        self._blocks.give_back(blocks)
        retention.trimmed(run, moves=moves)
        if not kept and not parent.children and not parent.live and parent.parent is not None:
            retention.now_leaf(parent)
        return count

    def walk(self, root: Run) -> Iterator[Run]:
        """Yields every run below a root, parents before children, while the tree keeps changing.

        A noted run may be split before its turn (its upper parts are then new runs) or evicted. So `walk` goes up from
        the run's deep end to the position where the run began when it was noted.
        """
        noted = [(child, 0) for child in root.children.values()]
        while noted:
            run, began_at = noted.pop()
            parts = []
            part: Run | None = run
            while part is not None and part.parent is not None and part.first_position >= began_at:
                parts.append(part)
                part = part.parent
            for part in reversed(parts):
                if part.blocks:
                    yield part
            end = run.first_position + run.size // DIGEST_BYTES
            noted += [(child, end) for child in run.children.values()]

    def runs(self, root: Run) -> Iterator[Run]:
        """Yields every run below a root, parents before children. The tree must not change in the meantime."""
        pending = [root]
        while pending:
            run = pending.pop()
            if run.parent is not None:
                yield run
            pending.extend(run.children.values())

    def path_blocks(self, run: Run, tail: array[int]) -> array[int]:
        """Returns a new array: the blocks from the root down to the end of a run, and a tail behind them."""
        path = [tail]
        while run.parent is not None:
            path.append(run.blocks)
            run = run.parent
        if len(path) <= 2:  # the usual case: a single concatenation copies each block only once
            return path[1] + tail if len(path) == 2 else tail[:]
        blocks = array("I")
        for part in reversed(path):
            blocks.extend(part)
        return blocks


def holders_of_runs(runs: Iterable[Run], ends: Iterable[Run]) -> Counter[Run]:
    """Counts the sequences that hold each run. The new runs end in the runs of `ends`; `runs` lists parents first."""
    holders = Counter(ends)
    for run in reversed(list(runs)):
        if run.parent is not None and run.parent.parent is not None:
            holders[run.parent] += holders[run]
    return holders


def behind_hit(hit: RunHit, positions: int) -> Behind:
    """Returns the continuations of a hit in full attention; there is an edge every `positions` positions."""
    run = hit.runs[-1]
    left = run.size // DIGEST_BYTES - hit.cut if hit.cut else 0
    return Behind(1 if hit.cut else len(run.children), _has_path_of(run, left, positions))


def _has_path_of(run: Run, left: int, positions: int) -> bool:
    """Returns whether at least `positions` positions follow on some path, the first `left` of them in the run."""
    if left >= positions:
        return True
    return any(_has_path_of(child, child.size // DIGEST_BYTES, positions - left) for child in run.children.values())
