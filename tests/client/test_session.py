"""Tests the owner's part of the Session stream on a real allocator with connections that break in many ways."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from quire import InvalidArgumentError, QuireError, Reason
from quire.errors import FailedPreconditionError, InternalError, retry_after_s_of
from quire.events import BlocksStored, IndexCleared, SnapshotEnd
from quire.protocol.outcomes import Result
from quire.protocol.packing import pack_uint32
from quire.protocol.steps import StepBuilder
from quire.session import SessionLostError
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.pool import Pool
from quire_allocator.core.refusal import Refusal

from tests.client.session_scene import SPEC, allocate, set_periods, setting


async def test_a_step_is_applied_and_its_answer_read() -> None:
    async with setting() as scene:
        step = allocate(1)
        step.allocate(2, 100, [])
        step.allocate(9, 3)
        outcome = await scene.session.step(step)
        assert [grown.result for grown in outcome.grows] == [Result.OK, Result.TOO_LONG, Result.OK]
        assert [list(grown.blocks[0]) for grown in outcome.grows] == [[0, 1], [], [2]]
        assert outcome.free_block_count == 13
        step = StepBuilder()
        step.commit(1, 6, [b"d" * 32])
        step.fork(1, 10)
        step.grow(10, 7)
        step.free(77)
        outcome = await scene.session.step(step)
        assert outcome.commits == outcome.forks == [Result.OK]
        assert outcome.frees == [Result.NOT_FOUND]
        assert outcome.copies == [(1, 3)]


async def test_a_duplicate_digest_is_told_as_a_swap() -> None:
    async with setting() as scene:
        step = allocate(1)
        step.allocate(2, 6, [])
        await scene.session.step(step)
        step = StepBuilder()
        step.commit(1, 6, [b"d" * 32])
        step.commit(2, 6, [b"d" * 32])
        outcome = await scene.session.step(step)
        assert outcome.swaps == [(2, 0, 0, 0)]


async def test_a_lost_answer_is_asked_for_again_and_the_step_applied_once() -> None:
    async with setting() as scene:
        assert scene.service is not None
        scene.service.replies_to_lose = 1
        outcome = await scene.session.step(allocate(1))
        assert outcome.grows[0].result is Result.OK
        assert scene.pool.blocks.free_count == 14
        assert scene.service.attach_count == 2
        assert (await scene.session.step(allocate(2))).grows[0].result is Result.OK
        assert scene.pool.granted_block_count == 4


async def test_a_stream_that_ended_between_steps_is_resumed() -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        for number in range(2, 6):
            scene.break_stream()
            assert (await scene.session.step(allocate(number))).grows[0].result is Result.OK
        assert sorted(scene.pool.sequences) == [1, 2, 3, 4, 5]


async def test_an_allocator_that_starts_anew_is_told_what_the_pages_hold_and_goes_on() -> None:
    async with setting() as scene:
        before = (await scene.session.step(allocate(1))).grows[0].blocks[0]
        await scene.stop_allocator()
        await scene.start_allocator()
        assert (await scene.session.step(allocate(2))).grows[0].result is Result.OK
        assert scene.session.connected
        assert sorted(scene.pool.sequences) == [1, 2]
        assert scene.pool.tables(scene.pool.sequences[1])[0] == before


async def test_an_allocator_that_will_not_have_our_report_is_told_as_a_lost_session_and_then_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise Refusal("MALFORMED", "not this one")

    async with setting() as scene:
        await scene.session.step(allocate(1))
        await scene.stop_allocator()
        await scene.start_allocator()
        with monkeypatch.context() as patch:
            patch.setattr("quire_allocator.session.staged_report.StagedReport.add", refuse)
            with pytest.raises(SessionLostError):
                await scene.session.step(allocate(2))
        assert (await scene.session.step(allocate(3))).grows[0].result is Result.OK
        assert scene.session.connected
        assert list(scene.pool.sequences) == [3]


async def test_while_no_allocator_answers_the_step_waits_and_says_why() -> None:
    async with setting() as scene:
        await scene.stop_allocator()
        step = asyncio.create_task(scene.session.step(allocate(1)))
        while not scene.waits:
            await asyncio.sleep(0)
        assert not step.done()
        assert not scene.session.connected
        assert repr(scene.session) == f"<AsyncSession of pool {scene.session.pool}, not attached>"
        await scene.start_allocator()
        assert (await step).grows[0].result is Result.OK
        assert repr(scene.session) == f"<AsyncSession of pool {scene.session.pool}, attached>"


async def test_an_outage_that_is_longer_than_the_silence_of_a_stream_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_periods(monkeypatch, 0.05, 0.2)
    async with setting() as scene:
        await scene.stop_allocator()
        step = asyncio.create_task(scene.session.step(allocate(1)))
        async with asyncio.timeout(30):
            while len(scene.waits) < 4:  # Each entry of `waits` is a call that gave up waiting for a connection.
                await asyncio.sleep(0)
        await scene.start_allocator()
        async with asyncio.timeout(30):
            assert (await step).grows[0].result is Result.OK


async def test_several_steps_are_under_way_at_a_time_and_answered_in_order() -> None:
    async with setting() as scene:
        answers = [await scene.session.submit(allocate(number)) for number in range(1, 5)]
        outcomes = [await answer for answer in answers]
        assert [list(outcome.grows[0].blocks[0]) for outcome in outcomes] == [[0, 1], [2, 3], [4, 5], [6, 7]]


async def test_a_session_comes_back_no_earlier_than_the_allocator_says() -> None:
    async with setting() as scene:
        service = scene.service
        assert service is not None
        service.drain()
        while service.attach_count < 4:
            await asyncio.sleep(0)
        gaps = [later - earlier for earlier, later in pairwise(service.attached_at[1:])]
        delay_s = retry_after_s_of(Reason.DRAINING)
        assert delay_s is not None
        assert min(gaps) >= delay_s
        assert {error.retry_after_s for error in scene.waits} == {delay_s}


async def test_steps_under_way_survive_an_allocator_that_starts_anew_before_it_answers() -> None:
    async with setting() as scene:
        assert scene.service is not None
        await scene.session.step(allocate(1))
        scene.service.replies_to_lose = 1
        answers = [await scene.session.submit(allocate(number)) for number in (2, 3)]
        await scene.stop_allocator()
        await scene.start_allocator()
        assert [(await answer).grows[0].result for answer in answers] == [Result.OK, Result.OK]
        assert sorted(scene.pool.sequences) == [1, 2, 3]


async def test_a_process_that_stood_still_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    set_periods(monkeypatch, 0.02, 0.2)
    async with setting() as scene:
        assert scene.service is not None
        await scene.session.step(allocate(1))
        for _ in range(3):
            end = time.monotonic() + 0.4  # blocks the event loop for 0.4 s; a stream may be silent for 0.2 s
            while time.monotonic() < end:
                pass
            assert (await scene.session.step(StepBuilder())).free_block_count == 14
        assert scene.service.attach_count == 1


async def test_a_cancelled_step_ends_at_once() -> None:
    async with setting() as scene:
        step = asyncio.create_task(scene.session.step(allocate(1)))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert not scene.session.connected


async def test_a_refused_step_is_the_callers_error_and_the_session_goes_on() -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        wrong = StepBuilder()
        wrong.commit(1, 6, [])
        with pytest.raises(InvalidArgumentError, match="0 digests for 1 newly full blocks") as caught:
            await scene.session.step(wrong)
        assert caught.value.reason is Reason.MALFORMED
        assert (await scene.session.step(allocate(2))).grows[0].result is Result.OK
        assert scene.session.report_count == 1, "the one that began the session: the pool was there all the time"


async def test_a_session_that_is_closed_right_after_a_refused_step_gives_the_pool_back() -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        wrong = StepBuilder()
        wrong.commit(1, 6, [])
        with pytest.raises(InvalidArgumentError):
            await scene.session.step(wrong)
        await scene.session.close()
        async with scene.client.session("test", SPEC) as other:
            assert (await other.step(allocate(1))).grows[0].result is Result.OK


async def test_a_specification_that_cannot_be_managed_is_refused_at_once() -> None:
    async with setting() as scene:
        session = scene.client.session("other", SPEC)
        session.spec.groups.add(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=6)
        with pytest.raises(FailedPreconditionError, match="multiple of the smallest") as caught:
            await session.open()
        assert caught.value.reason is Reason.LAYOUT
        await session.close()


async def test_what_the_last_step_of_a_quiet_owner_did_is_acknowledged_by_its_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_periods(monkeypatch, 0.01)
    async with setting() as scene:
        await scene.session.step(allocate(1))
        async with scene.client.watch_events("test") as events:
            assert [type(await anext(events)) for _ in range(2)] == [IndexCleared, SnapshotEnd]
            step = StepBuilder()
            step.commit(1, 6, [b"d" * 32])
            await scene.session.step(step)
            stored = await anext(events)
        assert isinstance(stored, BlocksStored)
        assert (stored.step, stored.digests) == (2, (b"d" * 32,))


async def test_an_answer_that_does_not_fit_the_step_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with setting() as scene:
        assert scene.service is not None

        def apply_step(_pool: Pool, _arrays: Any, reply: packed.StepReply) -> None:
            reply.granted_grows = pack_uint32([7])

        with monkeypatch.context() as patch:
            patch.setattr("quire_allocator.wire.step_apply.apply_step", apply_step)
            with pytest.raises(InternalError, match="the answer to step 1 does not match the step"):
                await scene.session.step(allocate(1))
        assert not scene.session.connected


async def test_a_number_that_fits_no_field_is_refused_before_anything_is_sent() -> None:
    async with setting() as scene:
        with pytest.raises(ValueError, match="token_count must be an integer from"):
            await scene.session.step(allocate(1, -1))
        assert scene.session.connected
        assert (await scene.session.step(allocate(1))).grows[0].result is Result.OK


async def test_closing_gives_the_pool_back_and_another_owner_may_have_it() -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        rival_waits: list[QuireError] = []
        rival = scene.client.session("test", SPEC, on_wait=rival_waits.append)
        opening = asyncio.create_task(rival.open())
        while not rival_waits:
            await asyncio.sleep(0)
        assert rival_waits[0].reason is Reason.POOL_OWNED
        await scene.session.close()
        await opening
        assert (await rival.step(allocate(1))).grows[0].result is Result.OK
        await rival.close()
