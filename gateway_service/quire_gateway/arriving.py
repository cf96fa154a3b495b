"""Bodies on their way in, and what they may take of memory: until a request is answered, its body counts.

A body that arrives slowly makes room for others of its caller, and has a deadline.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Receive

from quire_gateway.failures import RATE, TOO_LARGE, ApiError
from quire_gateway.shares import Shares

BODY_S: Final = 60.0  # from the end of a head to the end of its body
REQUEST_BYTES: Final = 16 << 10  # that a request takes, however small its body is


class LeftError(Exception):
    """A caller has gone before its request was whole."""


class Arriving:
    """A body on its way in. As a block it is read, and counts until the block ends."""

    def __init__(self, bodies: Bodies, receive: Receive, caller: str, *, is_there: bool) -> None:
        self._bodies = bodies
        self.receive = receive
        self.caller = caller
        self.is_there = is_there
        self.charged_bytes = 0
        self.deadline: asyncio.Timeout | None = None
        self.has_made_room = False

    async def __aenter__(self) -> bytes:
        try:
            return await self._bodies.take_in(self)
        except BaseException:
            self._bodies.release(self)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._bodies.release(self)


class Bodies:
    """Reads bodies.

    Args:
        shares: of bytes, that the bodies of all requests take.
        bytes_max: of one body.
    """

    def __init__(self, shares: Shares, bytes_max: int) -> None:
        self._shares = shares
        self._bytes_max = bytes_max
        self._arriving: dict[Arriving, None] = {}  # the oldest first

    def read(self, receive: Receive, caller: str, *, is_there: bool = False) -> Arriving:
        """Returns a block that has a body, which counts until the block ends.

        Args:
            receive: of its request.
            caller: whose share it takes.
            is_there: whether all of it came with its head, so that nothing is waited for.

        Raises:
            ApiError: from the block's beginning: it is too large, too slow, or made room for others.
            LeftError: likewise: its caller has gone.
        """
        return Arriving(self, receive, caller, is_there=is_there)

    def release(self, body: Arriving) -> None:
        """Gives back what a body has taken."""
        self._shares.give_back(body.caller, body.charged_bytes)

    async def take_in(self, body: Arriving) -> bytes:
        """Returns a body once it is whole; raises what `read` says."""
        self._charge(body, REQUEST_BYTES)
        if body.is_there:  # a deadline, and a place among those that make room, would cost more than reading it
            return await self._received(body)
        self._arriving[body] = None
        try:
            async with asyncio.timeout(BODY_S) as body.deadline:
                return await self._received(body)
        except TimeoutError:
            if body.has_made_room:
                raise _full() from None
            raise ApiError(408, f"the body of the request was not whole in {BODY_S:g} s") from None
        finally:
            del self._arriving[body]

    async def _received(self, body: Arriving) -> bytes:
        parts: list[bytes] = []
        byte_count = 0
        while True:
            message = await body.receive()
            if message["type"] == "http.disconnect":
                raise LeftError
            part = message.get("body", b"")
            byte_count += len(part)
            if byte_count > self._bytes_max:
                raise too_large(self._bytes_max)
            if byte_count > body.charged_bytes:
                self._charge(body, byte_count - body.charged_bytes)
            parts.append(part)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _charge(self, body: Arriving, byte_count: int) -> None:
        """Counts some bytes of a body. Without room, the caller's oldest arriving bodies are dropped.

        Raises:
            ApiError: there is still no room.
        """
        while not self._shares.take(body.caller, byte_count):
            oldest = next((other for other in self._arriving if _may_make_room(other, body)), None)
            if oldest is None or oldest.deadline is None:
                raise _full()
            oldest.has_made_room = True
            oldest.deadline.reschedule(0)
            self._shares.give_back(oldest.caller, oldest.charged_bytes)
            oldest.charged_bytes = 0
        body.charged_bytes += byte_count


def _may_make_room(other: Arriving, body: Arriving) -> bool:
    return other is not body and other.caller == body.caller and not other.has_made_room


def _full() -> ApiError:
    return ApiError(
        429, "the requests under way fill what memory there is for them: try again later", kind=RATE, code="queue_full"
    )


def too_large(bytes_max: int) -> ApiError:
    """Returns the refusal of a body that is larger than bodies may be."""
    return ApiError(413, f"the body of a request has at most {bytes_max:,} bytes", code=TOO_LARGE)
