"""A free that asks to keep its sequence's published blocks, over the stream of a running allocator."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from quire import AsyncAllocator, GroupKind, GroupSpec, PoolSpec
from quire.errors import Reason
from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import RunningAllocator, StreamOwner, d, refused, running_allocator
from tests.allocator.service.one_by_one import calls

SPEC = PoolSpec(16, (GroupSpec(GroupKind.FULL_ATTENTION, 4),))


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


async def test_a_kept_prefix_stays_for_its_time_by_the_allocators_clock(allocator: RunningAllocator) -> None:
    async with AsyncAllocator(allocator.address) as client, calls(client, "a", SPEC) as session:
        numbers = iter(range(1, 100))

        async def leave(letters: str, keep_ms: int = 0) -> None:
            number, count = next(numbers), 4 * len(letters)
            done = await session.allocate(number, count + 1, d(letters))
            await session.commit(number, count, d(letters)[8 * done.matched_token_count :])
            await session.free(number, keep_ms=keep_ms)

        async def matched(letters: str) -> int:
            return sum([match.matched_token_count for match in await client.match_prefix(d(letters))])

        await leave("abcd", keep_ms=5_000)
        for stranger in ("efghij", "klmnop", "qrstuv"):
            await leave(stranger)
        assert await matched("abcd") == 16
        allocator.pass_time(5.0)
        for stranger in ("ABCDEF", "GHIJKL", "MNOPQR"):
            await leave(stranger)
        assert await matched("abcd") == 0


@pytest.mark.parametrize(
    ("frees", "field"),
    [
        (pb.FreePhase(sequences=[1], keep_ms=[1, 2]), "frees.keep_ms"),
        (pb.FreePhase(sequences=[1], keep_ms=[1], keep_token_counts=[1, 2]), "frees.keep_token_counts"),
        (pb.FreePhase(keep_token_counts=[1]), "frees.keep_token_counts"),
    ],
    ids=["more times than frees", "more counts than frees", "counts of no free"],
)
async def test_columns_of_another_length_are_refused(
    allocator: RunningAllocator, frees: pb.FreePhase, field: str
) -> None:
    owner = await StreamOwner.ready(allocator)
    with refused(Reason.MALFORMED, field.removeprefix("frees.")):
        await owner.step(frees=frees)
