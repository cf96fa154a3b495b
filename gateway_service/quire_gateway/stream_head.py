"""The head of a stream, and the signs of life before its first piece."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Send

HEAD_AFTER_S: Final = 0.2  # workers refuse sooner than that; a stream that has begun cannot change its status
BEAT_S: Final = 15.0  # between signs of life before the first piece: proxies end connections that are silent for 60 s
_BEAT: Final = b": waiting\n\n"  # a comment: clients of server-sent events ignore it
_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects pieces would undo the stream
]


class StreamHead:
    """The head of a stream. It is sent with the first piece, or after 0.2 s if no worker has refused the request.

    Clients and proxies wait for a head only so long, and a first piece may need all of a long prompt.

    Args:
        send: sends messages to the caller.

    Attributes:
        is_sent: whether the head was sent.
        waits_for_piece: whether no piece has come.
    """

    def __init__(self, send: Send) -> None:
        self._send_message = send
        self.is_sent = False
        self.waits_for_piece = True
        self._waiting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._waiting = asyncio.create_task(self._wait())

    async def __aexit__(self, *_: object) -> None:
        self._stop_waiting()

    async def piece_came(self) -> None:
        """Sends the head, unless it was sent."""
        self.waits_for_piece = False
        self._stop_waiting()
        await self._send()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    async def _send(self) -> None:
        if not self.is_sent:
            self.is_sent = True
            await self._send_message({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def _wait(self) -> None:
        await asyncio.sleep(HEAD_AFTER_S)
        await self._send()
        while True:
            await asyncio.sleep(BEAT_S)
            await self._send_message({"type": "http.response.body", "body": _BEAT, "more_body": True})
