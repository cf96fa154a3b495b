"""Specifications of pools that an allocator refuses, with the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from quire.errors import Reason
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits

from tests.allocator.service.harness import RunningAllocator, refused, running_allocator, spec


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


def pool_of(kind: pb.GroupKind.ValueType, block_size: int, **fields: int) -> pb.PoolSpec:
    group = pb.GroupSpec(kind=kind, block_size=block_size, **fields)
    return pb.PoolSpec(block_count=9, groups=[group])


WRONG_SPECS: list[tuple[pb.PoolSpec, Reason]] = [
    (pb.PoolSpec(), Reason.MALFORMED),
    (spec(block_count=0), Reason.MALFORMED),
    (spec(block_count=limits.BLOCKS_MAX + 1), Reason.MALFORMED),
    (spec(block_size=0), Reason.MALFORMED),
    (spec(block_size=limits.BLOCK_SIZE_MAX + 1), Reason.MALFORMED),
    (spec(group_count=0), Reason.MALFORMED),
    (spec(group_count=limits.GROUPS_MAX + 1), Reason.MALFORMED),
    (pb.PoolSpec(block_count=1, groups=spec().groups, cache_layout="é" * 129), Reason.MALFORMED),
    (pb.PoolSpec(block_count=1, groups=spec().groups, model_fingerprint=b"x" * 65), Reason.MALFORMED),
    (pb.PoolSpec(block_count=1, groups=[pb.GroupSpec(block_size=4)]), Reason.MALFORMED),
    (pool_of(pb.GROUP_KIND_SLIDING_WINDOW, 4), Reason.MALFORMED),  # a sliding window needs `window`
    (pool_of(pb.GROUP_KIND_CHUNKED_LOCAL, 4, window=limits.WINDOW_TOKENS_MAX + 1), Reason.MALFORMED),
    (pool_of(pb.GROUP_KIND_FULL_ATTENTION, 4, window=4), Reason.MALFORMED),
    (pb.PoolSpec(block_count=9, groups=[*spec(block_size=4).groups, *spec(block_size=6).groups]), Reason.LAYOUT),
    (pb.PoolSpec(block_count=9, groups=spec().groups, watermark_block_count=10), Reason.MALFORMED),
    (pb.PoolSpec(block_count=9, groups=spec().groups, eviction_policy="random"), Reason.MALFORMED),
    (pb.PoolSpec(block_count=9, groups=spec().groups, quotas=[pb.Quota(namespace="a")] * 2), Reason.MALFORMED),
    (pb.PoolSpec(block_count=9, groups=spec().groups, quotas=[pb.Quota(namespace="é" * 65)]), Reason.MALFORMED),
    (
        pb.PoolSpec(
            block_count=9,
            groups=spec().groups,
            quotas=[pb.Quota(namespace=str(i)) for i in range(limits.QUOTAS_MAX + 1)],
        ),
        Reason.MALFORMED,
    ),
]


@pytest.mark.parametrize(("wrong", "reason"), WRONG_SPECS, ids=range(len(WRONG_SPECS)))
async def test_a_specification_that_cannot_be_managed_is_refused(
    allocator: RunningAllocator, wrong: pb.PoolSpec, reason: Reason
) -> None:
    with refused(reason):
        await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="r", pool="a", spec=wrong))
    assert list((await allocator.stub.ListPools(pb.ListPoolsRequest())).pools) == []
