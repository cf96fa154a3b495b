"""When a server says when to retry, unary calls, streams and watches wait that long, in both flavors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import grpc
import pytest
from quire import Allocator, AsyncAllocator, AsyncClient, Client, Reason, UnavailableError
from quire.errors import retry_after_s_of

from tests.client.servers import ScriptedServer, refusing, scripted_server

DELAY_S = retry_after_s_of(Reason.DRAINING)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


async def status(address: str) -> None:
    with Client(address) as client:
        client.status()


async def status_async(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.status()


async def generate(address: str) -> None:
    with Client(address) as client:
        client.generate("a")


async def generate_async(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.generate("a")


async def watch(address: str) -> None:
    with Allocator(address) as client:
        next(client.watch_events("p"))


async def watch_async(address: str) -> None:
    async with AsyncAllocator(address) as client:
        await anext(client.watch_events("p"))


CALLS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "unary": ("GetStatus", status),
    "unary, asyncio": ("GetStatus", status_async),
    "stream": ("Generate", generate),
    "stream, asyncio": ("Generate", generate_async),
    "watch": ("WatchEvents", watch),
    "watch, asyncio": ("WatchEvents", watch_async),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_is_repeated_no_earlier_than_the_server_says(server: ScriptedServer, kind: str) -> None:
    method, call = CALLS[kind]
    asked_at: list[float] = []
    refuse = refusing(Reason.DRAINING)

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        asked_at.append(time.monotonic())
        return refuse(request, context)

    server.answers[method] = answer
    with pytest.raises(UnavailableError) as raised:
        await call(server.address)
    assert raised.value.retry_after_s == DELAY_S == 0.25
    assert len(asked_at) == 4
    assert min(later - earlier for earlier, later in pairwise(asked_at)) >= DELAY_S
