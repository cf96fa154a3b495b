"""Events that a watcher of a pool gets, in order: changes of the blocks that the pool can hit.

Unless it resumes an earlier one, every watch begins with a snapshot: `IndexCleared`, then `BlocksStored` for all blocks
that can be hit, then `SnapshotEnd`. The snapshot may name a block twice. It may also name a block that is gone already:
then its `BlocksRemoved` follows. A watcher that applies each event when it arrives is exact from `SnapshotEnd` on
(`quire.mirror.PrefixMirror` does this). A new session of the pool leads to another snapshot.

All events have `pool` and `session_id`, `step` (what made the change: 0 in a snapshot and for unary sessions) and
`cursor`. To resume later, take `session_id` and `cursor` of the stream instead. Do not resume from an event inside a
snapshot: the rest of the snapshot would be missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class _Event:
    """The fields that all events have."""

    pool: str
    session_id: bytes
    cursor: int
    step: int


@dataclass(frozen=True, slots=True)
class IndexCleared(_Event):
    """Nothing hits any more: a new session, or the start of a snapshot."""


@dataclass(frozen=True, slots=True)
class BlocksStored(_Event):
    """Consecutive blocks of one prefix became hittable.

    Attributes:
        groups: numbers of the groups that they are of: all of one specification.
        namespace: of the prefix.
        parent_digest: of the block before the first one; empty at the root, and in groups other than full attention.
        digests: of 32 bytes each.
        block_size: tokens per block.
        first_position: blocks before the first one in its prefix; of STATE, digest blocks up to and with its
            checkpoint.
    """

    groups: tuple[int, ...]
    namespace: str
    parent_digest: bytes
    digests: tuple[bytes, ...] = field(repr=False)
    block_size: int
    first_position: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved(_Event):
    """Digests no longer hit: no other block carries them. Attributes as in `BlocksStored`."""

    groups: tuple[int, ...]
    namespace: str
    digests: tuple[bytes, ...] = field(repr=False)
    first_position: int


@dataclass(frozen=True, slots=True)
class SnapshotEnd(_Event):
    """The snapshot is complete: all that was there when the watch began, and all changes since."""


CacheEvent: TypeAlias = IndexCleared | BlocksStored | BlocksRemoved | SnapshotEnd
