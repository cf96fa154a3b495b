"""Both sides notice within seconds when a connection dies silently, for example because a NAT forgot it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import psutil
import pytest
from quire import Allocator, AsyncAllocator, PoolSpec
from quire.errors import DeadlineExceededError, QuireError
from quire.events import CacheEvent

from tests.allocator.service.one_by_one import calls
from tests.client.servers import endless, scripted_server
from tests.faults.http2_proxy import Http2Proxy
from tests.faults.scene import Place, Proxy
from tests.gateway.scene import curl, gateway, script

SPEC = PoolSpec.full_attention(block_count=64, block_size=16)
NOTICED_S = 30.0  # seconds: 10 for a client, 15 for a server, 5 for a busy machine

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
            while connections(place) > believed:  # Until the allocator closes them, the dead connections count too.
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


async def test_silence_behind_a_proxy_that_answers_pings_is_noticed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.start()
    proxy = Http2Proxy(place.address)
    await proxy.start()
    heard: list[CacheEvent] = []
    waits: list[QuireError] = []
    async with AsyncAllocator(place.address) as owner, AsyncAllocator(proxy.address) as client:
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
                    assert all("said nothing" in str(wait) for wait in waits), waits
                    proxy.let_through()
                    while not session.connected or max(events.age_s, threads_events.age_s) > 5:
                        await asyncio.wait(following, timeout=0.05)
            finally:
                await events.aclose()
                threads_events.close()
                await asyncio.gather(*following, return_exceptions=True)
        await session.close()
        threads_client.close()
    await proxy.stop()
    place.stop()


async def test_a_gateway_gives_up_the_answers_of_a_worker_that_is_silent(tmp_path: Path) -> None:
    with scripted_server() as silent:
        script(silent)
        silent.answers["Generate"] = endless(silent)
        proxy = Http2Proxy(silent.address)
        await proxy.start()
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
        assert b"is silent" in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await proxy.stop()
