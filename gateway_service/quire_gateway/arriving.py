"""Bodies on their way in, and what they may take of memory: until a request is answered, its body counts.

A body that arrives slowly makes room for others of its caller, and has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.types import Receive

from quire_gateway.failures import RATE, TOO_LARGE, ApiError
from quire_gateway.shares import Shares

BODY_S: Final = 60.0  # from the end of a head to the end of its body
REQUEST_BYTES: Final = 16 << 10  # that a request takes, however small its body is


class LeftError(Exception):
    """A caller has gone before its request was whole."""


class _Arriving:
    """A body that is not whole yet."""

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.charged_bytes = 0
        self.deadline: asyncio.Timeout | None = None
        self.has_made_room = False


class Bodies:
    """Reads bodies.

    Args:
        shares: of bytes, that the bodies of all requests take.
        bytes_max: of one body.
    """

    def __init__(self, shares: Shares, bytes_max: int) -> None:
        self._shares = shares
        self._bytes_max = bytes_max
        self._arriving: dict[_Arriving, None] = {}  # the oldest first

    @asynccontextmanager
    async def read(self, receive: Receive, caller: str) -> AsyncIterator[bytes]:
        """Yields a body, which counts until the block ends.

        Raises:
            ApiError: it is too large, too slow, or made room for others.
            LeftError: its caller has gone.
        """
        body = _Arriving(caller)
        try:
            self._charge(body, REQUEST_BYTES)
            yield await self._whole(receive, body)
        finally:
            self._shares.give_back(caller, body.charged_bytes)

    async def _whole(self, receive: Receive, body: _Arriving) -> bytes:
        parts: list[bytes] = []
        byte_count = 0
        self._arriving[body] = None
        try:
            async with asyncio.timeout(BODY_S) as body.deadline:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise LeftError
                    part = message.get("body", b"")
                    byte_count += len(part)
                    if byte_count > self._bytes_max:
                        raise too_large(self._bytes_max)
                    self._charge(body, max(0, byte_count - body.charged_bytes))
                    parts.append(part)
                    if not message.get("more_body"):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            if body.has_made_room:
                raise _full() from None
            raise ApiError(408, f"the body of the request was not whole in {BODY_S:g} s") from None
        finally:
            del self._arriving[body]

    def _charge(self, body: _Arriving, byte_count: int) -> None:
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


def _may_make_room(other: _Arriving, body: _Arriving) -> bool:
    return other is not body and other.caller == body.caller and not other.has_made_room


def _full() -> ApiError:
    return ApiError(
        429, "the requests under way fill what memory there is for them: try again later", kind=RATE, code="queue_full"
    )


def too_large(bytes_max: int) -> ApiError:
    """Returns the refusal of a body that is larger than bodies may be."""
    return ApiError(413, f"the body of a request has at most {bytes_max:,} bytes", code=TOO_LARGE)
