"""A stretch: consecutive published blocks of one prefix as one object, however many they are.

A run of full attention is a stretch that is a node of a tree (`runs.py`). Blocks that fall out of the tables of a
windowed group together, and are cached, are a stretch of their own (`fallen.py`). A prompt that takes only a part of a
stretch cuts the stretch in two. Eviction takes blocks from the deep end.

Blocks are counted per *position*: `width` blocks, one for each group of the specification.
"""

from __future__ import annotations

from array import array

from quire_allocator.core.scopes import Scope, Scoped
from quire_allocator.core.spec import DIGEST_BYTES


class Stretch(Scoped):
    """The concatenated digests and the block ids of consecutive positions.

    Attributes:
        blocks: block ids, `width` for each position.
        size: bytes of its digests.
    """

    __slots__ = ("_digests", "_first_position", "blocks", "size")

    def __init__(self, scope: Scope, first_position: int, digests: bytes | bytearray, blocks: array[int]) -> None:
        super().__init__(scope)
        self._digests = digests  # a bytearray after `extend`; longer than `size` after `trim`
        self.size = len(digests)
        self.blocks = blocks
        self._first_position = first_position

    @property
    def digests(self) -> bytes | bytearray:
        """Returns its digests, concatenated.

        `trim` leaves the bytes too long, and this property cuts them off. Most trimmed stretches are dropped before the
        next access, and copying the digests of a long stretch costs as much as evicting it.
        """
        digests = self._digests
        if len(digests) != self.size:
            self._digests = digests = digests[: self.size]
        return digests

    def extend(self, digests: bytes, blocks: array[int]) -> None:
        """Adds blocks at its end."""
        own = self.digests
        if isinstance(own, bytes):
            self._digests = own = bytearray(own)
        own += digests
        self.size += len(digests)
        self.blocks.extend(blocks)

    def trim(self, size: int) -> tuple[bytes | bytearray, array[int]]:
        """Drops positions from its end, until `size` bytes of digests and their blocks are left. Returns the digests
        before the call, with the dropped ones from byte `size` on, and the dropped blocks."""
        source, kept = self._digests, len(self.blocks) * size // self.size
        blocks = self.blocks[kept:]
        self.size = size
        if size:
            del self.blocks[kept:]
        else:  # Code that noted this stretch earlier then sees that the stretch is gone.
            self._digests, self.blocks = b"", array("I")
        return source, blocks

    def drop_head(self, size: int) -> None:
        """Drops positions from its beginning: `size` bytes of digests, and their blocks."""
        count = len(self.blocks) * size // self.size
        self._digests = self.digests[size:]
        self.size -= size
        self.blocks = self.blocks[count:]
        self._first_position += size // DIGEST_BYTES

    @property
    def block_count(self) -> int:
        return len(self.blocks)

    @property
    def first_position(self) -> int:
        return self._first_position

    @property
    def end_position(self) -> int:
        """Returns the position behind its last position."""
        return self._first_position + self.size // DIGEST_BYTES

    @property
    def first_digest(self) -> bytes:
        """Returns the digest of its first position."""
        return bytes(self._digests[:DIGEST_BYTES])

    @property
    def last_digest(self) -> bytes:
        """Returns the digest of its last position; empty if it has none."""
        return bytes(self._digests[self.size - DIGEST_BYTES : self.size]) if self.size else b""

    def digest_at(self, position: int) -> bytes:
        """Returns the digest of one of its positions."""
        start = (position - self._first_position) * DIGEST_BYTES
        return bytes(self._digests[start : start + DIGEST_BYTES])

    def key_at(self, offset: int) -> bytes:
        """Returns the digest of the position that the block at `offset` belongs to; empty beyond its end."""
        start = offset * self.size // len(self.blocks) // DIGEST_BYTES * DIGEST_BYTES
        return bytes(self._digests[start : start + DIGEST_BYTES])


def agreeing(own: bytes | bytearray, digests: bytes, start: int, end: int) -> int:
    """Counts the bytes of the leading digests that a stretch shares with `digests[start:end]`; at least one digest."""
    if len(own) > end - start:  # the usual case: the same prompt made the stretch, and `digests` end earlier
        wanted = digests if not start and end == len(digests) else digests[start:end]
        if own.startswith(wanted):
            return end - start
    return common_positions(own, digests, start, end) * DIGEST_BYTES


def common_positions(own: bytes | bytearray, digests: bytes, start: int, end: int) -> int:
    """Counts the leading positions that a stretch shares with `digests[start:end]`; at least one."""
    low, high = 1, min(len(own), end - start) // DIGEST_BYTES
    while low < high:  # a binary search; the first `low` positions are known to agree
        middle = (low + high + 1) // 2
        known, size = low * DIGEST_BYTES, middle * DIGEST_BYTES
        if own[known:size] == digests[start + known : start + size]:
            low = middle
        else:
            high = middle - 1
    return low


def every(digests: bytes, stride: int, first: int | None = None) -> bytes:
    """Returns every stride-th digest, beginning with index `first`; without `first`, the last digest of each block."""
    step = stride * DIGEST_BYTES
    begin = (stride - 1 if first is None else first) * DIGEST_BYTES
    return b"".join([digests[i : i + DIGEST_BYTES] for i in range(begin, len(digests), step)])


def filled(digests: bytes, stride: int, committed: int, block_size: int) -> bytes:
    """Returns the digests that end a block of `stride` digests, among those of a commit after `committed` tokens.

    Example: with blocks of 16 tokens and digests of 4, 24 tokens are committed. The new digests begin with number 6,
        and the first block to publish ends with digest 7, at index 1.
    """
    if stride == 1:
        return digests
    return every(digests, stride, (committed // block_size + 1) * stride - 1 - committed // (block_size // stride))
