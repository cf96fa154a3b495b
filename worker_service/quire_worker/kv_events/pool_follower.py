"""The part on the worker's event loop: notes what samples fill, and watches the worker's own pool."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
from quire import AsyncAllocator
from quire.errors import NotFoundError, QuireError, UsageError
from quire.protocol.limits import WATCH_BEAT_S
from quire.streams import AsyncEventStream
from quire.types import GroupKind, GroupSpec

from quire_worker.kv_events.published_index import Filled, Index
from quire_worker.kv_events.publisher import Publisher

if TYPE_CHECKING:
    from quire_worker.scheduling.request import Sample
    from quire_worker.scheduling.roster import Roster

log = structlog.get_logger()

PAUSE_S = 0.05  # seconds before the next watch; doubled after each failure
PAUSE_S_MAX = 1.0


class Follower:
    """Feeds a publisher with a worker's blocks, from `start` to `close`.

    Args:
        allocator: where the pool is.
        pool: its name.
        publisher: the publisher, which `close` ends.
        roster: the samples that fill blocks.
    """

    def __init__(self, allocator: AsyncAllocator, pool: str, publisher: Publisher, roster: Roster) -> None:
        self.publisher = publisher
        self._allocator, self._pool, self._roster = allocator, pool, roster
        self._watching: asyncio.Task[None] | None = None
        self._events: AsyncEventStream | None = None  # the events of the open watch, if there is one
        self._ended_s = time.monotonic()  # when the last watch ended

    def lag_s(self) -> float:
        """Returns the delay of events: the age of the oldest unpublished event, or how long the next message of
        the allocator has been overdue. The thread of the metrics server calls this."""
        events = self._events
        silent_s = time.monotonic() - self._ended_s if events is None else events.age_s
        return max(self.publisher.lag_s, silent_s - WATCH_BEAT_S, 0.0)

    def start(self) -> None:
        """Starts to publish and to watch. The pool should be attached."""
        self.publisher.start()
        self._roster.on_filled = self.note
        log.info("publishing KV events", address=self.publisher.address, replay=self.publisher.replay_address)
        self._ended_s = time.monotonic()
        self._watching = asyncio.create_task(self._watch())

    def note(self, sample: Sample, first: int, end: int) -> None:
        """Notes the tokens of the full blocks `[first, end)` of a sample that are about to be committed. Blocks that a
        request hides from other requests are left out."""
        if sample.hidden_from is not None:
            end = min(end, sample.hidden_from)
        if first >= end:
            return
        size, request = self._roster.block_size, sample.request
        adapter = request.adapter
        filled = Filled(
            sample.digests(size, first - 1, first)[0] if first else b"",
            sample.digests(size, first, end),
            array("I", sample.tokens[first * size : end * size]),
            None if adapter is None else adapter.name,
            tuple(filter(None, (request.namespace, request.cache_salt))),
        )
        self.publisher.offer(filled)

    async def close(self) -> None:
        """Ends the watch and the publisher."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await asyncio.to_thread(self.publisher.close)

    async def _watch(self) -> None:
        """Passes the events of one watch after the other to the publisher. Each begins with a snapshot."""
        pause_s = PAUSE_S
        while True:
            try:
                if not self.publisher.is_behind:
                    await self._watch_once()
                    pause_s = PAUSE_S
            except NotFoundError:
                pass  # a new allocator has no pool until the session attaches
            except QuireError as error:
                log.warning("cannot watch the pool; KV events are late", error=error.message, reason=error.reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _watch_once(self) -> None:
        """Passes on events until one has to be dropped."""
        async with self._allocator.watch_events(self._pool) as events:
            self._events = events
            try:
                async for event in events:
                    if not self.publisher.offer(event):
                        log.warning("KV events were dropped; a snapshot follows")
                        return
            finally:
                self._events, self._ended_s = None, time.monotonic()


def index_of(groups: Sequence[GroupSpec], block_count: int) -> Index:
    """Returns the index of a pool's first group of full attention, the only kind that routers understand.

    Raises:
        UsageError: the model has no full attention.
    """
    for number, group in enumerate(groups):
        if group.kind is GroupKind.FULL_ATTENTION:
            return Index(number, group.block_size, 2 * block_count)
    raise UsageError("--kv-events: the model has no full attention, so routers cannot tell what a prompt would hit")
