"""The owner and the allocator notice within seconds when a connection dies silently, for example because a NAT forgot
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc import aio
from quire import Allocator, AsyncAllocator, PoolSpec
from quire.errors import DeadlineExceededError, QuireError
from quire.events import CacheEvent
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire_allocator.limits import WATCHERS_MAX

from tests.allocator.service.one_by_one import calls
from tests.client.servers import endless, scripted_server
from tests.faults.http2_proxy import Http2Proxy
from tests.faults.scene import Place, Proxy
from tests.gateway.scene import curl, gateway, script

SPEC = PoolSpec.full_attention(block_count=64, block_size=16)
NOTICED_S = 30.0  # seconds: a client notices within 10, a server within 15; a busy machine may need 5 more

pytestmark = pytest.mark.timeout(240)


def connections(place: Place) -> int:
    """Returns how many clients the allocator counts."""
    found = psutil.Process(place.server.process.pid).net_connections("tcp")
    port = int(place.address.rpartition(":")[2])
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)


async def test_dead_connections_are_left_by_clients_of_either_kind_and_by_the_server(tmp_path: Path) -> None:
    place, proxy = Place(tmp_path), Proxy()
    await asyncio.gather(place.start(), proxy.start())
    proxy.target = place.address
    owner = Allocator(place.address)
    session = calls(owner, "p", SPEC)
    await asyncio.to_thread(session.open)
    client, watcher, threads = AsyncAllocator(proxy.address), AsyncAllocator(proxy.address), []
    heard: list[CacheEvent] = []
    waits: list[QuireError] = []
    events = watcher.watch_events("p", on_wait=waits.append)
    threads_client = Allocator(proxy.address)
    threads_events = threads_client.watch_events("p", on_wait=waits.append)
    numbers = itertools.count(1)

    def publish() -> None:
        number = next(numbers)
        digests = [bytes([number]) * 32]
        assert session.allocate(number, 16, digests).ok
        session.commit(number, 16, digests)
        session.free(number)

    async def follow() -> None:
        async for event in events:
            heard.append(event)

    def follow_in_thread() -> None:
        for event in threads_events:
            threads.append(event)

    following = [asyncio.create_task(follow()), asyncio.create_task(asyncio.to_thread(follow_in_thread))]
    try:
        await client.list_pools()
        await asyncio.to_thread(publish)
        async with asyncio.timeout(NOTICED_S):
            while len(heard) < 3 or len(threads) < 3:
                await asyncio.wait(following, timeout=0.05)
        believed = connections(place)
        proxy.strand()
        before = len(heard), len(threads)
        await asyncio.to_thread(publish)

        async def answered() -> None:
            while True:
                try:
                    await client.list_pools(timeout_s=5)
                    return
                except QuireError:  # Calls fail until the client gives up the dead connection.
                    await asyncio.sleep(0)

        async with asyncio.timeout(NOTICED_S):
            await answered()
            while len(heard) == before[0] or len(threads) == before[1]:
                await asyncio.wait(following, timeout=0.05)
            while connections(place) > believed:  # Dead connections count until the allocator closes them.
                await asyncio.wait(following, timeout=0.05)
        assert len(waits) >= 2
        assert max(events.age_s, threads_events.age_s) < NOTICED_S
    finally:
        await events.aclose()
        threads_events.close()
        await asyncio.gather(*following, return_exceptions=True)
        await asyncio.gather(client.close(), watcher.close())
        threads_client.close()
        await asyncio.to_thread(session.close)
        owner.close()
        await proxy.stop()
        place.stop()


async def test_places_of_watchers_that_vanished_are_free_again(tmp_path: Path) -> None:
    """The watchers take all places. Each is a separate caller, as on a node that lost its network."""
    place, proxy = Place(tmp_path), Proxy()
    await asyncio.gather(place.start(), proxy.start())
    proxy.target = place.address
    owner = AsyncAllocator(place.address)
    session = calls(owner, "p", SPEC)

    def watched(address: str) -> tuple[aio.Channel, Any]:
        channel = aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        return channel, pb_grpc.AllocatorServiceStub(channel).WatchEvents(pb.WatchEventsRequest(pool="p"))

    watchers = [watched(proxy.address) for _ in range(2 * WATCHERS_MAX)]
    channels = [channel for channel, _ in watchers]
    silent = asyncio.create_task(asyncio.Event().wait())
    try:
        await session.open()
        async with asyncio.timeout(60):
            first = [await events.read() for _, events in watchers]
        assert all(event.HasField("cleared") for event in first)

        async def answered() -> grpc.StatusCode | None:
            channel, events = watched(place.address)
            channels.append(channel)
            try:
                await events.read()
            except aio.AioRpcError as error:
                return error.code()
            return None

        assert await answered() is grpc.StatusCode.RESOURCE_EXHAUSTED
        proxy.strand()
        async with asyncio.timeout(2 * NOTICED_S):
            while (code := await answered()) is not None:
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                await asyncio.wait([silent], timeout=0.2)
    finally:
        silent.cancel()
        await session.close()
        await owner.close()
        await asyncio.gather(*(channel.close() for channel in channels))
        await proxy.stop()
        place.stop()


@contextlib.asynccontextmanager
async def proxied(address: str) -> AsyncIterator[Http2Proxy]:
    """Starts a proxy, and stops it also where the test fails: pytest would wait for its threads for ever."""
    proxy = Http2Proxy(address)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


async def test_silence_behind_a_proxy_that_answers_pings_is_noticed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.start()
    heard: list[CacheEvent] = []
    waits: list[QuireError] = []
    async with (
        contextlib.AsyncExitStack() as ending, proxied(place.address) as proxy,
        AsyncAllocator(place.address) as owner, AsyncAllocator(proxy.address) as client,
    ):  # fmt: skip
        ending.callback(place.stop)
        session = client.session("q", SPEC)
        await session.open()
        threads_client = Allocator(proxy.address)
        async with calls(owner, "p", SPEC):
            events = client.watch_events("p", on_wait=waits.append)
            threads_events = threads_client.watch_events("p", on_wait=waits.append)

            async def follow() -> None:
                async for event in events:
                    heard.append(event)

            def follow_in_thread() -> None:
                for event in threads_events:
                    heard.append(event)

            following = [asyncio.create_task(follow()), asyncio.create_task(asyncio.to_thread(follow_in_thread))]
            try:
                async with asyncio.timeout(2 * NOTICED_S):
                    while len(heard) < 4 or not session.connected:
                        await asyncio.wait(following, timeout=0.05)
                    proxy.strand()
                    with pytest.raises(DeadlineExceededError):
                        await client.list_pools(timeout_s=1)
                    while session.connected or len(waits) < 2:
                        await asyncio.wait(following, timeout=0.05)
                    assert all("sent nothing" in str(wait) for wait in waits), waits
                    proxy.let_through()
                    while not session.connected or max(events.age_s, threads_events.age_s) > 5:
                        await asyncio.wait(following, timeout=0.05)
            finally:
                await events.aclose()
                threads_events.close()
                await asyncio.gather(*following, return_exceptions=True)
        await session.close()
        threads_client.close()


async def test_a_gateway_gives_up_the_answers_of_a_worker_that_is_silent(tmp_path: Path) -> None:
    with scripted_server() as silent:
        script(silent)
        silent.answers["Generate"] = endless(silent)
        async with proxied(silent.address) as proxy:
            with gateway(tmp_path, "--worker", proxy.address) as process:
                body = {"prompt": "p", "max_tokens": 2, "stream": True}
                async with asyncio.timeout(2 * NOTICED_S):
                    while (await asyncio.to_thread(curl, process, "/readyz")).status != 200:
                        pass
                    asking = asyncio.create_task(asyncio.to_thread(curl, process, "/v1/completions", body=body))
                    while not silent.attempts["Generate"]:
                        await asyncio.wait([asking], timeout=0.05)
                    proxy.strand()
                    answer = await asking
        assert b"stopped answering" in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
