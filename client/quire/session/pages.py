"""What the pages of a pool carry: published blocks and their digests, and when each was let go of last.

Blocks are published in stretches, and let go of in stretches: one object serves thousands of them, and a block costs an
entry in a table. A stretch shrinks by blocks that are granted anew; when half of it is gone, it is made anew, too.

Pure: no call, clock or lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence, Set
from typing import Final, NamedTuple

from quire.hashing import DIGEST_BYTES

_NOTHING: Final[frozenset[int]] = frozenset()
_SWEEP_MIN: Final = 4096  # releases are swept when four times (this + the released blocks) are listed


class Published(NamedTuple):
    """What one block carries.

    Attributes:
        parent: digest of the block before it in its group; empty at the root and where it is not known.
        position: index in the table; of STATE, digest blocks up to and with the checkpoint.
    """

    digest: bytes
    parent: bytes
    group: int
    position: int
    namespace: str


class DigestSpace(NamedTuple):
    """Inside one, a digest names one block."""

    namespace: str
    group: int


class PublishedStretch:
    """Consecutive blocks of one prefix in one group, each at most once.

    Attributes:
        parent: digest of the block before the first one; empty at the root and where it is not known.
        digests: concatenated.
        live: blocks that still carry their digest.
        sparse_at: half of them, when they were all there.
    """

    __slots__ = ("blocks", "digests", "first_position", "live", "parent", "scope", "sparse_at")

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

    def digest_at(self, index: int) -> bytes:
        """Returns the digest of one block."""
        return bytes(self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def part(self, start: int, end: int) -> PublishedStretch:
        """Returns the blocks of [start, end) as a stretch of their own."""
        parent = self.digest_at(start - 1) if start else self.parent
        digests = bytes(self.digests[start * DIGEST_BYTES : end * DIGEST_BYTES])
        return PublishedStretch(self.scope, self.first_position + start, parent, digests, self.blocks[start:end])

    def extend(self, digests: bytes, blocks: array[int]) -> None:
        """Adds blocks at the end of a stretch that is whole."""
        self.digests += digests
        self.blocks.extend(blocks)
        self.live += len(blocks)
        self.sparse_at = self.live // 2


class Release:
    """Blocks that one operation let go of, in that order: `rank` is the first one's within the operation."""

    __slots__ = ("blocks", "operation", "rank", "step")

    def __init__(self, step: int, operation: int, rank: int, blocks: list[int]) -> None:
        self.step = step
        self.operation = operation
        self.rank = rank
        self.blocks = array("I", blocks)


class Pages:
    """Knows what the pages of a pool carry.

    Attributes:
        published: of every block that carries a digest the stretch that it is in.
        released: of published blocks the last release that named them; also of some that are held again.
    """

    def __init__(self) -> None:
        self.published: dict[int, PublishedStretch] = {}
        self.released: dict[int, Release] = {}
        self._release_entries = 0  # blocks listed in all releases, also where a later one replaced the entry

    # -- what happens --------------------------------------------------------------------------------------------------

    def publish(
        self, scope: DigestSpace, first_position: int, before: int | None, digests: bytes, blocks: array[int]
    ) -> None:
        """Notes that consecutive blocks carry these digests; `before` is the block before them, if there is one."""
        published = self.published
        if not published.keys().isdisjoint(blocks):  # a commit was swapped to blocks that others have published
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
        """Notes that these blocks are written anew and carry nothing."""
        if not self.published.keys().isdisjoint(blocks):
            for block in blocks:
                self._forget(block)

    def release(self, step: int, operation: int, rank: int, blocks: Sequence[int]) -> int:
        """Notes that an operation let go of these blocks in this order; returns how many are published."""
        published = self.published
        own = [block for block in blocks if block in published]
        if own:
            self.released.update(dict.fromkeys(own, Release(step, operation, rank, own)))
            self._release_entries += len(own)
            if self._release_entries > 4 * (len(self.released) + _SWEEP_MIN):
                self._sweep()
        return len(own)

    # -- what is there -------------------------------------------------------------------------------------------------

    def stretches(self) -> list[PublishedStretch]:
        """Returns every stretch, in the order in which they were published."""
        return list(dict.fromkeys(self.published.values()))

    def parts(self, stretch: PublishedStretch, without: Set[int] = _NOTHING) -> Iterator[PublishedStretch]:
        """Yields the parts of a stretch that still carry their digests, leaving out `without`."""
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

    def releases(self) -> list[Release]:
        """Returns every release that still is some block's last, the first one first."""
        return sorted(dict.fromkeys(self.released.values()), key=lambda r: (r.step, r.operation, r.rank))

    def carried(self) -> dict[int, Published]:
        """Returns what every published block carries, in the order in which they were published."""
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
        """Returns the digest that a published block carries."""
        return self._digest(self.published[block], block)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _digest(self, stretch: PublishedStretch, block: int) -> bytes:
        return stretch.digest_at(stretch.blocks.index(block))

    def _forget(self, block: int) -> None:
        """Notes that the block carries nothing any more, if it did."""
        stretch = self.published.pop(block, None)
        if stretch is None:
            return
        self.released.pop(block, None)
        stretch.live -= 1
        if stretch.live == stretch.sparse_at:
            for part in list(self.parts(stretch)):
                self.published.update(dict.fromkeys(part.blocks, part))

    def _sweep(self) -> None:
        """Drops from each release the blocks that a later one has named."""
        released = self.released
        for release in self.releases():
            release.blocks = array("I", [block for block in release.blocks if released.get(block) is release])
        self._release_entries = len(released)
