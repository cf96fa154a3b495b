"""Full attention: published blocks in a radix tree of runs.

A *run* is a stretch of consecutive published blocks of one prefix: concatenated digests, block ids, children. A prompt
of thousands of blocks is one run, so that sharing, forking and freeing it cost as much as for a short one.

Lifecycle of a run:

    1. published   a commit made it; sequences end in it (`live` counts them, and children with holders of their own)
    2. extended    while one sequence alone holds it, nothing hangs below and nobody has shared it yet
    3. split       where a prompt leaves it in the middle: the deep part stays the same object, so that whoever ends in
                   it need not be told; a sequence ends only where a run ends
    4. cached      `live` is 0: hittable; a candidate for eviction once nothing hangs below it
    5. trimmed     eviction takes blocks from the deep end, until nothing is left

Blocks are counted per *position*: `width` blocks, one for each group of this specification.

Radix trees of token sequences: SGLang (https://arxiv.org/abs/2312.07104).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from quire_allocator.core.blocks import Blocks, Evictor, Namespace, Scope, Scoped
from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.manager import Hit
from quire_allocator.core.spec import DIGEST_BYTES


class Run(Scoped):
    """A stretch of published blocks. The root of a namespace is a run of none, without a parent.

    Attributes:
        children: by their first digest.
        size: bytes of its digests.
    """

    __slots__ = ("_digests", "_first_position", "blocks", "children", "parent", "size")

    def __init__(
        self, scope: Scope, parent: Run | None, first_position: int, digests: bytes | bytearray, blocks: array[int]
    ) -> None:
        super().__init__(scope)
        self.parent = parent
        self.children: dict[bytes, Run] = {}
        self._digests = digests  # a bytearray once it was extended; longer than `size` once it was trimmed
        self.size = len(digests)
        self.blocks = blocks
        self._first_position = first_position

    @property
    def digests(self) -> bytes | bytearray:
        """Concatenated. What eviction has trimmed is cut off here: most runs are gone before anybody looks again, and
        copying the digests of a long one costs as much as evicting it."""
        digests = self._digests
        if len(digests) != self.size:
            self._digests = digests = digests[: self.size]
        return digests

    def extend(self, digests: bytes, blocks: array[int]) -> None:
        """More blocks at its end."""
        own = self.digests
        if isinstance(own, bytes):
            self._digests = own = bytearray(own)
        own += digests
        self.size += len(digests)
        self.blocks.extend(blocks)

    def trim(self, size: int) -> tuple[bytes | bytearray, array[int]]:
        """Only so many bytes of digests are left, and their blocks; returns what has the digests cut off where they
        were, and their blocks."""
        source, kept = self._digests, len(self.blocks) * size // self.size
        blocks = self.blocks[kept:]
        self.size = size
        if size:
            del self.blocks[kept:]
        else:  # who walks the tree sees that it is gone
            self._digests, self.blocks = b"", array("I")
        return source, blocks

    def cut_off(self, upper: Run) -> None:
        """Only what is below `upper` is left, which had a copy of the beginning."""
        self._digests = self.digests[upper.size :]
        self.size -= upper.size
        self.blocks = self.blocks[len(upper.blocks) :]
        self._first_position += upper.size // DIGEST_BYTES

    @property
    def block_count(self) -> int:
        """Blocks in it."""
        return len(self.blocks)

    @property
    def first_position(self) -> int:
        """Positions before it in its prefix."""
        return self._first_position

    @property
    def first_digest(self) -> bytes:
        """Digest of its first block."""
        return bytes(self._digests[:DIGEST_BYTES])

    @property
    def last_digest(self) -> bytes:
        """Digest of its last block; empty for a root."""
        return bytes(self._digests[self.size - DIGEST_BYTES : self.size]) if self.size else b""

    def key_at(self, offset: int) -> bytes:
        """Digest of the position that the block at `offset` belongs to; empty beyond its end."""
        start = offset * self.size // len(self.blocks) // DIGEST_BYTES * DIGEST_BYTES
        return bytes(self._digests[start : start + DIGEST_BYTES])


class RunHit(Hit):
    """A published prefix: whole runs from the root down, of the last one only `cut` positions unless that is 0."""

    __slots__ = ("cut", "runs")

    def __init__(self, token_count: int, block_count: int, cached_block_count: int, runs: list[Run], cut: int) -> None:
        super().__init__(token_count, block_count, cached_block_count)
        self.runs = runs
        self.cut = cut


class RunScope(Scope):
    """A namespace's tree."""

    __slots__ = ("root",)

    def __init__(self, namespace: Namespace, manager: Evictor) -> None:
        super().__init__(namespace, manager)
        self.root = Run(self, None, 0, b"", array("I"))


class RunTree:
    """The runs of all namespaces of one manager."""

    def __init__(self, width: int, block_size: int, blocks: Blocks, log: EventLog) -> None:
        self.width = width
        self.block_size = block_size
        self._blocks = blocks
        self._log = log

    def find(self, root: Run, digests: bytes, token_limit: int) -> RunHit:
        """The longest published prefix of at most so many tokens. Changes nothing."""
        limit = min(token_limit // self.block_size * DIGEST_BYTES, len(digests))
        run, offset, runs = root, 0, []
        cached = cut = 0  # positions
        while offset < limit:
            child = run.children.get(digests[offset : offset + DIGEST_BYTES])
            if child is None:
                break
            runs.append(child)
            size = child.size
            if size > limit - offset or not digests.startswith(child.digests, offset):
                size = _agreeing(child.digests, digests, offset, limit)
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
        """Publishes blocks below a run of which none of the children begins with their first digest. The holder moves
        down from the parent, whose count stays: it counts the child instead."""
        self._log.stored(parent.scope, parent.last_digest, digests, position)
        child = Run(parent.scope, parent, position, digests, blocks)
        child.live = 1
        parent.children[digests[:DIGEST_BYTES]] = child
        self._blocks.policy.stored(child, parent)
        return child

    def is_extendable(self, run: Run) -> bool:
        """Whether a run has one history with what the sequence that ends in it publishes next."""
        return run.live == 1 and not run.children and not run.hits and run.parent is not None

    def extend(self, run: Run, digests: bytes, blocks: array[int], position: int) -> None:
        """Publishes blocks at the end of an extendable run."""
        self._log.stored(run.scope, run.last_digest, digests, position)
        run.extend(digests, blocks)

    def hold(self, run: Run) -> None:
        """One more holder; runs that come back from the cache hold their parents."""
        while run.parent is not None:
            run.live += 1
            if run.live > 1:
                return
            self._blocks.now_held(run, len(run.blocks))
            run = run.parent

    def release(self, run: Run) -> None:
        """One holder fewer; deeper runs are released before their parents."""
        while run.parent is not None:
            run.live -= 1
            if run.live:
                return
            self._blocks.now_cached(run, len(run.blocks), is_candidate=not run.children)
            run = run.parent

    def split(self, run: Run, positions: int) -> Run:
        """Cuts a run in two and returns the upper part, of so many positions."""
        parent, size, count = run.parent, positions * DIGEST_BYTES, positions * self.width
        assert parent is not None, "a root has nothing to split"
        upper = Run(run.scope, parent, run.first_position, run.digests[:size], run.blocks[:count])
        upper.copy_history(run)
        upper.live = 1 if run.live else 0
        parent.children[upper.first_digest] = upper
        run.cut_off(upper)
        run.parent = upper
        upper.children[run.first_digest] = run
        if self._blocks.policy.split(upper, run) and run.ticket:
            self._blocks.push(run)
        return upper

    def evict(self, entry: Scoped, wanted: int) -> int:
        """Takes positions from the deep end of a cached run without children."""
        assert isinstance(entry, Run)
        run = entry
        positions = min(run.size // DIGEST_BYTES, -(-wanted // self.width))
        if run.spare:
            positions = min(positions, max(1, run.spare // self.width))
        count, kept = positions * self.width, run.size - positions * DIGEST_BYTES
        moves = self._blocks.policy.evicted(run, count)
        parent = run.parent
        assert parent is not None, "a root is no candidate"
        if not kept:
            self._blocks.queue.discard(run)
            del parent.children[run.first_digest]
        size, (source, blocks) = run.size, run.trim(kept)
        self._log.removed(run.scope, run.first_position + kept // DIGEST_BYTES, source, kept, size)
        self._blocks.give_back(blocks)
        if kept and moves:
            self._blocks.push(run)
        elif not kept and not parent.children and not parent.live and parent.parent is not None:
            self._blocks.push(parent)
        return count

    def runs(self, root: Run) -> Iterator[Run]:
        """Every run below a root, parents before children; runs added meanwhile may be missed."""
        pending = [root]
        while pending:
            run = pending.pop()
            if run.parent is not None:
                yield run
            pending.extend(run.children.values())

    def path_blocks(self, run: Run, tail: array[int]) -> array[int]:
        """Blocks from the root down to the end of a run, and a tail behind them; a copy."""
        path = [tail]
        while run.parent is not None:
            path.append(run.blocks)
            run = run.parent
        if len(path) <= 2:  # what is added is copied once
            return path[1] + tail if len(path) == 2 else tail[:]
        blocks = array("I")
        for part in reversed(path):
            blocks.extend(part)
        return blocks


def _agreeing(run_digests: bytes | bytearray, digests: bytes, start: int, end: int) -> int:
    """Bytes in which a run agrees with `digests[start:end]`, whole digests; at least one does."""
    if len(run_digests) > end - start:  # most often the prompt that made the run, but for the block left to compute
        wanted = digests if not start and end == len(digests) else digests[start:end]
        if run_digests.startswith(wanted):
            return end - start
    return common_positions(run_digests, digests, start, end) * DIGEST_BYTES


def common_positions(run_digests: bytes | bytearray, digests: bytes, start: int, end: int) -> int:
    """Positions in which a run agrees with `digests[start:end]`; at least one does."""
    low, high = 1, min(len(run_digests), end - start) // DIGEST_BYTES
    while low < high:  # prefixes agree up to somewhere, and no longer beyond
        middle = (low + high + 1) // 2
        size = middle * DIGEST_BYTES
        if run_digests[:size] == digests[start : start + size]:
            low = middle
        else:
            high = middle - 1
    return low


def holders_of_runs(runs: Iterable[Run], ends: Iterable[Run]) -> Counter[Run]:
    """Per run how many sequences hold it, where `ends` are the runs that they end in and `runs` is parents first."""
    holders = Counter(ends)
    for run in reversed(list(runs)):
        if run.parent is not None and run.parent.parent is not None:
            holders[run.parent] += holders[run]
    return holders
