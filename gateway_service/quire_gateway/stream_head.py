"""Sends the head of a stream, and keeps the connection alive while there are no pieces."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Send

HEAD_AFTER_S: Final = 0.2  # seconds until the head is sent without a piece; workers that refuse do so within this time
# Comments are sent at this interval, because proxies end connections that are silent for 60 s.
KEEP_ALIVE_S: Final = 15.0
_BEAT: Final = b": waiting\n\n"  # a comment: clients of server-sent events ignore it
_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps a proxy from collecting pieces
]


class StreamHead:
    """The head of a stream. The head is sent with the first piece, or after 0.2 s if no worker has refused the request.

    Clients and proxies wait only a limited time for a head, and the first piece may come only after a long prefill.
    Later pieces may be far apart, too: reasoning that the caller does not want produces none.

    Args:
        send: sends messages to the caller.
        keep_alive_s: seconds of silence after which a comment is sent; 0 for never.

    Attributes:
        is_sent: whether the head was sent.
    """

    def __init__(self, send: Send, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._send_message, self._keep_alive_s = send, keep_alive_s
        self.is_sent = False
        self._loop = asyncio.get_running_loop()
        self._spoke_s = self._loop.time()
        self._waiting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._waiting = asyncio.create_task(self._wait())

    async def __aexit__(self, *_: object) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    async def piece_came(self, data: bytes) -> None:
        """Sends a piece, after the head if that was not sent yet. An empty piece sends only the head."""
        if not self.is_sent:
            await self._send()
        if data:
            self._spoke_s = self._loop.time()
            await self._send_message({"type": "http.response.body", "body": data, "more_body": True})

    async def _send(self) -> None:
        if not self.is_sent:
            self.is_sent = True
            await self._send_message({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def _wait(self) -> None:
        await asyncio.sleep(HEAD_AFTER_S)
        await self._send()
        while self._keep_alive_s:
            left_s = self._spoke_s + self._keep_alive_s - self._loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            self._spoke_s = self._loop.time()
            await self._send_message({"type": "http.response.body", "body": _BEAT, "more_body": True})
