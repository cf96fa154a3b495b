"""Connections that die without a word, as where a NAT forgot them: both sides notice within seconds."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import psutil
from quire import Allocator, AsyncAllocator, PoolSpec
from quire.errors import QuireError
from quire.events import CacheEvent

from tests.faults.scene import Place, Proxy

SPEC = PoolSpec.full_attention(block_count=64, block_size=16)
NOTICED_S = 30.0  # 10 of a client, 15 of a server, and a busy machine


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
    session = owner.session("p", SPEC, transport="calls")
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
                except QuireError:  # as long as the connection is believed in
                    await asyncio.sleep(0)

        async with asyncio.timeout(NOTICED_S):
            await answered()
            while len(heard) == before[0] or len(threads) == before[1]:
                await asyncio.wait(following, timeout=0.05)
            while connections(place) > believed:  # the dead ones, beside the new ones
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
