"""Request bodies that are arriving, and a limit of their memory. A body counts until its request is answered.

A body that arrives slowly has a deadline, and is dropped if its caller's other bodies need the memory.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Receive

from quire_gateway.failures import RATE, TOO_LARGE, ApiError
from quire_gateway.shares import Shares

BODY_S: Final = 60.0  # seconds from the end of a head to the end of its body
REQUEST_BYTES: Final = 16 << 10  # bytes charged for a request with a body of at most this size


class LeftError(Exception):
    """The caller closed the connection before its request was whole."""


class Arriving:
    """A request body. `async with` reads it, and counts its bytes until the block ends."""

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
    """Reads the bodies of requests.

    Args:
        shares: each caller's share of the bytes that all request bodies together may take.
        bytes_max: the bytes of one body.
    """

    def __init__(self, shares: Shares, bytes_max: int) -> None:
        self._shares = shares
        self._bytes_max = bytes_max
        self._arriving: dict[Arriving, None] = {}  # bodies that have not arrived completely, oldest first

    def read(self, receive: Receive, caller: str, *, is_there: bool = False) -> Arriving:
        """Returns a context manager that reads a body, and counts its bytes until the block ends.

        Args:
            receive: the ASGI callable of the request.
            caller: the caller whose share the body takes.
            is_there: whether the whole body arrived with its head, so that reading it does not wait.

        Raises:
            ApiError: on entry: the body is too large, arrives too slowly, or was dropped for other bodies.
            LeftError: on entry: the caller has gone.
        """
        return Arriving(self, receive, caller, is_there=is_there)

    def release(self, body: Arriving) -> None:
        """Gives back the bytes that a body has taken."""
        self._shares.give_back(body.caller, body.charged_bytes)

    async def take_in(self, body: Arriving) -> bytes:
        """Returns a body once it is whole. Raises the errors that `read` names."""
        self._charge(body, REQUEST_BYTES)
        if body.is_there:  # A deadline and an entry in `_arriving` would cost more than reading the body.
            return await self._received(body)
        self._arriving[body] = None
        try:
            async with asyncio.timeout(BODY_S) as body.deadline:
                return await self._received(body)
        except TimeoutError:
            if body.has_made_room:
                raise _full() from None
            raise ApiError(408, f"the body of the request did not arrive completely within {BODY_S:g} s") from None
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
        """Counts some bytes of a body. If memory is short, drops the caller's oldest arriving bodies.

        Raises:
            ApiError: there is still too little memory.
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
        429, "the gateway's memory for bodies of requests is full: try again later", kind=RATE, code="queue_full"
    )


def too_large(bytes_max: int) -> ApiError:
    """Returns the error for a body that is larger than `bytes_max`."""
    return ApiError(413, f"the body of a request may have at most {bytes_max:,} bytes", code=TOO_LARGE)
