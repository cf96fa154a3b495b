"""Over unary calls, a session and an engine apply each step exactly once, even if the answer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import pytest
from quire import Allocator, AsyncAllocator, PoolSpec, Reason
from quire.errors import (
    AnswersMissedError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    QuireError,
    SessionLostError,
    UnavailableError,
)
from quire.protocol.steps import StepBuilder
from quire.session import AsyncCallSession, Result
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.ownership.directory import Ownership

from tests.allocator.service.harness import RunningAllocator, d, running_allocator
from tests.client.servers import scripted_server
from tests.faults.scene import Proxy

SPEC = PoolSpec.full_attention(block_count=16, block_size=4)


class Scene(NamedTuple):
    """An allocator behind a proxy, and a client of it."""

    allocator: RunningAllocator
    proxy: Proxy
    client: AsyncAllocator

    @property
    def pool(self) -> Ownership:
        return self.allocator.service.directory.pool("a")

    def session(self, **options: object) -> AsyncCallSession:
        """Returns a session of pool "a" that sends no calls by itself."""
        return self.client.session("a", SPEC, transport="calls", keep_alive=False, **options)  # type: ignore[call-overload, no-any-return]

    async def applied(self, number: int) -> None:
        """Waits until the allocator has applied a step."""
        async with asyncio.timeout(30):
            while self.pool.steps.next_step <= number:
                await asyncio.sleep(0)


@asynccontextmanager
async def setting() -> AsyncIterator[Scene]:
    proxy = Proxy()
    await proxy.start()
    try:
        async with running_allocator() as allocator:
            proxy.target = allocator.address
            async with AsyncAllocator(proxy.address) as client:
                yield Scene(allocator, proxy, client)
            proxy.let_through()
            proxy.cut()
    finally:
        await proxy.stop()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with setting() as made:
        yield made


async def lose_the_answer(scene: Scene, session: AsyncCallSession, step: StepBuilder, number: int) -> None:
    """Lets the allocator apply a step, and cuts the connection before the answer."""
    scene.proxy.swallow_replies()
    asked = asyncio.create_task(session.step(step))
    await scene.applied(number)
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    scene.proxy.cut()
    scene.proxy.let_through()


async def test_a_step_whose_connection_was_killed_before_its_answer_is_applied_once(scene: Scene) -> None:
    async with scene.session() as session:
        await session.step(StepBuilder().allocate(1, 6, d("a")))
        scene.proxy.swallow_replies()
        asked = asyncio.create_task(session.step(StepBuilder().commit(1, 6, d("a")).fork(1, 2).grow(2, 9)))
        await scene.applied(2)
        scene.proxy.cut()  # After the cut, gRPC repeats the call by itself.
        scene.proxy.let_through()
        outcome = await asked
        assert [*outcome.commits, *outcome.forks, outcome.grows[0].result] == [Result.OK] * 3
        assert scene.pool.steps.next_step == 3
        (table,) = outcome.grows[0].blocks
        assert list(table) == list(scene.pool.pool.tables(scene.pool.pool.sequences[2])[0])[-len(table) :]
        assert len(outcome.copies) == 1


async def test_a_lost_answer_comes_again_where_the_step_is_repeated_and_no_other_step_before(scene: Scene) -> None:
    async with scene.session() as session:
        await lose_the_answer(scene, session, StepBuilder().allocate(1, 6), 1)
        with pytest.raises(AnswersMissedError, match=r"step 1 of pool a .* repeat it with the same operations"):
            await session.step(StepBuilder().allocate(2, 6))
        await session.keep_alive()
        outcome = await session.step(StepBuilder().allocate(1, 6))
        assert [list(table) for table in outcome.grows[0].blocks] == [[0, 1]]
        assert (await session.step(StepBuilder().allocate(2, 6))).grows[0].result
        assert list(scene.pool.pool.sequences) == [1, 2]
        assert scene.pool.steps.next_step == 3


async def test_for_threads_a_step_is_repeated_after_its_deadline(scene: Scene) -> None:
    with Allocator(scene.proxy.address) as client:
        session = client.session("a", SPEC, transport="calls", keep_alive=False)
        await asyncio.to_thread(session.open)
        scene.proxy.swallow_replies()
        with pytest.raises(DeadlineExceededError):
            await asyncio.to_thread(session.step, StepBuilder().allocate(1, 6), timeout_s=0.2)
        scene.proxy.cut()
        scene.proxy.let_through()
        with pytest.raises(AnswersMissedError):
            await asyncio.to_thread(session.step, StepBuilder().free(1))
        outcome = await asyncio.to_thread(session.step, StepBuilder().allocate(1, 6))
        assert [list(table) for table in outcome.grows[0].blocks] == [[0, 1]]
        await asyncio.to_thread(session.close)


async def test_a_refused_step_says_which_field_and_its_number_is_used_again(scene: Scene) -> None:
    async with scene.session() as session:
        await session.step(StepBuilder().allocate(1, 8))
        with pytest.raises(InvalidArgumentError, match="0 digests for 2 newly full blocks") as raised:
            await session.step(StepBuilder().commit(1, 8))
        assert (raised.value.reason, raised.value.field) == (Reason.MALFORMED, "commits.digest_counts")
        assert (await session.step(StepBuilder().commit(1, 8, d("ab")))).commits == [Result.OK]
        assert scene.pool.steps.next_step == 3


async def test_ids_that_are_not_new_or_not_known_are_refused_before_anything_is_sent(scene: Scene) -> None:
    async with scene.session() as session:
        await session.step(StepBuilder().allocate(1, 4).allocate(3, 400))  # The second sequence does not fit.
        with pytest.raises(ValueError, match="sequence 3 does not exist yet"):
            await session.step(StepBuilder().grow(3, 8))
        with pytest.raises(ValueError, match="the id of a new sequence must be above 1"):
            await session.step(StepBuilder().allocate(1, 8))
        await session.step(StepBuilder().commit(1, 4, d("a")).fork(1, 2))
        assert (await session.step(StepBuilder().grow(2, 8))).grows[0].result
        assert scene.pool.steps.next_step == 4


async def test_steps_of_several_tasks_are_made_one_after_the_other(scene: Scene) -> None:
    async with scene.session() as session:
        outcomes = await asyncio.gather(*(session.step(StepBuilder().allocate(number, 4)) for number in range(1, 9)))
        assert [list(outcome.grows[0].blocks[0]) for outcome in outcomes] == [[number] for number in range(8)]


async def test_a_session_that_is_opened_by_the_same_request_again_goes_on_where_it_was(scene: Scene) -> None:
    async with scene.session(request_id="mine") as session:
        await session.step(StepBuilder().allocate(5, 4))
        again = scene.session(request_id="mine")
        await again.open()
        assert (await again.step(StepBuilder().grow(5, 8).allocate(6, 4))).grows[1].result
        with pytest.raises(ValueError, match="the id of a new sequence must be above 6"):
            await again.step(StepBuilder().allocate(4, 4))
        with pytest.raises(QuireError) as raised:  # The first session does not know of the step of `again`.
            await session.step(StepBuilder().free(5))
        assert raised.value.reason is Reason.STEP_MISMATCH


async def test_a_drop_by_another_is_told_with_the_next_step(scene: Scene) -> None:
    async with scene.session() as session:
        await session.step(StepBuilder().allocate(1, 4))
        await session.step(StepBuilder().commit(1, 4, d("a")).free(1))
        assert await scene.client.match_prefix(d("ab")) == (("a", 4, 0),)
        assert (await scene.client.drop_cache("a", "")).dropped_block_count == 1
        await session.keep_alive()
        (dropped,) = (await session.step(StepBuilder())).outside_drops
        assert (dropped.namespace, dropped.digests) == ("", b"")
        assert (await session.step(StepBuilder())).outside_drops == ()


def test_an_answer_to_another_step_or_with_other_columns_is_told() -> None:
    replies = [pb.StepReply(number=7), pb.StepReply(number=1, free_results=[1, 1])]
    with scripted_server() as server, Allocator(server.address) as client:
        server.answers["OpenSession"] = lambda *_: pb.OpenSessionResponse(session_id=bytes(16), next_step=1)
        server.answers["CloseSession"] = lambda *_: pb.CloseSessionResponse()
        server.answers["Apply"] = lambda *_: replies.pop(0)
        with client.session("a", SPEC, transport="calls", keep_alive=False) as session:
            with pytest.raises(InternalError, match="the answer to step 1 has the number of step 7"):
                session.step(StepBuilder())
            with pytest.raises(InternalError, match="the answer to step 1 does not match the step"):
                session.step(StepBuilder())


# -- an engine ---------------------------------------------------------------------------------------------------------


async def test_an_engine_repeats_a_step_whose_answer_was_lost(scene: Scene) -> None:
    waits: list[QuireError] = []
    async with scene.client.engine("a", SPEC, transport="calls", on_wait=waits.append) as engine:
        scene.proxy.swallow_replies()
        asked = asyncio.create_task(engine.admit(range(6)))
        await scene.applied(1)
        scene.proxy.cut()
        scene.proxy.let_through()
        text = await asked
        assert list(scene.pool.pool.sequences) == [text.id]
        assert scene.pool.steps.next_step == 2


async def test_an_engine_begins_anew_where_the_allocator_has_other_steps_of_it(scene: Scene) -> None:
    async with scene.client.engine("a", SPEC, transport="calls") as engine:
        await engine.admit(range(6))
        before = scene.pool
        # Another client sends step 2.
        await scene.allocator.stub.Apply(pb.Step(session_id=before.session_id, number=2))
        with pytest.raises(SessionLostError):
            await engine.admit(range(6))
        assert scene.pool is not before
        text = await engine.admit(range(6))
        assert list(scene.pool.pool.sequences) == [text.id]


async def test_a_step_that_is_refused_is_an_error_of_the_turn_that_made_it(scene: Scene) -> None:
    scene.allocator.service.sessions.check_invariants = False
    async with scene.client.engine("a", SPEC, transport="calls") as engine:
        with pytest.raises(QuireError) as raised:
            await engine.admit(range(6), namespace="n" * 200)
        assert raised.value.reason is Reason.MALFORMED
        assert not isinstance(raised.value, UnavailableError)
        assert (await engine.admit(range(6))).is_live
