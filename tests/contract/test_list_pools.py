"""ListPools lists each pool exactly once, however many pages the pools and their names take."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from quire import AsyncAllocator, Reason
from quire.errors import from_rpc_error
from quire.protocol.limits import MESSAGE_BYTES_MAX
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits

from tests.allocator.service.harness import RunningAllocator, refused, running_allocator, spec


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator(pools_max=400, check_invariants=False) as running:
        yield running


async def open_pools(allocator: RunningAllocator, count: int, declared: pb.PoolSpec) -> list[str]:
    names = [f"pool-{number:03}" for number in range(count)]
    for name in reversed(names):
        request = pb.OpenSessionRequest(version=3, request_id=name, pool=name, spec=declared)
        await allocator.stub.OpenSession(request)
    return names


async def pages(allocator: RunningAllocator, page_size: int = 0) -> list[pb.ListPoolsResponse]:
    request, seen = pb.ListPoolsRequest(page_size=page_size), []
    while not seen or request.page_token:
        seen.append(await allocator.stub.ListPools(request))
        request.page_token = seen[-1].next_page_token
    return seen


@pytest.mark.parametrize(("page_size", "sizes"), [(0, [256, 3]), (1000, [256, 3]), (100, [100, 100, 59])])
async def test_a_page_has_as_many_pools_as_were_asked_for(
    allocator: RunningAllocator, page_size: int, sizes: list[int]
) -> None:
    names = await open_pools(allocator, limits.POOLS_PER_PAGE_MAX + 3, spec())
    seen = await pages(allocator, page_size)
    assert [len(page.pools) for page in seen] == sizes
    assert [pool.pool for page in seen for pool in page.pools] == names


async def test_pools_of_many_groups_and_quotas_are_told_in_several_pages(allocator: RunningAllocator) -> None:
    declared = spec(group_count=limits.GROUPS_MAX)
    for number in range(limits.QUOTAS_MAX):
        declared.quotas.add(namespace=f"tenant {number}", held_blocks_max=5)
    names = await open_pools(allocator, 100, declared)
    seen = await pages(allocator)
    assert len(seen) > 1
    assert max(page.ByteSize() for page in seen) < MESSAGE_BYTES_MAX
    async with AsyncAllocator(allocator.address) as client:
        assert [pool.pool for pool in await client.list_pools()] == names
        assert not (await client.list_pools())[0].spec.quotas
        assert len((await client.get_pool(names[0])).spec.quotas) == limits.QUOTAS_MAX


async def test_a_page_goes_on_after_a_pool_that_is_gone(allocator: RunningAllocator) -> None:
    await open_pools(allocator, 4, spec())
    first = await allocator.stub.ListPools(pb.ListPoolsRequest(page_size=2))
    gone = allocator.service.directory.pool("pool-001")
    await allocator.stub.CloseSession(pb.CloseSessionRequest(session_id=gone.session_id))
    second = await allocator.stub.ListPools(pb.ListPoolsRequest(page_token=first.next_page_token))
    assert [pool.pool for pool in second.pools] == ["pool-002", "pool-003"]
    assert not second.next_page_token


@pytest.mark.parametrize("token", ["pool-001", "!!", "cG9vbC0", "w6Q=", "IA=="])
async def test_a_token_that_was_not_given_is_refused(allocator: RunningAllocator, token: str) -> None:
    with refused(Reason.MALFORMED, "page_token") as caught:
        await allocator.stub.ListPools(pb.ListPoolsRequest(page_token=token))
    assert from_rpc_error(caught.value).field == "page_token"
