"""Tests faulty owners on a real allocator: they commit uncomputed tokens, free wrongly, never release holds, send
messages that are too large, are silent or too fast."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest
import pytest_asyncio
from quire import AsyncAllocator
from quire.errors import QuireError, Reason, from_rpc_error
from quire.hashing import block_digests
from quire.protocol.outcomes import Result
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession
from quire.session.call import SessionStub
from quire.v1 import allocator_pb2 as pb

from tests.faults.scene import Name, Owner, attached, flood, named, pool_of, report
from tests.simulation.histories import pool_spec

ROOT = b"r" * 32
TOKENS = list(range(32))
BLOCK_SIZE = 4

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def name(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Name]:
    async with named(tmp_path_factory.mktemp("allocators")) as started:
        yield started


def step_of(*operations: tuple[object, ...]) -> StepBuilder:
    """Returns a step of operations such as `("allocate", ...)` and `("commit", ...)`."""
    step = StepBuilder()
    for verb, *arguments in operations:
        getattr(step, str(verb))(*arguments)
    return step


async def matched(name: Name, tokens: list[int], namespace: str = "") -> int:
    """Returns how many tokens of a prompt any pool has published."""
    async with AsyncAllocator(name.place.address) as client:
        found = await client.match_prefix(block_digests(ROOT, tokens, BLOCK_SIZE), namespace)
        return max((match.matched_token_count for match in found), default=0)


async def held_block_count(name: Name) -> int:
    return sum(state > 1 for state in (await pool_of(name.place, "pool")).block_states)


async def refusal(owner: Owner, step: StepBuilder) -> Reason | None:
    with pytest.raises(QuireError) as caught:
        await owner.session.step(step)
    return caught.value.reason


async def test_what_was_granted_but_never_computed_is_not_found(name: Name) -> None:
    digests = block_digests(ROOT, TOKENS, BLOCK_SIZE)
    async with attached(name, kinds="full") as owner:
        await owner.session.step(step_of(("allocate", 1, 16, digests[:4])))
        assert await matched(name, TOKENS) == 0
        beyond = await owner.session.step(step_of(("commit", 1, 32, digests)))
        assert beyond.commits == [Result.TOO_LONG]
        assert await matched(name, TOKENS) == 0
        await owner.session.step(step_of(("commit", 1, 16, digests[:4])))
        # This empty step acknowledges the commit, and only then the event is sent.
        await owner.session.step(StepBuilder())
        assert await matched(name, TOKENS) == 16
        await owner.check(name.place)


async def test_tenants_do_not_find_each_others_digests(name: Name) -> None:
    digests = block_digests(ROOT, TOKENS, BLOCK_SIZE)
    async with attached(name, kinds="full") as owner:
        await owner.session.step(step_of(("allocate", 1, 32, digests, "one")))
        await owner.session.step(step_of(("commit", 1, 32, digests)))
        await owner.session.step(StepBuilder())
        assert [await matched(name, TOKENS, space) for space in ("one", "two", "")] == [32, 0, 0]
        other = await owner.session.step(step_of(("allocate", 2, 32, digests, "two")))
        assert other.grows[0].matched_token_count == 0
        await owner.check(name.place)


async def test_frees_that_are_wrong_are_answered_and_change_nothing(name: Name) -> None:
    async with attached(name, kinds="full") as owner:
        await owner.session.step(step_of(("allocate", 1, 20), ("allocate", 2, 20)))
        wrong = await owner.session.step(step_of(("free", 99), ("free", 1), ("free", 1)))
        assert wrong.frees == [Result.NOT_FOUND, Result.OK, Result.NOT_FOUND]
        assert await held_block_count(name) == 5
        assert (await owner.session.step(step_of(("grow", 1, 24)))).grows[0].result is Result.NOT_FOUND
        await owner.check(name.place)


async def test_messages_that_are_too_large_are_refused_and_nobody_else_notices(name: Name) -> None:
    async with attached(name, kinds="full") as owner, attached(name, pool="other", kinds="full") as other:
        await owner.session.step(step_of(("allocate", 1, 20)))
        huge = step_of(("allocate", 2, 20, b"d" * 32 * 40_000))  # the digests take 1.28 MB; a message may have 1 MiB
        assert await refusal(owner, huge) is Reason.TOO_LARGE
        async with AsyncAllocator(name.place.address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client._stub.MatchPrefix(pb.MatchPrefixRequest(digests=b"d" * (3 << 20)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await owner.session.step(step_of(("grow", 1, 24)))
        await other.step()
        await owner.check(name.place)
        await other.check(name.place)


async def test_steps_that_are_unanswered_are_few_and_answers_kept_no_longer_than_needed(name: Name) -> None:
    async with attached(name, kinds="full") as owner:
        answers = [asyncio.create_task(owner.session.step(step_of(("allocate", number, 1)))) for number in range(1, 41)]
        most = 0
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(0)
            most = max(most, owner.session.unanswered_count)
        assert 1 < most <= 4
        await owner.check(name.place)
    async with AsyncAllocator(name.place.address) as client:
        wide = AsyncSession(SessionStub(client._link.channel), "wide", pool_spec("full", 64), window=9)
        with pytest.raises(QuireError, match="window"):
            await wide.open()


async def test_callers_that_say_nothing_are_ended_and_cost_owners_nothing(name: Name) -> None:
    host, port = name.place.address.rsplit(":", 1)
    async with attached(name, kinds="full") as owner, AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncAllocator(name.place.address))
        silent = [client._stub.Session() for _ in range(30)]
        writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(30)]
        slow = list[float]()
        readings = [asyncio.create_task(_end_of(call)) for call in silent]
        while not all(reading.done() for reading in readings):
            started = time.monotonic()
            await owner.step()
            slow.append(time.monotonic() - started)
        report("a step beside 30 silent streams and 30 silent connections", slow)
        assert {await reading for reading in readings} == {Reason.IDLE}
        for writer in writers:
            writer.close()
        await owner.check(name.place)


async def _end_of(call: grpc.aio.StreamStreamCall) -> Reason | None:  # type: ignore[type-arg]
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return None


async def test_a_pool_that_floods_leaves_the_others_their_turn(name: Name) -> None:
    async with attached(name, kinds="full") as owner, attached(name, pool="flood", kinds="full", seed=2) as flooder:
        quiet = await _steps(owner)
        flooding = asyncio.create_task(flood(flooder))
        beside = await _steps(owner)
        flooding.cancel()
        report("a step without a flood", quiet)
        report("a step beside a pool that floods", beside)
        await owner.check(name.place)
        await asyncio.wait([flooding])


async def _steps(owner: Owner) -> list[float]:
    seconds = []
    for _ in range(100):
        started = time.monotonic()
        await owner.step()
        seconds.append(time.monotonic() - started)
    return seconds
