"""Tests the errors of calls and streams of clients that were closed before or during the calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from quire import Allocator, AsyncAllocator, AsyncClient, Client, PoolSpec, UnavailableError
from quire.events import SnapshotEnd

from tests.allocator.service.harness import running_allocator
from tests.client.servers import endless, scripted_server

NOBODY = "127.0.0.1:1"


async def says_so_when_closed(client: AsyncAllocator | AsyncClient, stream: AsyncIterator[Any]) -> None:
    """Closes the client while another task reads the stream; expects an error that says so."""

    async def read() -> Any:
        return await anext(stream)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(UnavailableError, match="closed"):
        await reading


async def test_calls() -> None:
    client = AsyncAllocator(NOBODY)
    calling = asyncio.create_task(client.list_pools())
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(UnavailableError):
        await calling
    with pytest.raises(UnavailableError, match="closed"):
        await client.list_pools()


async def test_a_text_that_is_being_streamed_and_one_that_is_asked_for_later() -> None:
    with scripted_server() as server:
        server.answers["Generate"] = endless(server)
        client = AsyncClient(server.address)
        stream = client.stream("x", max_tokens=5)
        await stream.__anext__()
        await says_so_when_closed(client, stream)
        with pytest.raises(UnavailableError, match="closed"):
            await client.generate("x")


async def test_events_that_are_being_watched_and_a_watch_that_begins_later() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as owner:
        session = owner.session("watched", PoolSpec.full_attention(block_count=16, block_size=4))
        await session.open()
        client = AsyncAllocator(allocator.address)
        stream = client.watch_events("watched")
        while not isinstance(await stream.__anext__(), SnapshotEnd):
            pass
        await says_so_when_closed(client, stream)
        with pytest.raises(UnavailableError, match="closed"):
            await client.watch_events("watched").__anext__()
        await session.close()


async def test_a_task_that_is_cancelled_while_it_reads_is_told_of_that() -> None:
    with scripted_server() as server:
        server.answers["Generate"] = endless(server)
        async with AsyncClient(server.address) as client:
            stream = client.stream("x", max_tokens=5)
            await stream.__anext__()
            reading = asyncio.create_task(stream.__anext__())
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading


def test_calls_and_streams_of_threads() -> None:
    allocator, worker = Allocator(NOBODY), Client(NOBODY)
    allocator.close()
    worker.close()
    for call in (allocator.list_pools, lambda: allocator.watch_events("p"), lambda: worker.generate("x")):
        with pytest.raises(UnavailableError, match="closed"):
            call()
