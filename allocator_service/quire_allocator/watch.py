"""Watchers of a pool's prefix index.

Lifecycle of a watch:

    1. resumed    session and cursor are known and every later event is still kept; otherwise the watch begins with 2
    2. snapshot   `cleared`, then all blocks that can be hit, then the changes made meanwhile, then `snapshot_end`
    3. following  events as they are published; a new session of the pool leads back to 2
    4. ended      by its caller, because the pool is gone, or because the next event for it is no longer kept

If nothing happens, an event `progress` comes every `WATCH_BEAT_S` seconds: it proves that the watcher has missed
nothing.

A watcher reads the log at its own pace: nothing is queued for a watcher, and no step ever waits for a watcher. The pool
changes while a snapshot is sent, so the changes follow the snapshot. `CacheEvent` in the protocol says how watchers
handle these changes. Blocks in namespaces that the caller may not use are left out.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeAlias

from grpc import aio
from quire._serving.caller_shares import CallerShares
from quire._serving.rpc import caller_of
from quire.protocol.limits import WATCH_BEAT_S
from quire.protocol.permissions import Permissions
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.events import Change, Event
from quire_allocator.core.groups.manager import IndexedStretch
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.readers import index
from quire_allocator.core.refusal import Refusal
from quire_allocator.wire import authorization, translate
from quire_allocator.wire.translate import require

Context: TypeAlias = "aio.ServicerContext[Any, Any]"


class Watching:
    """Serves all watchers of an allocator."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._watchers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.places = CallerShares(limits.WATCHERS_MAX)
        self._draining = False

    def wake(self, pool: str) -> None:
        """Tells the watchers of a pool that events were published, or that the pool has another session or is gone."""
        for news in self._watchers.get(pool, ()):
            news.set()

    def drain(self) -> None:
        """Ends every watch with UNAVAILABLE / DRAINING."""
        self._draining = True
        for pool in list(self._watchers):
            self.wake(pool)

    async def serve(self, request: pb.WatchEventsRequest, context: Context, permissions: Permissions) -> None:
        """Sends events until the caller leaves.

        Raises:
            Refusal: POOL_FORBIDDEN, POOL_UNKNOWN, LIMIT, WATCHER_SLOW, DRAINING.
        """
        name = translate.pool_name(request.pool)
        authorization.require_observing(permissions, name)
        self._directory.pool(name)
        caller = caller_of(context)
        require(
            self.places.take(caller),
            f"one caller may have at most {self.places.count_max} watches, fewer if others have many: end one, or wait",
            "LIMIT",
        )
        news = asyncio.Event()
        self._watchers[name].add(news)
        try:
            watcher = _Watcher(self._directory, name, context, permissions)
            cursor = request.cursor
            session_id = request.session_id
            while True:
                news.clear()
                require(not self._draining, "the allocator is shutting down", "DRAINING")
                session_id, cursor = await watcher.catch_up(session_id, cursor)
                try:
                    async with asyncio.timeout(WATCH_BEAT_S):
                        await news.wait()
                except TimeoutError:
                    await context.write(
                        pb.CacheEvent(pool=name, session_id=session_id, cursor=cursor, progress=pb.Progress())
                    )
        finally:
            self.places.leave(caller)
            self._watchers[name].discard(news)
            if not self._watchers[name]:
                del self._watchers[name]


class _Watcher:
    """Serves one watch of one pool."""

    def __init__(self, directory: Directory, name: str, context: Context, permissions: Permissions) -> None:
        self._directory = directory
        self._name = name
        self._context = context
        self._permissions = permissions

    async def catch_up(self, session_id: bytes, cursor: int) -> tuple[bytes, int]:
        """Sends all events after a cursor of a session; returns the session and cursor of the last one sent."""
        owner = self._directory.pool(self._name)
        if owner.session_id != session_id or not owner.pool.log.can_resume(cursor):
            session_id = owner.session_id
            cursor = await self._snapshot(owner)
        pool, log = owner.pool, owner.pool.log
        while owner.session_id == session_id and owner.pool is pool and cursor < log.last_cursor:
            cursor = await self._send(owner, cursor, log.last_cursor)
        return session_id, cursor

    async def _snapshot(self, owner: Ownership) -> int:
        """Sends all blocks that can be hit. Returns the cursor for the watch to continue from."""
        session_id, pool = owner.session_id, owner.pool
        cursor = pool.log.last_cursor

        def message(**change: Any) -> pb.CacheEvent:
            return pb.CacheEvent(cursor=cursor, pool=owner.name, session_id=session_id, **change)

        await self._context.write(message(cleared=pb.IndexCleared()))
        for stretch in index.walk_acknowledged(pool):
            if self._permissions.may_use(stretch.namespace):
                for piece in index.pieces(stretch):
                    await self._context.write(message(groups=piece.groups, stored=_stored(piece)))
        until = pool.log.last_cursor
        while cursor < until and owner.session_id == session_id:
            cursor = await self._send(owner, cursor, until)
        await self._context.write(message(snapshot_end=pb.SnapshotEnd()))
        return cursor

    async def _send(self, owner: Ownership, cursor: int, until: int) -> int:
        """Sends some of the events after `cursor`; returns the cursor of the last one sent."""
        log, session_id = owner.pool.log, owner.session_id
        if not log.can_resume(cursor):
            raise Refusal(
                "WATCHER_SLOW", f"events after cursor {cursor} are no longer kept; start again with a snapshot"
            )
        # The events are copied to a list, because the log drops old events while a slow caller blocks a write.
        for number, event in list(log.after(cursor, min(limits.EVENTS_PER_TURN_MAX, until - cursor))):
            if self._permissions.may_use(event.scope.namespace.name):
                for message in _messages(owner.name, session_id, number, event):
                    await self._context.write(message)
            cursor = number
        return cursor


def _messages(pool: str, session_id: bytes, cursor: int, event: Event) -> Iterator[pb.CacheEvent]:
    """Yields one event in as many messages as it needs. Only the last one carries the event's cursor: a watch that is
    resumed after an earlier message gets the whole event again."""
    parts = list(index.pieces(index.stretch_of(event)))
    for number, part in enumerate(parts, 1):
        done = cursor if number == len(parts) else cursor - 1
        message = pb.CacheEvent(cursor=done, pool=pool, session_id=session_id, step=event.step, groups=part.groups)
        if event.change is Change.STORED:
            message.stored.CopyFrom(_stored(part))
        else:
            message.removed.CopyFrom(
                pb.BlocksRemoved(namespace=part.namespace, digests=part.digests, first_position=part.first_position)
            )
        yield message


def _stored(stretch: IndexedStretch) -> pb.BlocksStored:
    return pb.BlocksStored(
        namespace=stretch.namespace,
        parent_digest=stretch.parent_digest,
        digests=stretch.digests,
        block_size=stretch.spec.block_size,
        first_position=stretch.first_position,
    )
