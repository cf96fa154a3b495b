"""Retries a watch: each attempt continues where the previous one was interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import grpc

from quire._transport.backoff import Backoff
from quire._transport.channel import ATTEMPTS_MAX, BACKOFF_S, Link
from quire._transport.inherited import inheritable
from quire._transport.timeouts import checked_timeout
from quire.errors import InternalError, QuireError, UnavailableError
from quire.events import BlocksRemoved, BlocksStored, CacheEvent, IndexCleared, SnapshotEnd
from quire.hashing import DIGEST_BYTES, split_digests
from quire.protocol.limits import WATCH_BEAT_S
from quire.v1 import allocator_pb2 as pb

BACKOFF_S_MAX: Final = 5.0  # longer than the pause between attempts of a call, because no caller waits here
SILENCE_S: Final = 3 * WATCH_BEAT_S  # An attempt without a message for this long is replaced.


class Watch:
    """The attempts of one watch, for `quire._transport.streams`.

    Args:
        link: the connection.
        method: WatchEvents of a stub on that connection.
        request: the first attempt's request.
        timeout_s: limit for all attempts together; None means no limit.
        on_wait: called with the error whenever a watch that has begun must be resumed.

    Attributes:
        call: the current attempt.
        timeout_s: the argument of the same name.
        heard_s: time of the allocator's last message, by `time.monotonic`; at first, the time of construction.
        session_id, cursor: position where the next attempt continues. Inside a snapshot it is the snapshot's beginning.
    """

    request_id = None

    def __init__(
        self,
        link: Link,
        method: Callable[..., Any],
        request: pb.WatchEventsRequest,
        *,
        timeout_s: float | None,
        on_wait: Callable[[QuireError], None] | None,
    ) -> None:
        self.session_id, self.cursor = request.session_id, request.cursor
        self._link = link
        self._method = method
        self._pool = request.pool
        self.timeout_s = timeout_s = None if timeout_s is None else checked_timeout(timeout_s)
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._on_wait = on_wait or (lambda _error: None)
        self._begun = False
        self._is_whole = True  # False while a snapshot arrives
        self._failures = 0  # consecutive failures since the last event
        self._backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self.heard_s = time.monotonic()
        self.call = self._start()

    def _start(self) -> Any:
        self._link.check_open()
        request = pb.WatchEventsRequest(pool=self._pool, session_id=self.session_id, cursor=self.cursor)
        return inheritable(self._method(request, timeout=self._left_s(), metadata=self._link.metadata))

    def _left_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def read(self, message: pb.CacheEvent) -> CacheEvent | None:
        """Returns the event, or None if this version does not know it. The next attempt continues after the event."""
        self._begun, self._failures = True, 0
        self._backoff.reset()
        self.heard_s = time.monotonic()
        change = message.WhichOneof("change")
        if change == "cleared":
            self._is_whole, self.session_id, self.cursor = False, b"", 0
        elif change == "snapshot_end":
            self._is_whole = True
        if self._is_whole:
            self.session_id, self.cursor = message.session_id, message.cursor
        return read_event(message)

    def silence(self) -> UnavailableError:
        """Returns the error of an attempt that was given up because the allocator was silent."""
        return UnavailableError(
            f"{self._link.address} sent nothing for {SILENCE_S:g} s, but an allocator sends something every "
            f"{WATCH_BEAT_S:g} s"
        )

    def pause_s(self, error: QuireError) -> float | None:
        """Returns the seconds to wait before `again`, or None if the current attempt's error is final."""
        self._failures += 1
        if error.code != grpc.StatusCode.UNAVAILABLE or not (self._begun or self._failures < ATTEMPTS_MAX):
            return None
        pause_s = self._backoff.next_s(error.retry_after_s)
        left_s = self._left_s()
        if left_s is not None and left_s <= pause_s:
            return None
        if self._begun:
            self._on_wait(self._link.explain(error))
        return pause_s

    def again(self) -> None:
        """Starts the next attempt, within the remaining time."""
        self.call = self._start()


def read_event(message: pb.CacheEvent) -> CacheEvent | None:
    """Returns an event; None if this version does not know its kind.

    Raises:
        InternalError: the event names no group, or its digests are incomplete.
    """
    kind = message.WhichOneof("change")
    if kind in ("stored", "removed") and (not message.groups or len(getattr(message, kind).digests) % DIGEST_BYTES):
        raise InternalError(f"the allocator sent an unreadable event about {kind} blocks")
    common = (message.pool, message.session_id, message.cursor, message.step)
    match kind:
        case "cleared":
            return IndexCleared(*common)
        case "snapshot_end":
            return SnapshotEnd(*common)
        case "stored":
            stored = message.stored
            return BlocksStored(
                *common,
                groups=tuple(message.groups),
                namespace=stored.namespace,
                parent_digest=stored.parent_digest,
                digests=tuple(split_digests(stored.digests)),
                block_size=stored.block_size,
                first_position=stored.first_position,
            )
        case "removed":
            removed = message.removed
            digests = tuple(split_digests(removed.digests))
            return BlocksRemoved(*common, tuple(message.groups), removed.namespace, digests, removed.first_position)
        case _:
            return None
