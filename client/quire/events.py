"""Events that a watcher of a pool gets, in order: changes of the pool's cached prefixes.

Every watch begins with a snapshot unless it resumes an earlier one: `IndexCleared`, then `BlocksStored` for all blocks
that can be hit, then `SnapshotEnd`. The snapshot may name a block twice. The snapshot may also name a block that was
already removed. The block's `BlocksRemoved` then follows. A watcher that applies each event when it arrives is exact
from `SnapshotEnd` on (`quire.mirror.PrefixMirror` does this). A new session of the pool causes another snapshot.

All events have `pool`, `session_id`, `step` and `cursor`. `step` is the number of the step that made the change; it is
0 in a snapshot and for unary sessions. To resume later, use `session_id` and `cursor` of the stream, not of an event.
Resuming from an event inside a snapshot would lose the rest of the snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class _Event:
    """The fields that all events share."""

    pool: str
    session_id: bytes
    cursor: int
    step: int


@dataclass(frozen=True, slots=True)
class IndexCleared(_Event):
    """Until further events no block can be hit: a new session, or the start of a snapshot."""


@dataclass(frozen=True, slots=True)
class BlocksStored(_Event):
    """Consecutive blocks of one prefix became hittable.

    Attributes:
        groups: numbers of the blocks' groups, which all have the same specification.
        namespace: the prefix's namespace.
        parent_digest: digest of the block before the first one. Empty at the root, and in groups other than full
            attention.
        digests: one digest of 32 bytes per block.
        block_size: tokens per block.
        first_position: number of blocks before the first one in its prefix. For STATE, number of digest blocks up to
            and including its checkpoint.
    """

    groups: tuple[int, ...]
    namespace: str
    parent_digest: bytes
    digests: tuple[bytes, ...] = field(repr=False)
    block_size: int
    first_position: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved(_Event):
    """Digests can no longer be hit, because no block carries them. Attributes are the same as for `BlocksStored`."""

    groups: tuple[int, ...]
    namespace: str
    digests: tuple[bytes, ...] = field(repr=False)
    first_position: int


@dataclass(frozen=True, slots=True)
class SnapshotEnd(_Event):
    """The snapshot is complete: all blocks at the beginning of the watch, and all changes since."""


CacheEvent: TypeAlias = IndexCleared | BlocksStored | BlocksRemoved | SnapshotEnd
