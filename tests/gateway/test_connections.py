"""Tests connections alone, in this process: when the server closes them, and what a waiting caller receives."""

from __future__ import annotations

import asyncio
import functools
import gc
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from quire_gateway import bounded_http, stream_head
from quire_gateway.bounded_http import BoundedHttp
from quire_gateway.connections import Connections
from quire_gateway.failures import ApiError
from quire_gateway.serving import CallerGoneError, until_gone
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASK = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def in_process(answer: ASGIApp, connections: Connections) -> AsyncIterator[int]:
    """Serves an ASGI function in this process; yields the port."""
    http: Any = functools.partial(BoundedHttp, connections=connections)
    configuration = uvicorn.Config(answer, http=http, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(configuration)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server._serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


async def nothing(_scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def test_a_head_has_a_deadline_and_its_caller_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_S", 0.2)
    async with in_process(nothing, Connections(10)) as port:
        for sent, told in ((b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"HTTP/1.1 408"), (b"", b"")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert (await reader.read(12)) == told
            assert await reader.read() is not None, "it is closed"
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK.replace(b"close", b"keep-alive"))
        assert (await reader.readuntil(b"\r\n\r\n"))[:12] == b"HTTP/1.1 200"
        writer.write(b"GET / HTT")
        assert (await reader.read(12)) == b"HTTP/1.1 408", "of each request on a connection"
        writer.close()


async def test_a_head_has_a_limit_even_if_it_arrives_at_once() -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: "
    async with in_process(nothing, Connections(10)) as port:
        for padding, told in ((60_000, b"HTTP/1.1 200"), (66_000, b"HTTP/1.1 400")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"p" * padding + b"\r\n\r\n")
            assert await reader.read(12) == told
            writer.close()


async def test_a_broken_body_ends_the_connection_within_an_answer_that_has_begun() -> None:
    async def answer(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with in_process(answer, Connections(10)) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert (await reader.readuntil(b"begun\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"no size\r\n")
        assert await reader.read() == b"", "an error within the answer would look like its text"
        writer.close()


async def test_the_connection_that_waits_longest_makes_room_for_a_new_one() -> None:
    async with in_process(nothing, Connections(2)) as port:
        waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        with suppress(ConnectionError):
            assert await waiting[0][0].read() == b""
        for reader, writer in waiting[1:]:
            writer.write(ASK)
            assert (await reader.read(12)) == b"HTTP/1.1 200"
        for _, writer in waiting:
            writer.close()


async def test_a_caller_that_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "STALLED_S", 0.2)
    ended = asyncio.Event()

    async def endlessly(send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            await asyncio.sleep(0)

    async def answer(_scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(CallerGoneError):
            await until_gone(receive, endlessly(send))
        ended.set()

    async with in_process(answer, Connections(10)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1_024)
        writer.write(ASK)
        await asyncio.wait_for(ended.wait(), 30)
        writer.close()


async def test_an_answer_that_fails_keeps_nothing_of_itself() -> None:
    """Reference cycles would stay in memory until the garbage collector runs, which is rare."""

    class Much:
        pass

    kept: weakref.ref[Much] | None = None

    async def endlessly() -> Message:
        return await asyncio.Future()

    async def answer() -> None:
        nonlocal kept
        much = Much()
        kept = weakref.ref(much)
        await asyncio.sleep(0)
        raise ApiError(429, "no room")

    gc.disable()
    try:
        with suppress(ApiError):
            await until_gone(endlessly, answer())
        await asyncio.sleep(0)
        assert kept is not None
        assert kept() is None
    finally:
        gc.enable()


async def test_a_stream_that_waits_gives_signs_of_life_and_then_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_head, "HEAD_AFTER_S", 0.0)
    sent, several = list[bytes](), asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"head"))
        if len(sent) == 4:
            several.set()

    async with stream_head.StreamHead(send, 0.01) as _, asyncio.timeout(30):
        await several.wait()
    assert sent[:4] == [b"head", *[b": waiting\n\n"] * 3]
    quick = stream_head.StreamHead(send)
    sent.clear()
    async with quick:
        await quick.piece_came(b"")
        for _ in range(10):
            await asyncio.sleep(0)
        assert (sent, quick.is_sent) == ([b"head"], True)


async def test_a_stream_that_falls_silent_between_its_pieces_gives_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_head, "HEAD_AFTER_S", 0.0)
    sent, several = list[bytes](), asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"head"))
        if sent.count(b": waiting\n\n") == 2:
            several.set()

    head = stream_head.StreamHead(send, 0.01)
    async with head, asyncio.timeout(30):
        await head.piece_came(b"piece")
        await several.wait()
        await head.piece_came(b"next")
    told = list(sent)
    assert told[:2] == [b"head", b"piece"]
    assert told[-1] == b"next"
    await asyncio.sleep(0)
    assert sent == told, "nothing comes behind the last piece"


async def test_a_stream_without_signs_of_life_has_its_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_head, "HEAD_AFTER_S", 0.0)
    sent, begun = list[bytes](), asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"head"))
        begun.set()

    async with stream_head.StreamHead(send, 0.0), asyncio.timeout(30):
        await begun.wait()
        for _ in range(10):
            await asyncio.sleep(0)
    assert sent == [b"head"]
