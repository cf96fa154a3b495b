"""HTTP/1.0 and 1.1 as clients and proxies speak it: uvicorn's with httptools, and what uvicorn leaves out.

A connection is in one of these states:

    1. waiting    for a request: none has begun, or its head is not whole; it has a deadline, and makes room for others
    2. answering  a request is with the application, which has deadlines of its own for its body and its answer
    3. lingering  the last answer is sent, and what its caller still sends is read and dropped, so that it arrives
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final, cast

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire_gateway.connections import Connections
from quire_gateway.failures import ApiError
from quire_gateway.lingering import Lingering
from quire_gateway.sparse_log import log_sparsely

HEAD_BYTES_MAX: Final = 65_536  # of a request line and its headers: what nginx and h11 take by default, or more
HEAD_S: Final = 20.0  # from a connection, or the first byte of a request, to the end of its headers
BEHIND_MAX: Final = 32  # requests that may be sent before the one in front of them is answered
STALLED_S: Final = 60.0  # for which a caller may read nothing of its answer
UNREAD_BYTES_MAX: Final = 16 << 10  # of a connection's answers, beyond which its requests wait, and are charged
LEFT_S: Final = 1.0  # after which it is looked whether a caller that sends no more has left; HTTP/1.0 cannot be asked
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT: Final = b":\n\n"  # of a stream of events
_COMMENT_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT)
_EVENTS: Final = b"text/event-stream"
_UPGRADES: Final = frozenset({b"upgrade", b"http2-settings"})


class BoundedHttp(HttpToolsProtocol):
    """One connection.

    Beyond uvicorn's: the head of a request, trailers and the framing of chunks have limits. An upgrade that is offered
    is declined by answering as if it were not. Callers that have shut down their side are answered. An answer to
    HTTP/1.0 has no chunks. An answer that comes before its request is whole closes the connection, and still arrives.

    Args:
        connections: which of them wait, and how many there may be.
        arguments: uvicorn's.
    """

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waiting = connections
        self._unframed_bytes = 0  # since the last byte of a body, or the last whole request
        self._declined: bytes | None = None  # a head without the upgrade that it offers
        self._head_timer: asyncio.TimerHandle | None = None
        self._awaits_head = False  # it has begun, or is to begin with what comes next
        self._probe = b""  # what can be sent in the midst of a request that is answered
        self._is_broken = False  # what follows the requests so far is no HTTP

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the deadline of the first request."""
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=UNREAD_BYTES_MAX)
        super().connection_made(Lingering(cast("asyncio.Transport", transport), self.loop))  # type: ignore[arg-type]
        self._wait()
        self._waiting.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the deadline, and tells what is answered that its caller has left."""
        self._stop_waiting()
        self._waiting.discard(self)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection of a caller that only has no more to send, and finds out if it has left altogether.

        The system of one that has left refuses what is sent to it. So that there is something to send, HTTP/1.1 has
        interim answers, and streams of events have comments.
        """
        cycle = self.cycle
        is_answering = cycle is not None and not (cycle.response_complete or cycle.more_body)
        if not is_answering or self.scheme == "https" or self.transport.is_closing():
            return False  # TLS has no half of a connection
        cycle.keep_alive = False
        self.transport.write(self._probe)
        self.loop.call_later(LEFT_S, self._end_if_left, cycle)
        return True

    def _end_if_left(self, cycle: RequestResponseCycle) -> None:
        """Ends the connection of a caller that has left, or that cannot be asked whether it has."""
        if cycle.response_complete or self.transport.is_closing():
            return
        is_refused = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if is_refused or not (self._probe or cycle.response_started):
            self.transport.abort()
        elif self._probe:  # else the answer is on its way, and as good
            self.transport.write(self._probe)
            self.loop.call_later(LEFT_S, self._end_if_left, cycle)

    def data_received(self, data: bytes) -> None:
        """Parses, unless all is said; counts what is no part of a body."""
        transport = self.transport
        if transport.is_closing() or self._is_broken:
            transport.drop(len(data))  # type: ignore[attr-defined]
            return
        self._unset_keepalive_if_required()
        self._unframed_bytes += len(data)
        self._awaits_head = self._awaits_head or self.cycle is None or self.cycle.response_complete
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            log_sparsely("invalid HTTP", why=str(error)[:128])
            self.send_400_response(f"the request is no HTTP: {error}")
            return
        if self._unframed_bytes > HEAD_BYTES_MAX and not transport.is_closing():
            self.send_400_response(f"the request line and its headers have more than {HEAD_BYTES_MAX:,} bytes")
        if self._awaits_head and self._head_timer is None:
            self._wait()

    def _feed(self, data: bytes) -> None:
        """Parses. A request that offers an upgrade is parsed again without the offer.

        The parser ends such a request with its head, so what follows would be read as the next request.

        Raises:
            httptools.HttpParserError: it is no HTTP.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._is_broken:
                    return
                if self._declined is None:
                    raise httptools.HttpParserError("CONNECT is for proxies") from None
                data = self._declined + data[upgrade.args[0] :]
                self._declined = None
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def on_message_begin(self) -> None:
        """Notes that a request has begun. Its deadline starts with the end of what was received, if it is not whole."""
        super().on_message_begin()
        self._awaits_head = True

    def on_headers_complete(self) -> None:
        """Hands a request to the application."""
        if self.parser.should_upgrade():
            if self.parser.get_method() != b"CONNECT":
                self._declined = _without_upgrade(self.parser, self.url, self.headers)
            return
        self._stop_waiting()
        if len(self.pipeline) >= BEHIND_MAX:  # the connection ends before this one, so that it is sent again
            self._end_after(self.cycle)
        if not self._is_broken:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Notes that a request continues."""
        if self.parser.should_upgrade() or self._is_broken:
            return
        self._unframed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Tells the application that a body is whole."""
        if self.parser.should_upgrade() or self._is_broken:
            return
        self._unframed_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continues with the next request, or waits for it."""
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # there is enough to do
        elif self.cycle.response_complete:
            self._waiting.add(self)

    def shutdown(self) -> None:
        """Ends the connection once its answers are sent."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.end()  # type: ignore[attr-defined]
        else:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._waiting.discard(self)
        self._probe = b"" if cycle.scope["http_version"] == "1.0" else _CONTINUE
        super()._start_asgi_task(cycle, self._answered(cycle, app))  # type: ignore[arg-type]

    def _answered(self, cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
        """Returns the application with answers that suit their caller."""
        flow, version = cycle.flow, cycle.scope["http_version"]
        is_ended_by_closing = False

        async def is_read() -> bool:
            """Waits until the caller has read most of what was sent, and ends the connection of one that does not."""
            if flow.write_paused and not cycle.disconnected:
                try:
                    async with asyncio.timeout(STALLED_S):
                        await flow.drain()
                except TimeoutError:
                    cycle.transport.abort()
                    return False
            return True

        async def send(message: Message) -> None:
            nonlocal is_ended_by_closing
            if flow.write_paused and not await is_read():
                return
            if message["type"] == "http.response.start":
                if cycle.more_body:  # the rest of the body is read and dropped
                    cycle.transport.is_unread = True  # type: ignore[attr-defined]
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
                if version == "1.0" and all(name != b"content-length" for name, _ in message["headers"]):
                    is_ended_by_closing = True
                    cycle.chunked_encoding = False
                probe = b""
                for name, value in message["headers"]:
                    if name == b"content-type" and value.startswith(_EVENTS):
                        probe = _COMMENT if is_ended_by_closing else _COMMENT_CHUNK
                await cycle.send(message)  # type: ignore[arg-type]
                self._probe = probe
                return
            if is_ended_by_closing:
                cycle.expected_content_length = len(message.get("body", b""))
            await cycle.send(message)  # type: ignore[arg-type]
            if flow.write_paused and not message.get("more_body"):
                await is_read()  # its memory is the request's until then

        async def answered(scope: Scope, receive: Receive, _send: Send) -> None:
            scope["state"]["is_body_there"] = not cycle.more_body
            await app(scope, receive, send)

        return answered

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no request, once those before it are answered, and closes."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._refuse(ApiError(400, msg), b"400 Bad Request")
        elif not cycle.more_body:
            self._end_after(cycle)
        elif self.pipeline or cycle.response_started:
            self.transport.close()
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._refuse(ApiError(400, msg), b"400 Bad Request")

    def _end_after(self, cycle: RequestResponseCycle) -> None:
        """Reads no more requests, and closes once the last one is answered."""
        cycle.keep_alive, self._is_broken = False, True
        self.transport.is_unread = True  # type: ignore[attr-defined]

    def _refuse(self, error: ApiError, status: bytes) -> None:
        body = orjson.dumps(error.body)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close_unread()  # type: ignore[attr-defined]

    def _wait(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_waiting(self) -> None:
        self._awaits_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait()  # it is a request behind another one, which is being answered
        elif self._unframed_bytes:
            self._refuse(
                ApiError(408, f"the head of the request was not whole in {HEAD_S:g} s"), b"408 Request Timeout"
            )
        else:
            self.transport.close()

    def make_room(self) -> None:
        """Ends the connection, which waits longer than others, for the sake of a new one."""
        self.transport.abort()


def _without_upgrade(parser: httptools.HttpRequestParser, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Returns the head of a request without the upgrade that it offers."""
    version = parser.get_http_version().encode()
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, version)]
    for name, value in headers:
        if name == b"connection":
            left = [token for token in value.split(b",") if token.strip().lower() not in _UPGRADES]
            lines += [b"connection:" + b",".join(left)] if left else []
        elif name not in _UPGRADES:
            lines.append(name + b": " + value)
    return b"\r\n".join((*lines, b"", b""))
