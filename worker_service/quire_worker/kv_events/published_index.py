"""The published blocks of one pool, and the events that follow from the next change. Pure: no clock, socket or lock.

Lifecycle of a block:
    1. noted     its tokens are known; the allocator may or may not store it. The oldest beyond a limit are forgotten.
    2. orphaned  a snapshot named it before its parent, which was stored meanwhile; the end of the snapshot stores it
    3. stored    published with its tokens, until the allocator removes it
    4. cleared   of a stored block: noted again, because the next snapshot may name it
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.events import BlocksRemoved, BlocksStored, CacheEvent, IndexCleared, SnapshotEnd

from quire_worker.kv_events.wire import KIND, MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event, block_hash


class Filled(NamedTuple):
    """Consecutive full blocks of one sample that are about to be committed.

    Attributes:
        parent: digest of the block before the first of these blocks; empty at the start of the prompt.
        digests: one per block.
        tokens: the tokens of all these blocks.
        lora_name: the sample's adapter, if it has one.
        salts: what else the digests depend on: the namespace and the cache salt, each only if it is not empty.
    """

    parent: bytes
    digests: list[bytes]
    tokens: array[int]
    lora_name: str | None
    salts: tuple[str, ...]


class _Block(NamedTuple):
    parent: bytes
    tokens: array[int]
    lora_name: str | None
    salts: tuple[str, ...]


class Index:
    """The published blocks of one group.

    Args:
        group: number of the group in the pool.
        block_size: tokens per block.
        noted_max: the most blocks whose tokens are kept before they are stored.

    Attributes:
        unknown_count: stored blocks that were not published, because their tokens or their parent are not known.
    """

    def __init__(self, group: int, block_size: int, noted_max: int) -> None:
        self.unknown_count = 0
        self._group, self._block_size, self._noted_max = group, block_size, noted_max
        self._noted = dict[bytes, _Block]()  # oldest first
        self._stored = dict[bytes, _Block]()  # parents before their children
        self._orphans: dict[bytes, None] | None = None  # in the order of the snapshot; None outside a snapshot

    def note(self, filled: Filled) -> None:
        """Keeps the tokens of blocks until they are stored."""
        parent, size = filled.parent, self._block_size
        for place, digest in enumerate(filled.digests):
            tokens = filled.tokens[place * size : (place + 1) * size]
            self._keep(digest, _Block(parent, tokens, filled.lora_name, filled.salts))
            parent = digest

    def apply(self, event: CacheEvent) -> list[Event]:
        """Applies the allocator's next event. Returns the events to publish."""
        match event:
            case IndexCleared():
                self._orphans = {}
                return self.clear()
            case SnapshotEnd():
                return self._adopt()
            case BlocksStored() if self._group in event.groups:
                return self._store(event.digests)
            case BlocksRemoved() if self._group in event.groups:
                self._orphans = _without(self._orphans, event.digests)
                gone = [digest for digest in event.digests if self._stored.pop(digest, None) is not None]
                return [BlockRemoved(list(map(block_hash, gone)), MEDIUM, group_idx=0)] if gone else []
            case _:
                return []

    def clear(self) -> list[Event]:
        """Unpublishes all blocks, and keeps their tokens for a snapshot."""
        for digest, block in self._stored.items():
            self._keep(digest, block)
        self._stored.clear()
        return [AllBlocksCleared()]

    def snapshot(self) -> list[Event]:
        """Returns events that lead a reader from any state to the present state."""
        return [AllBlocksCleared(), *self._published(list(self._stored))]

    def check_invariants(self) -> None:
        """Raises AssertionError if a published block has no published parent, or too many blocks are noted."""
        seen = {b""}
        for digest, block in self._stored.items():
            assert block.parent in seen, f"{digest.hex()} is published before its parent"
            assert len(block.tokens) == self._block_size
            seen.add(digest)
        assert len(self._noted) <= self._noted_max

    def _keep(self, digest: bytes, block: _Block) -> None:
        self._noted.pop(digest, None)
        self._noted[digest] = block
        if len(self._noted) > self._noted_max:
            del self._noted[next(iter(self._noted))]

    def _adopt(self) -> list[Event]:
        """Publishes the orphans of a snapshot that have parents by now, in any order."""
        events = list[Event]()
        while self._orphans:
            orphans, self._orphans = self._orphans, {}
            found = self._store(orphans)
            if not found:
                self.unknown_count += len(orphans)
                break
            events += found
        self._orphans = None
        return events

    def _store(self, digests: Iterable[bytes]) -> list[Event]:
        """Publishes blocks that are not published yet. A reader cannot place a block without its parent."""
        new = []
        for digest in digests:
            if digest in self._stored:
                continue
            block = self._noted.get(digest)
            if block is not None and (not block.parent or block.parent in self._stored):
                self._stored[digest] = self._noted.pop(digest)
                new.append(digest)
            elif block is not None and self._orphans is not None:
                self._orphans[digest] = None
            else:
                self.unknown_count += 1
        return self._published(new)

    def _published(self, digests: Sequence[bytes]) -> list[Event]:
        """Returns one event for each chain of stored blocks."""
        events = list[Event]()
        previous, last = b"", None
        for digest in digests:
            block = self._stored[digest]
            if last is None or not previous or block.parent != previous:
                parent = block_hash(block.parent) if block.parent else None
                name = block.lora_name
                last = BlockStored([], parent, [], self._block_size, None, MEDIUM, name, None, 0, KIND)
                events.append(last)
            last.block_hashes.append(block_hash(digest))
            last.token_ids.extend(block.tokens)
            keys = keys_of(block.lora_name, () if block.parent else block.salts)
            if last.extra_keys is not None or keys:
                last.extra_keys = [*(last.extra_keys or [None] * (len(last.block_hashes) - 1)), keys]
            previous = digest
        return events


def _without(orphans: dict[bytes, None] | None, digests: Sequence[bytes]) -> dict[bytes, None] | None:
    return {each: None for each in orphans if each not in digests} if orphans else orphans


def keys_of(lora_name: str | None, salts: tuple[str, ...]) -> tuple[str, ...] | None:
    """Returns the extra keys of a block as vLLM orders them, or None if there are none."""
    return ((lora_name,) if lora_name else ()) + salts or None
