"""Route over gRPC: what owners register, by calls and by streams, and who gets a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from quire import AsyncAllocator, PoolSpec
from quire.errors import NotFoundError, Reason
from quire.protocol.features import ROUTE
from quire.types import RoutedWorker
from quire.v1 import allocator_pb2 as pb
from quire_allocator.metrics.collector import AllocatorCollector

from tests.allocator.service.harness import (
    DETACH,
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    commits,
    d,
    grows,
    refused,
    running_allocator,
    spec,
)


def worker(address: str, **fields: Any) -> pb.RoutedWorker:
    return pb.RoutedWorker(**{"address": address, "model": "m", "prefill_tokens_per_s": 1_000, **fields})


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


@pytest.fixture
async def client(allocator: RunningAllocator) -> AsyncIterator[AsyncAllocator]:
    async with AsyncAllocator(allocator.address) as connected:
        yield connected


async def opened(allocator: RunningAllocator, pool: str, **fields: Any) -> UnaryOwner:
    """Opens a pool by calls, or repeats that call, with a worker at `POOL:1`."""
    request = pb.OpenSessionRequest(
        version=3, request_id=pool, pool=pool, spec=spec(), worker=worker(f"{pool}:1", **fields)
    )
    return UnaryOwner(allocator, (await allocator.stub.OpenSession(request)).session_id)


def samples(allocator: RunningAllocator) -> dict[str, float]:
    """Returns the samples of routing above 0, by name and label."""
    families = AllocatorCollector(allocator.service.directory, allocator.service.counters).collect()
    every = [sample for family in families for sample in family.samples]
    names = ("quire_allocator_routes", "quire_allocator_reservations", "quire_allocator_routed_tokens")
    return {
        f"{sample.name} {next(iter(sample.labels.values()))}": sample.value
        for sample in every
        if sample.name.startswith(names) and sample.value
    }


async def test_a_prompt_goes_to_the_worker_that_computes_its_prefix(
    allocator: RunningAllocator, client: AsyncAllocator
) -> None:
    assert ROUTE in (await client.server_info()).features
    busy = await opened(allocator, "a")
    await busy.apply(busy.message(grows=grows((1, 9, d("uv")), (2, 9, d("st")), (3, 9, d("qr")))))
    owner = await opened(allocator, "b")
    await owner.apply(owner.message(grows=grows((1, 9, d("xy")))))
    route = await client.route("m", d("xyz"), 13)
    assert route == ("b", "b:1", 0, 8, 5, 8, True)
    await owner.apply(owner.message(commits=commits((1, 8, d("xy")))))
    assert await client.route("m", d("xyw"), 13, reservation_s=0.0) == ("b", "b:1", 8, 0, 5, 5, False)
    await owner.apply(owner.message(grows=grows((2, 13, d("xyz")))))
    assert samples(allocator) == {
        "quire_allocator_routes_total prefix": 2,
        "quire_allocator_reservations_total taken": 1,
        "quire_allocator_routed_tokens_total promised": 8,
        "quire_allocator_routed_tokens_total hit": 8,
    }


async def test_an_owner_of_a_stream_registers_changes_and_leaves(
    allocator: RunningAllocator, client: AsyncAllocator
) -> None:
    owner = StreamOwner(allocator)
    assert (await owner.attach(worker=worker("s:1"))).HasField("report_required")
    with refused(Reason.MODEL_UNKNOWN):  # the pool cannot be chosen before its owner has reported
        await allocator.stub.Route(pb.RouteRequest(model="m", prompt_token_count=1))
    await owner.report()
    assert (await client.route("m", b"", 1)).address == "s:1"
    heartbeat = pb.Heartbeat(worker=worker("s:2", adapters=["tuned"]))
    await owner.exchange(pb.SessionRequest(heartbeat=heartbeat))
    assert (await client.route("m", b"", 1, adapter="tuned")).address == "s:2"
    await owner.exchange(pb.SessionRequest(heartbeat=pb.Heartbeat(worker=worker("s:2", draining=True))))
    with pytest.raises(NotFoundError) as caught:
        await client.route("m", b"", 1)
    assert caught.value.reason == Reason.MODEL_UNKNOWN
    await owner.send(DETACH)
    await owner.call.read()
    assert samples(allocator)["quire_allocator_reservations_total lost"] == 2


async def test_a_session_registers_and_repeats_it_after_an_outage(
    allocator: RunningAllocator, client: AsyncAllocator
) -> None:
    async def heard(worker: RoutedWorker) -> None:
        async with asyncio.timeout(60):
            while (await client.get_pool("s")).worker != worker:
                pass

    session = client.session("s", PoolSpec.full_attention(block_count=8, block_size=4))
    first = RoutedWorker("s:1", "m", ("tuned",))
    session.register(first)
    async with session:
        assert (await client.get_pool("s")).worker == first
        assert [each.worker for each in await client.list_pools()] == [first]
        assert (await client.route("m", b"", 1)).address == "s:1"
        session.register(second := replace(first, prefill_tokens_per_s=7, draining=True))
        await heard(second)
        allocator.service.sessions.router.register("s", None)
        session._drop()  # drops the stream, as if the connection had broken
        await heard(second)
    await opened(allocator, "a")
    assert (await client.get_pool("a")).worker == RoutedWorker("a:1", "m", (), 1_000)


async def test_a_pool_without_a_worker_says_so(allocator: RunningAllocator, client: AsyncAllocator) -> None:
    async with client.session("s", PoolSpec.full_attention(block_count=8, block_size=4)):
        assert (await client.get_pool("s")).worker is None


async def test_a_repeated_opening_changes_what_is_known_of_a_worker(
    allocator: RunningAllocator, client: AsyncAllocator
) -> None:
    await opened(allocator, "a")
    await opened(allocator, "a", model="other")
    with pytest.raises(NotFoundError):
        await client.route("m", b"", 1)
    assert (await client.route("other", b"", 1)).pool == "a"


async def test_a_pool_whose_lease_ends_is_not_chosen_any_more(
    allocator: RunningAllocator, client: AsyncAllocator
) -> None:
    await opened(allocator, "a")
    assert (await client.route("m", b"", 1, excluded_pools=["b"])).pool == "a"
    allocator.pass_time(11.0)
    with pytest.raises(NotFoundError):
        await client.route("m", b"", 1)
    assert samples(allocator)["quire_allocator_reservations_total expired"] == 1


async def test_a_prompt_without_tokens_is_refused(allocator: RunningAllocator) -> None:
    with refused(Reason.MALFORMED, "prompt_token_count must be from 1 to"):
        await allocator.stub.Route(pb.RouteRequest(model="m"))
