"""Junctions, other stops and largest chunks over gRPC: by unary calls, by steps, and after a report.

Blocks have 16 tokens; a group of states makes a checkpoint every 1,024 tokens, so only stops matter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from quire import AsyncAllocator, GroupKind, GroupSpec, PoolSpec
from quire.errors import Reason
from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import Result
from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import RunningAllocator, d, refused, running_allocator
from tests.allocator.service.one_by_one import calls

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16)
SLIDING = GroupSpec(GroupKind.SLIDING_WINDOW, 16, window=64)
STATE = GroupSpec(GroupKind.STATE, 1024)
SHARED = "abcd"


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


@pytest.fixture
async def client(allocator: RunningAllocator) -> AsyncIterator[AsyncAllocator]:
    async with AsyncAllocator(allocator.address) as connected:
        yield connected


def step_of(*operations: tuple[str, tuple[object, ...], dict[str, object]]) -> StepBuilder:
    step = StepBuilder()
    for name, arguments, options in operations:
        getattr(step, name)(*arguments, **options)
    return step


async def test_by_unary_calls_the_second_prompt_is_told_and_the_third_hits(client: AsyncAllocator) -> None:
    async with calls(client, "a", PoolSpec(64, (FULL, STATE))) as session:
        seen = []
        for number, letters in enumerate(("abcdwx", "abcdyz", "abcduv"), 1):
            done = await session.allocate(number, 96, d(letters))
            seen.append((done.matched_token_count, done.attended_token_count))
            until = done.attended_token_count
            if until:
                await session.commit(number, until, d(letters)[: 2 * until], keep_token_count=until)
                assert (await session.grow(number, 96)).ok
            known = until or done.matched_token_count
            assert (await session.commit(number, 96, d(letters)[2 * known :])).ok
            await session.free(number)
        assert seen == [(0, 0), (0, 64), (64, 0)]


async def test_a_router_is_told_of_a_pool_that_serves_nothing_yet_but_its_junction(
    client: AsyncAllocator,
) -> None:
    async with (
        calls(client, "a", PoolSpec(64, (FULL, STATE))) as bare,
        calls(client, "b", PoolSpec(64, (FULL, STATE))) as ready,
    ):
        for session in (bare, ready):
            await session.allocate(1, 80)
            if session is ready:
                await session.commit(1, 64, d(SHARED), keep_token_count=64)
                await session.grow(1, 80)
                await session.commit(1, 80, d("abcdw")[4 * 32 :])
            else:
                await session.commit(1, 80, d("abcdw"))
        matches = await client.match_prefix(d("abcdyz"))
        assert matches == (("b", 64, 0), ("a", 0, 64))


async def test_by_steps_the_junction_and_the_early_end_survive_an_allocator_that_lost_the_pool(
    allocator: RunningAllocator, client: AsyncAllocator
) -> None:
    session = client.session("a", PoolSpec(64, (FULL, STATE), retention="auto", chunk_token_count_max=96))
    await session.open()

    async def done(*operations: tuple[str, tuple[object, ...], dict[str, object]]) -> StepOutcome:
        return await session.step(step_of(*operations))

    (first,) = (await done(("allocate", (1, 96, d("abcdwx")), {}))).grows
    assert first.stops[:3] == (64, 80, 112)  # 112 is a stop of the answer
    await done(("commit", (1, 96, d("abcdwx")), {}))
    (told,) = (await done(("allocate", (2, 96, d("abcdyz")), {}))).grows
    assert (told.matched_token_count, told.attended_token_count) == (0, 64)
    before = allocator.service.directory.pool("a")
    stops = [sequence.turn.token_counts for sequence in before.pool.sequences.values()]
    assert [own[:2] for own in stops] == [(64, 80), (64, 80)]

    before.stream.end("SESSION_UNKNOWN", "lost on purpose")  # type: ignore[union-attr]
    allocator.service.sessions.drop(before)
    await done(("commit", (2, 64, d("abcd")), {"keep_token_count": 64}), ("grow", (2, 96), {}))
    after = allocator.service.directory.pool("a")
    assert after is not before
    assert [sequence.turn.token_counts for sequence in after.pool.sequences.values()] == stops
    assert (after.spec.retention, after.spec.chunk_token_count_max) == ("auto", 96)
    (hit,) = (await done(("allocate", (3, 96, d("abcduv")), {}))).grows
    assert (hit.matched_token_count, hit.attended_token_count) == (64, 0)
    summary = await client.get_pool("a")
    assert (summary.spec.retention, summary.spec.chunk_token_count_max) == ("auto", 96)
    await session.close()


async def test_a_prompt_whose_passes_will_not_fit_is_refused_before_it_begins(client: AsyncAllocator) -> None:
    for block_count in range(38, 43):
        spec = PoolSpec(block_count, (FULL, SLIDING), chunk_token_count_max=128)
        async with calls(client, f"announced-{block_count}", spec) as session:
            # The prompt needs 32 blocks of full attention, and 13 of a window of 64 in passes of 128: 45.
            assert (await session.allocate(1, 16, prompt_token_count=512)).result is Result.TOO_LONG


async def test_a_pass_that_is_too_long_says_by_how_much_and_a_smaller_one_is_granted(
    client: AsyncAllocator,
) -> None:
    letters = [chr(33 + number) for number in range(32)]
    digests = b"".join(letter.encode().ljust(32, b".") for letter in letters)
    async with calls(client, "a", PoolSpec(40, (FULL, SLIDING))) as session:
        assert (await session.allocate(1, 512)).result is Result.PASS_TOO_LONG
        assert (await session.allocate(1, 16, prompt_token_count=512)).ok
        await session.commit(1, 16, digests[:32])
        # In one pass the prompt needs 32 + 32 blocks, because the window has given none back. The pool has 40.
        refused_pass = await session.grow(1, 512)
        assert (refused_pass.result, refused_pass.shortfall) == (Result.PASS_TOO_LONG, 24)
        done = 16
        while done < 512:
            until = min(512, done + 48)
            assert (await session.grow(1, until)).ok
            await session.commit(1, until, digests[2 * done : 2 * until])
            done = until
        assert (await session.grow(1, 641)).result is Result.TOO_LONG  # full attention alone needs 41 of 40 blocks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"retention": "sparse"}, "retention 'sparse' is not known: use one of auto, dense"),
        ({"chunk_token_count_max": 1 << 25}, "chunk_token_count_max must be from 0 to 16,777,216, not 33,554,432"),
    ],
)
async def test_a_retention_or_a_largest_chunk_that_nobody_knows_is_refused(
    allocator: RunningAllocator, fields: dict[str, object], message: str
) -> None:
    group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=16)
    pool = pb.PoolSpec(block_count=8, groups=[group], **fields)  # type: ignore[arg-type]
    with refused(Reason.MALFORMED, message):
        await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="open", pool="a", spec=pool))
