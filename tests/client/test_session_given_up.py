"""Tests abandoned calls: cancelled steps, and sessions that do not open in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from quire import AsyncAllocator, InvalidArgumentError, PoolSpec, UnavailableError
from quire.protocol.outcomes import Result, StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import AnswersMissedError, SessionLostError
from quire.session.answers import Answers
from quire_allocator.core.refusal import Refusal

from tests.allocator.service.harness import running_allocator
from tests.client.session_scene import Setting, allocate, setting

POOL = PoolSpec.full_attention(block_count=16, block_size=4)
SOON_S = 10.0


async def test_the_answer_to_a_step_whose_caller_was_cancelled_is_to_be_taken_before_anything_else() -> None:
    async with setting() as scene:
        step = allocate(1)
        stepping = asyncio.create_task(scene.session.step(step))
        while not scene.session.unanswered_count:
            await asyncio.sleep(0)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        with pytest.raises(AnswersMissedError):
            await scene.session.submit(allocate(2))
        ((missed, outcome),) = await scene.session.missed()
        assert missed is step
        assert [list(grown.blocks[0]) for grown in outcome.grows] == [[0, 1]]
        assert await scene.session.missed() == []
        assert [list(grown.blocks[0]) for grown in (await scene.session.step(allocate(2))).grows] == [[2, 3]]


async def test_answers_whose_callers_were_cancelled_are_given_in_the_order_of_their_steps() -> None:
    async with setting() as scene:
        await scene.stop_allocator()
        answers = [await scene.session.submit(allocate(number)) for number in (1, 2, 3)]
        answers[0].cancel()
        answers[2].cancel()
        await scene.start_allocator()
        assert (await answers[1]).grows[0].sequence_id == 2
        assert [outcome.grows[0].sequence_id for _, outcome in await scene.session.missed()] == [1, 3]


async def test_an_answer_that_comes_in_the_moment_in_which_its_caller_is_cancelled_is_kept() -> None:
    answers, step = Answers(), allocate(1)
    pending, outcome = answers.expect(1, step), StepOutcome([], [], [], [], [], [], 5)

    async def wait() -> StepOutcome:
        return await pending

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    answers.take(1, outcome)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(AnswersMissedError):
        answers.check(None)
    assert answers.missed() == [(step, outcome)]
    answers.check(None)


async def test_an_answer_that_comes_while_its_step_is_still_being_submitted_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with setting() as scene:
        flush = scene.session._flush

        async def stuck() -> None:
            await flush()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(scene.session, "_flush", stuck)
            submitting = asyncio.create_task(scene.session.submit(allocate(1)))
            while not scene.session.ledger.sequences:
                await asyncio.sleep(0)
            submitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await submitting
        ((_, outcome),) = await scene.session.missed()
        assert outcome.grows[0].result is Result.OK


async def test_a_refusal_that_nobody_has_looked_at_is_told_before_another_step_is_sent() -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        wrong = StepBuilder()
        wrong.commit(1, 6, [])
        for is_looked_at in (False, True):
            refused, after = await scene.session.submit(wrong), await scene.session.submit(allocate(2))
            await asyncio.wait([refused, after])
            if is_looked_at:
                with pytest.raises(InvalidArgumentError):
                    await after
            else:
                with pytest.raises(InvalidArgumentError):
                    await scene.session.submit(allocate(3))
            assert list(scene.pool.sequences) == [1]
        assert (await scene.session.step(allocate(4))).grows[0].result is Result.OK
        for failed in (refused, after):
            with pytest.raises(InvalidArgumentError):
                await failed
        assert (await scene.session.step(allocate(5))).grows[0].result is Result.OK


async def test_who_waits_for_the_window_only_is_cancelled_and_nothing_was_sent() -> None:
    async with setting() as scene:
        await scene.stop_allocator()
        for number in range(1, 5):
            await scene.session.submit(allocate(number))
        waiting = asyncio.create_task(scene.session.submit(allocate(9)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await scene.start_allocator()
        while scene.session.unanswered_count:
            await asyncio.sleep(0)
        assert await scene.session.missed() == []
        assert list(scene.session.ledger.sequences) == [1, 2, 3, 4]


async def lose(scene: Setting, patch: pytest.MonkeyPatch) -> None:
    """Replaces the allocator by one that refuses the owner's report."""

    def refuse(*_: Any) -> None:
        raise Refusal("MALFORMED", "not this one")

    await scene.stop_allocator()
    patch.setattr("quire_allocator.session.staged_report.StagedReport.add", refuse)
    await scene.start_allocator()


async def test_a_lost_session_is_told_also_where_the_caller_of_the_lost_step_was_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        with monkeypatch.context() as patch:
            await lose(scene, patch)
            (await scene.session.submit(allocate(2))).cancel()
            assert await asyncio.wait_for(scene.session.missed(), SOON_S) == []
        with pytest.raises(SessionLostError):
            await scene.session.submit(allocate(3))
        assert (await scene.session.step(allocate(4))).grows[0].result is Result.OK


async def test_what_is_submitted_before_the_loss_was_looked_at_is_not_for_the_new_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        with monkeypatch.context() as patch:
            await lose(scene, patch)
            lost = await scene.session.submit(allocate(2))
            await asyncio.wait([lost])
            with pytest.raises(SessionLostError):
                await scene.session.submit(allocate(3))
        with pytest.raises(SessionLostError):
            await lost
        assert (await scene.session.step(allocate(4))).grows[0].result is Result.OK
        assert list(scene.pool.sequences) == [4]


async def test_a_session_that_was_not_opened_in_time_does_not_take_the_pool_later() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        owner, late, third = (client.session("p", POOL) for _ in range(3))
        await owner.open()
        before = asyncio.all_tasks()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late.open(), 0.2)
        assert not {task for task in asyncio.all_tasks() - before if "AsyncSession" in repr(task)}
        assert len(client._link._others) == 2
        with pytest.raises(UnavailableError, match="closed"):
            await late.open()
        await owner.close()
        await asyncio.wait_for(third.open(), SOON_S)
        await third.close()


async def test_a_session_is_opened_once_and_takes_no_step_before() -> None:
    async with setting() as scene:
        with pytest.raises(RuntimeError, match="already open or was closed"):
            await scene.session.open()
        assert (await scene.session.step(allocate(1))).grows[0].result is Result.OK
        session = scene.client.session("other", POOL)
        with pytest.raises(RuntimeError, match="not been opened"):
            await session.submit(allocate(1))
        await session.close()


async def test_ids_are_new_or_known_as_the_operations_say() -> None:
    async with setting() as scene:
        unanswered = await scene.session.submit(allocate(1))
        twice = allocate(2)
        twice.allocate(2, 6)
        grown, live = StepBuilder(), StepBuilder()
        grown.grow(50, 6)
        live.grow(1, 7)
        for step, said in (
            (allocate(1), "new sequence must be above"),
            (twice, "new sequence must be above"),
            (grown, "does not exist yet"),
            (live, "does not exist yet"),
        ):
            with pytest.raises(ValueError, match=said):
                await scene.session.submit(step)
        assert (await unanswered).grows[0].result is Result.OK
        with pytest.raises(ValueError, match="new sequence must be above"):
            await scene.session.step(allocate(1))
        fork, grow = StepBuilder(), StepBuilder()
        fork.commit(1, 6, [b"d" * 32])
        fork.fork(1, 5)
        grow.grow(5, 9)
        unanswered = await scene.session.submit(fork)
        # The fork's answer is outstanding. If the fork were refused, the grow would create another sequence.
        with pytest.raises(ValueError, match="does not exist yet"):
            await scene.session.submit(grow)
        assert (await unanswered).forks == [Result.OK]
        assert (await scene.session.step(grow)).grows[0].result is Result.OK
        assert (await scene.session.step(allocate(6, 1_000))).grows[0].result is not Result.OK
        assert (await scene.session.step(allocate(6))).grows[0].result is Result.OK, "it was never created"


@pytest.mark.parametrize("digests", [[b"d" * 15, b"d" * 17], [b"d" * 31, b"d" * 33], b"d" * 33])
def test_digests_that_are_none_are_refused_where_they_are_given(digests: Any) -> None:
    with pytest.raises(ValueError, match="32"):
        StepBuilder().allocate(1, 16, digests)
