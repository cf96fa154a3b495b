"""Requests that reach the limits on drops and on the first block id; see `limit_cases.py`."""

from __future__ import annotations

from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import RunningAllocator, StreamOwner, spec
from tests.allocator.service.limit_cases import last, open_pool


async def first_block(allocator: RunningAllocator, number: int) -> None:
    declared = spec()
    declared.first_block_id = number
    declared.features.append("first-block-id")
    await open_pool(allocator, declared)


async def drops_of_a_step(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    last()
    await owner.step(drops=[pb.CacheDrop(namespace=f"n{each}") for each in range(number)])


async def keep_ms_of_a_free(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    last()
    await owner.step(frees=pb.FreePhase(sequences=[1], keep_ms=[number]))


async def breakpoints_of_a_grow(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    grows = pb.GrowPhase(sequences=[1], token_counts=[4])
    grows.breakpoints.counts.append(number)
    grows.breakpoints.token_counts.extend(range(1, number + 1))
    last()
    await owner.step(grows=grows)


async def drops_of_others(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    for each in range(number):
        last()
        await allocator.stub.DropCache(pb.DropCacheRequest(pool="a", drop=pb.CacheDrop(namespace=f"n{each}")))
    assert len((await owner.step()).outside_drops) == number


async def digests_of_drops_of_others(allocator: RunningAllocator, number: int) -> None:
    await StreamOwner.ready(allocator)
    for digests in (bytes(32 * 24), bytes(32 * (number - 24))):
        last()
        await allocator.stub.DropCache(pb.DropCacheRequest(pool="a", drop=pb.CacheDrop(namespace="", digests=digests)))
