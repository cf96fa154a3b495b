"""Physical blocks of one pool: who is free, who is held, what can be hit.

Lifecycle of a block:

    1. empty free   no digest, reference count 0
    2. held         reference count >= 1; `take` brings it here from 1, or from 3 by eviction
    3. cached free  reference count 0, digest kept; `release` brings a published block here, an unpublished one to 1

`publish` gives a held block a digest (two-phase publication: only a finished forward pass leads to it), `retain` takes
one more reference and brings a cached block back from 3 to 2. Empty blocks are granted first, then cached ones from the
front of the eviction order: least recently released first. Callers release a sequence's tail before its ancestors, so
that a cached block's ancestors are always cached or held (the set is prefix-closed).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple


class BlockKey(NamedTuple):
    """What a published block is found by.

    An honest owner's digest implies the position, since it chains; with it in the key no owner can make one block stand
    at two positions.
    """

    group: int
    namespace: str
    position: int
    digest: bytes


class BlockPool:
    """Reference counts, prefix index and free order of `block_count` blocks."""

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self.reference_counts = array("I", bytes(4 * block_count))
        self.evicted_count = 0
        self._keys: list[BlockKey | None] = [None] * block_count
        self._index: dict[BlockKey, int] = {}
        self._empty = array("I", range(block_count - 1, -1, -1))  # a stack: the lowest id is granted first
        self._cached: OrderedDict[int, None] = OrderedDict()  # first out first

    @property
    def empty_count(self) -> int:
        """Blocks in state 1."""
        return len(self._empty)

    @property
    def cached_count(self) -> int:
        """Blocks in state 3."""
        return len(self._cached)

    @property
    def free_count(self) -> int:
        """Blocks that can be granted: empty and cached."""
        return len(self._empty) + len(self._cached)

    def find(self, key: BlockKey) -> int | None:
        """The block published under `key`, or None."""
        return self._index.get(key)

    def is_published(self, block: int) -> bool:
        """Whether the block has a digest: its content must never change again."""
        return self._keys[block] is not None

    def is_cached(self, block: int) -> bool:
        """Whether the block is in state 3."""
        return block in self._cached

    def take(self, count: int) -> list[int]:
        """Grants `count` blocks with reference count 1; the caller has checked `free_count`."""
        blocks = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self.reference_counts[block] = 1
            blocks.append(block)
        return blocks

    def retain(self, block: int) -> None:
        """One more table holds a held or cached block."""
        if self.reference_counts[block] == 0:
            del self._cached[block]
        self.reference_counts[block] += 1

    def release(self, block: int) -> None:
        """One table fewer holds it; the last one leaves it cached if it is published, else empty."""
        self.reference_counts[block] -= 1
        if self.reference_counts[block] == 0:
            if self._keys[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, key: BlockKey) -> None:
        """Makes a held block hittable under a key that no other block carries."""
        self._keys[block] = key
        self._index[key] = block

    def states(self, first: int = 0, end: int | None = None) -> bytes:
        """One byte per block of [first, end): 0 empty, 1 cached, n >= 2 held by n - 1 tables (255: 254 or more)."""
        return bytes(
            min(count + 1, 255) if count else int(key is not None)
            for count, key in zip(self.reference_counts[first:end], self._keys[first:end], strict=True)
        )

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._index[key]
        self._keys[block] = None
        self.evicted_count += 1
        return block

    def check_invariants(self) -> None:
        """Each block is exactly one of empty, cached, held; index and keys agree.

        Raises:
            AssertionError: naming what is broken.
        """
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is twice in the empty stack"
        assert not empty & cached, "a block is both empty and cached"
        for block in range(self.block_count):
            free = self.reference_counts[block] == 0
            assert free == (block in empty or block in cached), f"block {block} is neither free nor held, or both"
            assert (block in cached) == (free and self.is_published(block)), f"block {block} is cached without a digest"
        assert len(self._index) == sum(key is not None for key in self._keys), "index and keys differ in size"
        assert all(self._keys[block] == key for key, block in self._index.items()), "index and keys disagree"
