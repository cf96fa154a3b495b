"""HTTP/1.0 and 1.1 as clients and proxies use it: uvicorn's httptools protocol, with the limits that uvicorn lacks.

A connection is in one of these states:

    1. waiting     for a request: none has begun, or its head is not whole. The connection has a deadline, and is closed
                   if too many connections wait
    2. answering   the application has a request. It has deadlines of its own for the body and the answer
    3. lingering   the last answer is sent. Further bytes of the caller are read and dropped, so that the answer arrives
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

HEAD_BYTES_MAX: Final = 65_536  # bytes of a request line with the headers; nginx and h11 allow no more by default
HEAD_S: Final = 20.0  # seconds from the beginning of a connection or a request to the end of the request's headers
BEHIND_MAX: Final = 32  # pipelined requests that a connection may have behind the one that is being answered
STALLED_S: Final = 60.0  # seconds that a caller may read nothing of its answer
# Unread bytes of a connection's answers. With more, the connection's further requests wait, and the answer's memory
# stays charged to its caller.
UNREAD_BYTES_MAX: Final = 16 << 10
# Seconds between two checks whether a caller that has closed its sending half has left altogether. HTTP/1.0 has no
# bytes to check this with.
LEFT_S: Final = 1.0
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT: Final = b":\n\n"  # a comment of server-sent events, which clients ignore
_COMMENT_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT)
_EVENTS: Final = b"text/event-stream"
_UPGRADES: Final = frozenset({b"upgrade", b"http2-settings"})


class BoundedHttp(HttpToolsProtocol):
    """One HTTP connection.

    Differences from uvicorn: the head of a request, trailers and the framing of chunks have limits. An offered upgrade
    is ignored. Callers that have shut down their sending side are still answered. An answer to HTTP/1.0 has no chunks.
    An answer that starts before its request is whole closes the connection, and still arrives.

    Args:
        connections: the connections that wait for a request, with their limit.
        arguments: uvicorn's arguments.
    """

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waiting = connections
        self._unframed_bytes = 0  # bytes since the last byte of a body, or the last whole request
        self._declined: bytes | None = None  # the head of a request that offers an upgrade, with the offer removed
        self._head_timer: asyncio.TimerHandle | None = None
        self._awaits_head = False  # whether a head has begun, or begins with the next bytes
        self._probe = b""  # bytes that callers ignore: sending them shows whether the caller is still there
        self._is_broken = False  # whether the bytes after the last request are not HTTP

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the deadline of the first request."""
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=UNREAD_BYTES_MAX)
        super().connection_made(Lingering(cast("asyncio.Transport", transport), self.loop))  # type: ignore[arg-type]
        self._wait()
        self._waiting.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the deadline, and tells the running answer that its caller has left."""
        self._stop_waiting()
        self._waiting.discard(self)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection of a caller that has closed only its sending half, and checks whether the caller has
        closed both.

        The operating system of a caller that has left refuses further bytes. HTTP/1.1 has interim answers for this, and
        event streams have comments.
        """
        cycle = self.cycle
        is_answering = cycle is not None and not (cycle.response_complete or cycle.more_body)
        if not is_answering or self.scheme == "https" or self.transport.is_closing():
            return False  # TLS connections cannot be half closed.
        cycle.keep_alive = False
        self.transport.write(self._probe)
        self.loop.call_later(LEFT_S, self._end_if_left, cycle)
        return True

    def _end_if_left(self, cycle: RequestResponseCycle) -> None:
        """Ends the connection if the caller has left, or if there is no way to find out."""
        if cycle.response_complete or self.transport.is_closing():
            return
        is_refused = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if is_refused or not (self._probe or cycle.response_started):
            self.transport.abort()
        elif self._probe:  # Without a probe, writing the rest of the answer shows whether the caller has left.
            self.transport.write(self._probe)
            self.loop.call_later(LEFT_S, self._end_if_left, cycle)

    def data_received(self, data: bytes) -> None:
        """Parses bytes, unless no more requests are read. Counts the bytes that belong to no body."""
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
            is_of_head = isinstance(error, httptools.HttpParserCallbackError)
            if not (is_of_head and self._unframed_bytes > HEAD_BYTES_MAX):
                why = error.__context__ if is_of_head else error
                log_sparsely("invalid HTTP", why=str(why)[:128])
                self.send_400_response(f"the request is not HTTP: {why}")
                return
        if self._unframed_bytes > HEAD_BYTES_MAX and not transport.is_closing():
            self.send_400_response(
                f"the request line and the headers together may have at most {HEAD_BYTES_MAX:,} bytes"
            )
        if self._awaits_head and self._head_timer is None:
            self._wait()

    def _feed(self, data: bytes) -> None:
        """Parses bytes. A request that offers an upgrade is parsed again without the offer.

        The parser ends such a request with its head, so the following bytes would be read as the next request.

        Raises:
            httptools.HttpParserError: the bytes are not HTTP.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._is_broken:
                    return
                if self._declined is None:
                    raise httptools.HttpParserError(
                        "CONNECT is not supported, because this server is not a proxy"
                    ) from None
                data = self._declined + data[upgrade.args[0] :]
                self._declined = None
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def on_message_begin(self) -> None:
        """Notes that a request has begun. If the received bytes do not complete the request, its deadline starts."""
        super().on_message_begin()
        self._awaits_head = True

    def on_headers_complete(self) -> None:
        """Hands a request to the application."""
        if self.parser.should_upgrade():
            if self.parser.get_method() != b"CONNECT":
                self._declined = _without_upgrade(self.parser, self.url, self.headers)
            return
        self._stop_waiting()
        # Too many requests wait. The connection ends after their answers, so that the client sends this request again.
        if len(self.pipeline) >= BEHIND_MAX:
            self._end_after(self.cycle)
        if not self._is_broken:
            self._check_head()
            super().on_headers_complete()
            self.headers = []  # Trailers go into this new list, so they do not become headers of the request.

    def _check_head(self) -> None:
        """Raises `HttpParserError` if a head is too long, or if HTTP/1 does not have its version or kind of target."""
        # `_unframed_bytes` may include the beginning of the body, so the second condition counts only the head.
        if self._unframed_bytes > HEAD_BYTES_MAX and _head_bytes(self.url, self.headers) > HEAD_BYTES_MAX:
            raise httptools.HttpParserError("its head is too long")
        version = self.parser.get_http_version()
        if version == "1.0":
            self.expect_100_continue = False  # HTTP/1.0 has no interim answers.
        elif version != "1.1":
            raise httptools.HttpParserError(f"its version is {version}: use 1.1 or 1.0")
        if not self.url.startswith(b"/"):
            self.url, host = _with_path(self.url)
            # RFC 9112 says that the host in such a target overrides the Host header.
            self.headers[:] = [(name, host if name == b"host" else value) for name, value in self.headers]

    def on_body(self, body: bytes) -> None:
        """Hands a part of the body on, which is no longer counted as unframed bytes."""
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
            self.flow.pause_reading()  # The next request has already arrived; reading more can wait.
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
        """Returns the application with answers that fit the caller's protocol and reading speed."""
        flow, version = cycle.flow, cycle.scope["http_version"]
        is_ended_by_closing = False

        async def is_read() -> bool:
            """Waits until the caller has read most of the answer. Ends the connection if the caller stalls."""
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
                if cycle.more_body:  # The rest of the body will be read and dropped.
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
                await is_read()  # The answer stays charged to the request until the caller has read most of it.

        async def answered(scope: Scope, receive: Receive, _send: Send) -> None:
            scope["state"]["is_body_there"] = not cycle.more_body
            await app(scope, receive, send)

        return answered

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are not a request, after the requests before them are answered. Then closes."""
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
        """Stops reading requests, and closes the connection once the last one is answered."""
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
            self._wait()  # The head is a pipelined request's: its deadline starts again during the previous answer.
        elif self._unframed_bytes:
            self._refuse(
                ApiError(408, f"the head of the request did not arrive completely within {HEAD_S:g} s"),
                b"408 Request Timeout",
            )
        else:
            self.transport.close()

    def make_room(self) -> None:
        """Ends this connection, which has waited longest, so that a new connection can wait."""
        self.transport.abort()


def _head_bytes(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    """Returns the least bytes of a head, because the parser drops spaces around values."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


def _with_path(target: bytes) -> tuple[bytes, bytes]:
    """Returns a target that is a whole URL, as proxies send it, with a path, and the URL's host.

    Raises:
        httptools.HttpParserError: the target is not a URL.
    """
    try:
        parsed = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        raise httptools.HttpParserError("the request's target is not a URL") from None
    host = target.partition(b"//")[2].partition(b"/")[0].partition(b"?")[0].partition(b"#")[0]
    if parsed.path is not None:
        return target, host
    return b"/" if parsed.query is None else b"/?" + parsed.query, host


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
