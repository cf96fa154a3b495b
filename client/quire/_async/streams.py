"""Streams that a server sends: chunks of a request and events of a pool, each returned when it arrives."""

from __future__ import annotations

import time

from quire import sampling
from quire._transport.attempts import Attempts
from quire._transport.channel import AsyncLink
from quire._transport.streams import AsyncStream, AsyncWatchStream


class AsyncChunkStream(AsyncStream[sampling.Chunk]):
    """Chunks of one request, each returned when it arrives.

    `aclose`, leaving the `async with` block, and losing the last reference (for example by `break` out of a loop over
    `client.stream(...)`) cancel the request. Ending the request frees its blocks at once.
    """

    def __init__(self, link: AsyncLink, attempts: Attempts[sampling.Chunk], request_id: str) -> None:
        super().__init__(link, attempts)
        self.request_id = request_id


class AsyncEventStream(AsyncWatchStream):
    """An endless stream of one pool's events. `aclose`, leaving the `async with` block and losing the last
    reference end the watch."""

    @property
    def session_id(self) -> bytes:
        """Returns the session to resume from later, together with `cursor`. The cursor is empty inside a snapshot,
        because a partial snapshot must begin again."""
        return self._watch.session_id

    @property
    def cursor(self) -> int:
        """Returns the position to resume from later, together with `session_id`."""
        return self._watch.cursor

    @property
    def age_s(self) -> float:
        """Returns the seconds since the allocator's last message. A mirror of these events is equally old. An idle
        allocator sends a message every 5 s."""
        return time.monotonic() - self._watch.heard_s
