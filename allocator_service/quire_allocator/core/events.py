"""Changes of a pool's prefix index, in order, for routers and mirrors.

Lifecycle of an event:

    1. recorded    by an operation; not visible yet
    2. published   by `publish`: the owner has acknowledged the step that made it; the event gets its number
    3. forgotten   when the log is full, oldest first; a watcher that has not read it starts over from a snapshot

The cursor of an event is its number in the life of this log; a log's first event is number 1.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final, NamedTuple

# `Scope` is imported at run time, because a field of `Event` has this type. With an import for type checkers only, this
# compiled module could not be imported before `scopes`.
from quire_allocator.core.scopes import Evictor, Scope
from quire_allocator.core.spec import DIGEST_BYTES

EVENTS_KEPT_MAX: Final = 65_536
DIGEST_BYTES_KEPT_MAX: Final = 32 << 20


class Change(enum.Enum):
    """The kind of an event: how the index changed for its digests."""

    STORED = enum.auto()
    REMOVED = enum.auto()


_STORED: Final = Change.STORED
_REMOVED: Final = Change.REMOVED


class Event(NamedTuple):
    """Consecutive digests of one prefix, in the groups of one manager.

    Attributes:
        parent_digest: the digest of the block before the first one; empty at the root, and for REMOVED.
        first_position: the number of blocks before the first one.
        source: bytes that contain the digests at [start, end), and at most as many other bytes. So evicting a long
            stretch copies nothing.
    """

    step: int
    change: Change
    scope: Scope
    parent_digest: bytes
    first_position: int
    source: bytes | bytearray
    start: int
    end: int

    @property
    def digests(self) -> bytes:
        """Returns the digests of the event, concatenated."""
        return bytes(self.source[self.start : self.end])


def digest_count_before(untold: set[bytes], digests: bytes) -> int:
    """Counts the leading digests before the first one in `untold`."""
    for offset in range(0, len(digests), DIGEST_BYTES):
        if digests[offset : offset + DIGEST_BYTES] in untold:
            return offset // DIGEST_BYTES
    return len(digests) // DIGEST_BYTES


# A record is a plain tuple with the fields of an Event: making a named tuple would cost as much as an append.
_Record = tuple[int, Change, Scope, bytes, int, bytes | bytearray, int, int]


class EventLog:
    """Keeps the latest events of one pool: at most `event_count_max` of them, with `digest_bytes_max` of digests."""

    def __init__(self) -> None:
        self.event_count_max = EVENTS_KEPT_MAX
        self.digest_bytes_max = DIGEST_BYTES_KEPT_MAX
        self.step = 0
        self.last_cursor = 0
        self.removed_count = 0  # number of calls of `removed`
        self._recorded: list[_Record] = []
        self._recorded_bytes = 0
        self._kept: deque[_Record] = deque()
        self._kept_bytes = 0

    def stored(self, scope: Scope, parent_digest: bytes, digests: bytes, first_position: int) -> None:
        """Records that blocks became hittable."""
        self._recorded.append((self.step, _STORED, scope, parent_digest, first_position, digests, 0, len(digests)))
        self._recorded_bytes += len(digests)

    def removed(self, scope: Scope, first_position: int, source: bytes | bytearray, start: int, end: int) -> None:
        """Records that the digests `source[start:end]` can no longer be hit.

        The caller never changes `source` afterwards. The source is copied only if the digests are less than half of it.
        """
        if len(source) > 2 * (end - start):
            source, start, end = source[start:end], 0, end - start
        self._recorded.append((self.step, _REMOVED, scope, b"", first_position, source, start, end))
        self.removed_count += 1
        self._recorded_bytes += end - start

    def discard(self) -> None:
        """Drops recorded changes that are not published: a watcher of a rebuilt pool starts with a snapshot."""
        self._recorded, self._recorded_bytes = [], 0

    def publish(self, acknowledged_step: int) -> bool:
        """Publishes the events of all steps up to `acknowledged_step`; returns whether there were any."""
        recorded = self._recorded
        if not recorded or recorded[0][0] > acknowledged_step:
            return False
        told, left, told_bytes = recorded, list[_Record](), self._recorded_bytes
        if recorded[-1][0] > acknowledged_step:
            count = sum([event[0] <= acknowledged_step for event in recorded])  # records are in order of their steps
            told, left = recorded[:count], recorded[count:]
            told_bytes = sum([end - start for *_, start, end in told])
        self._kept.extend(told)
        self._kept_bytes += told_bytes
        self.last_cursor += len(told)
        self._recorded, self._recorded_bytes = left, self._recorded_bytes - told_bytes
        self.forget()
        return True

    def forget(self) -> None:
        """Forgets the oldest events beyond the limits."""
        while len(self._kept) > self.event_count_max or self._kept_bytes > self.digest_bytes_max:
            _, _, _, _, _, _, start, end = self._kept.popleft()  # `*_` would build a list for each forgotten event
            self._kept_bytes -= end - start

    def removed_in(self, step: int, digest_count_max: int, scope_count_max: int) -> tuple[dict[Scope, bytearray], bool]:
        """Returns the digests that one step removed from the index and did not store again, and whether the list is
        incomplete."""
        left: dict[tuple[str, Evictor, bytes], Scope] = {}
        for at, change, scope, _, _, source, start, end in self._recorded:
            if at == step:
                for offset in range(start, end, DIGEST_BYTES):
                    key = scope.namespace.name, scope.manager, bytes(source[offset : offset + DIGEST_BYTES])
                    if change is _REMOVED:
                        left[key] = scope
                    else:
                        left.pop(key, None)
        found: dict[Scope, bytearray] = {}
        for (_, _, digest), scope in islice(left.items(), digest_count_max):
            if scope in found or len(found) < scope_count_max:
                found.setdefault(scope, bytearray()).extend(digest)
        return found, sum(map(len, found.values())) < len(left) * DIGEST_BYTES

    def latest_removed(self, count: int) -> list[_Record]:
        """Returns at most `count` of the latest removals, the latest first, published ones included if still kept."""
        found: list[_Record] = []
        for event in chain(reversed(self._recorded), reversed(self._kept)):
            if len(found) == count:
                break
            if event[1] is _REMOVED:
                found.append(event)
        return found

    def untold(self, namespace: str) -> set[bytes]:
        """Returns digests stored by steps that may lack an answer. They must not be reported to readers yet."""
        return {
            bytes(source[offset : offset + DIGEST_BYTES])
            for _, change, scope, _, _, source, start, end in self._recorded
            if change is _STORED and scope.namespace.name == namespace
            for offset in range(start, end, DIGEST_BYTES)
        }

    def can_resume(self, cursor: int) -> bool:
        """Tells whether every event after `cursor` is still kept."""
        return self.last_cursor - len(self._kept) <= cursor <= self.last_cursor

    def after(self, cursor: int, count_max: int) -> Iterator[tuple[int, Event]]:
        """Yields published events after `cursor`, each with its own cursor; the caller has checked `can_resume`."""
        kept = self._kept
        first = cursor - (self.last_cursor - len(kept))
        for offset in range(min(count_max, len(kept) - first)):
            yield cursor + offset + 1, Event(*kept[first + offset])
