"""The contents of a pool's pages: published blocks with their digests, and the last release of each.

Blocks are published in stretches, and released in ranges of stretches (`releases.py`). One object serves thousands of
blocks, and each block costs only an entry in a table. Freeing a whole stretch, or its beginning, visits no block. A
stretch loses the blocks that are granted again. When half of a stretch's blocks are gone, it is rebuilt.

Pure: no call, clock or lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from typing import Final, NamedTuple

from quire.hashing import DIGEST_BYTES
from quire.protocol.outcomes import CacheDrop
from quire.session import releases
from quire.session.releases import Release

_NOTHING: Final[frozenset[int]] = frozenset()


class Published(NamedTuple):
    """The digest that one block carries, and its place in a prefix.

    Attributes:
        parent: digest of the previous block in its group; empty at the root and if unknown.
        position: index in the table. For STATE, the number of digest blocks up to and including the checkpoint.
    """

    digest: bytes
    parent: bytes
    group: int
    position: int
    namespace: str


class DigestSpace(NamedTuple):
    """The scope of a digest: inside it, a digest identifies one block."""

    namespace: str
    group: int


class PublishedStretch:
    """Consecutive blocks of one prefix in one group, each at most once.

    Attributes:
        parent: digest of the block before the run; empty at the root and if unknown.
        digests: digests of the blocks, concatenated.
        live: number of blocks that still carry their digest.
        sparse_at: half of the original number of blocks. With that few live blocks, the stretch is rebuilt.
        released: the last releases of its blocks.
    """

    __slots__ = ("blocks", "digests", "first_position", "live", "parent", "released", "scope", "sparse_at")

    def __init__(
        self, scope: DigestSpace, first_position: int, parent: bytes, digests: bytes, blocks: array[int]
    ) -> None:
        self.scope = scope
        self.first_position = first_position
        self.parent = parent
        self.digests = bytearray(digests)
        self.blocks = blocks
        self.live = len(blocks)
        self.sparse_at = self.live // 2
        self.released: list[Release] = []

    def index_of(self, block: int, position: int) -> int:
        """Returns a block's index in the stretch. `position` is the likely position in the prefix."""
        index = position - self.first_position
        if 0 <= index < len(self.blocks) and self.blocks[index] == block:
            return index
        return self.blocks.index(block)

    def digest_at(self, index: int) -> bytes:
        """Returns the digest of the block at `index`."""
        return bytes(self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def part(self, start: int, end: int) -> PublishedStretch:
        """Returns the blocks [start, end) as a separate stretch."""
        parent = self.digest_at(start - 1) if start else self.parent
        digests = bytes(self.digests[start * DIGEST_BYTES : end * DIGEST_BYTES])
        part = PublishedStretch(self.scope, self.first_position + start, parent, digests, self.blocks[start:end])
        part.released = releases.part(self.released, start, end)
        return part

    def extend(self, digests: bytes, blocks: array[int]) -> None:
        """Adds blocks at the end of a stretch without gaps."""
        self.digests += digests
        self.blocks.extend(blocks)
        self.live += len(blocks)
        self.sparse_at = self.live // 2


class LetGo(NamedTuple):
    """Published blocks that one operation released, in this order. `ranks` has their order within the operation."""

    step: int
    operation: int
    ranks: Sequence[int]
    blocks: Sequence[int]


class Pages:
    """Records the contents of a pool's pages.

    Attributes:
        published: the stretch of each block that carries a digest.
    """

    def __init__(self) -> None:
        self.published: dict[int, PublishedStretch] = {}

    # -- changes -------------------------------------------------------------------------------------------------------

    def publish(
        self, scope: DigestSpace, first_position: int, before: int | None, digests: bytes, blocks: array[int]
    ) -> None:
        """Notes that consecutive blocks carry these digests. `before` is the block before them, if there is one."""
        published = self.published
        if not published.keys().isdisjoint(blocks):  # A commit was swapped to blocks that other sequences published.
            for index, block in enumerate(blocks):
                digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
                earlier = published.get(block)
                if earlier is None or self._digest(earlier, block) != digest:
                    self._forget(block)
                    self.publish(scope, first_position + index, before, digest, blocks[index : index + 1])
                before = block
            return
        parent, stretch = b"", published.get(before) if before is not None else None
        if stretch is not None:
            index = first_position - 1 - stretch.first_position
            end = len(stretch.blocks)
            if index == end - 1 == stretch.live - 1 and stretch.scope == scope:
                stretch.extend(digests, blocks)
            else:
                parent = stretch.digest_at(index)
                stretch = None
        if stretch is None:
            stretch = PublishedStretch(scope, first_position, parent, digests, blocks)
        if len(blocks) == 1:
            published[blocks[0]] = stretch
        else:
            published.update(dict.fromkeys(blocks, stretch))

    def grant(self, blocks: Sequence[int]) -> None:
        """Notes that these blocks are granted again, and so no longer carry digests."""
        if not self.published.keys().isdisjoint(blocks):
            for block in blocks:
                self._forget(block)

    def drop(self, drop: CacheDrop, held: Set[int], full_groups: Set[int]) -> None:
        """Forgets the digests of the dropped blocks, except for blocks that sequences hold."""
        if drop.digests:
            self._drop_path(drop, held, full_groups)
            return
        meant = [block for block, stretch in self.published.items() if drop.namespace in (None, stretch.scope[0])]
        self.grant([block for block in meant if block not in held])

    def _drop_path(self, drop: CacheDrop, held: Set[int], full_groups: Set[int]) -> None:
        """Forgets the blocks after the kept digests of a path; with full attention also their successors."""
        starts = range(drop.kept_digest_count * DIGEST_BYTES, len(drop.digests), DIGEST_BYTES)
        named = {drop.digests[start : start + DIGEST_BYTES] for start in starts}
        carried = [(block, what) for block, what in self.carried().items() if what.namespace == drop.namespace]
        below: dict[tuple[int, bytes], list[bytes]] = {}
        for _, what in carried:
            below.setdefault((what.group, what.parent), []).append(what.digest)
        meant = {(what.group, what.digest) for _, what in carried if what.digest in named}
        todo = [each for each in meant if each[0] in full_groups]
        while todo:
            group, digest = todo.pop()
            new = {(group, child) for child in below.get((group, digest), ())} - meant
            meant |= new
            todo += new
        self.grant([block for block, what in carried if block not in held and (what.group, what.digest) in meant])

    def release(
        self, step: int, operation: int, rank: int, table: array[int], *, begin: int, end: int, stride: int = 1
    ) -> int:
        """Notes that an operation released table[begin:end], last block first. Returns how many are published.

        Args:
            step: the step's number.
            operation: index of the operation in the step.
            rank: the last block's rank within the operation. The rank of each block before it is higher by `stride`.
            table: usually a sequence's table. Blocks at their position in the prefix are found fastest.
            begin: index of the first block.
            end: index after the last block.
            stride: number of groups that the operation releases at each position.
        """
        published, at, count = self.published, end, 0
        while at > begin:
            block = table[at - 1]
            stretch = published.get(block)
            if stretch is None:
                at -= 1
                continue
            last = stretch.index_of(block, at - 1)
            same = self._together(stretch, last + 1, table, begin, at)
            new = Release(last + 1 - same, last + 1, step, operation, rank + (end - at) * stride, stride)
            releases.note(stretch.released, new)
            at -= same
            count += same
        return count

    # -- reading -------------------------------------------------------------------------------------------------------

    def stretches(self) -> list[PublishedStretch]:
        """Returns all stretches, in the order of their publication."""
        return list(dict.fromkeys(self.published.values()))

    def parts(self, stretch: PublishedStretch, without: Set[int] = _NOTHING) -> Iterator[PublishedStretch]:
        """Yields the parts of a stretch that still carry their digests, without the blocks in `without`."""
        if stretch.live == len(stretch.blocks) and without.isdisjoint(stretch.blocks):
            yield stretch
            return
        published, start = self.published, None
        for index, block in enumerate(stretch.blocks):
            if published.get(block) is stretch and block not in without:
                start = index if start is None else start
            elif start is not None:
                yield stretch.part(start, index)
                start = None
        if start is not None:
            yield stretch.part(start, len(stretch.blocks))

    def releases(self) -> list[LetGo]:
        """Returns the last release of every published block, oldest first. The list includes blocks that are held
        again.
        """
        entries: dict[tuple[int, int], list[tuple[Sequence[int], list[int]]]] = {}
        for stretch in self.stretches():
            for release in stretch.released:
                ranks, blocks = self._let_go(stretch, release)
                if blocks:
                    entries.setdefault((release.step, release.operation), []).append((ranks, blocks))
        found = []
        for (step, operation), parts in sorted(entries.items(), key=lambda entry: entry[0]):
            parts.sort(key=lambda entry: entry[0][0])
            if all(before[0][-1] < after[0][0] for before, after in pairwise(parts)):
                found += [LetGo(step, operation, *entry) for entry in parts]
            else:  # Groups with equal specifications free their blocks together, position by position.
                rows = sorted(row for ranks, blocks in parts for row in zip(ranks, blocks, strict=True))
                found.append(LetGo(step, operation, [row[0] for row in rows], [row[1] for row in rows]))
        return found

    def carried(self) -> dict[int, Published]:
        """Returns the digest and place of every published block, in the order of publication."""
        found: dict[int, Published] = {}
        for stretch in self.stretches():
            for part in self.parts(stretch):
                parent = part.parent
                for index, block in enumerate(part.blocks):
                    digest = part.digest_at(index)
                    position = part.first_position + index
                    found[block] = Published(digest, parent, part.scope.group, position, part.scope.namespace)
                    parent = digest
        return {block: found[block] for block in self.published}

    def digest_of(self, block: int) -> bytes:
        """Returns the digest of a published block."""
        return self._digest(self.published[block], block)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _together(self, stretch: PublishedStretch, end: int, table: array[int], begin: int, at: int) -> int:
        """Returns how many of the last blocks of table[begin:at] are also the blocks before index `end` of the stretch,
        and still carry its digests. The number is at least 1."""
        count, published = min(end, at - begin), self.published
        own, others = stretch.blocks[end - count : end], table[at - count : at]
        if own == others and (
            stretch.live == len(stretch.blocks) or [*map(published.get, own)].count(stretch) == count
        ):
            return count
        same = 1
        while same < count and own[-same - 1] == others[-same - 1] and published.get(own[-same - 1]) is stretch:
            same += 1
        return same

    def _let_go(self, stretch: PublishedStretch, release: Release) -> tuple[Sequence[int], list[int]]:
        """Returns the ranks and blocks of a release that are still published, deepest first."""
        blocks = stretch.blocks[release.first : release.end].tolist()
        blocks.reverse()
        ranks = range(release.rank, release.rank + len(blocks) * release.stride, release.stride)
        if stretch.live == len(stretch.blocks):
            return ranks, blocks
        published = self.published
        live = [row for row in zip(ranks, blocks, strict=True) if published.get(row[1]) is stretch]
        return [row[0] for row in live], [row[1] for row in live]

    def _digest(self, stretch: PublishedStretch, block: int) -> bytes:
        return stretch.digest_at(stretch.blocks.index(block))

    def _forget(self, block: int) -> None:
        """Notes that the block no longer carries a digest, if it did."""
        stretch = self.published.pop(block, None)
        if stretch is None:
            return
        stretch.live -= 1
        if stretch.live == stretch.sparse_at:
            for part in list(self.parts(stretch)):
                self.published.update(dict.fromkeys(part.blocks, part))
