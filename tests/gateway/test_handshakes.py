"""Tests TLS handshakes that never end, on the event loops of asyncio and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from quire_gateway import handshakes
from quire_gateway.handshakes import TlsListener

from tests.security.certificates import quire_certs

HALF = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"  # the first bytes of a ClientHello
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handshakes") / "certs"
    quire_certs(folder)
    return folder


@contextlib.asynccontextmanager
async def listening(certs: Path, handshakes_max: int) -> AsyncIterator[tuple[int, TlsListener]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "server.pem", certs / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = TlsListener(listener, Echo, context, handshakes_max)
        try:
            yield listener.getsockname()[1], door
        finally:
            door.close()
            await asyncio.wait_for(door.wait_closed(), 60)


async def half_shaken(port: int) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HALF)
    return reader, writer


async def assert_ended(connection: Connection) -> None:
    reader, writer = connection
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def assert_served(port: int, certs: Path) -> None:
    trusting = ssl.create_default_context(cafile=certs / "ca.pem")
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost"), 60
    )
    writer.write(b"hello")
    assert await asyncio.wait_for(reader.readexactly(5), 60) == b"hello"
    writer.close()


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine on an event loop of this kind."""

    def run_on_it(scene: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(scene)

    return run_on_it


def test_a_new_connection_ends_the_oldest_handshake_and_is_served(
    run: Callable[[Coroutine[Any, Any, None]], None], certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 600.0)  # Only `handshakes_max` ends a handshake here.

    async def scene() -> None:
        async with listening(certs, handshakes_max=4) as (port, _):
            silent = [await half_shaken(port) for _ in range(3)]
            for index in range(3):
                silent.append(await half_shaken(port))
                await assert_served(port, certs)
                await assert_ended(silent[index])
            for reader, writer in silent[3:]:
                assert not reader.at_eof()
                writer.close()

    run(scene())


def test_handshakes_that_finish_count_no_more(
    run: Callable[[Coroutine[Any, Any, None]], None], certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 600.0)

    async def scene() -> None:
        async with listening(certs, handshakes_max=2) as (port, _):
            silent = await half_shaken(port)
            for _ in range(5):
                await assert_served(port, certs)
            assert not silent[0].at_eof()
            silent[1].close()

    run(scene())


def test_a_handshake_has_a_deadline(
    run: Callable[[Coroutine[Any, Any, None]], None], certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.2)

    async def scene() -> None:
        async with listening(certs, handshakes_max=4) as (port, _):
            await assert_ended(await half_shaken(port))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await assert_ended((reader, writer))

    run(scene())


def test_closing_ends_handshakes(
    run: Callable[[Coroutine[Any, Any, None]], None], certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 600.0)

    async def scene() -> None:
        async with listening(certs, handshakes_max=4) as (port, door):
            await assert_served(port, certs)
            silent = await half_shaken(port)
            await assert_served(port, certs)  # The previous connection was accepted, too.
            door.close()
            await asyncio.wait_for(door.wait_closed(), 60)
            await assert_ended(silent)

    run(scene())
