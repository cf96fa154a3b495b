"""With nothing else in flight, a step and its answer are one operation of gRPC's core."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from quire.protocol.outcomes import Result
from quire.protocol.steps import StepBuilder
from quire.session import call as session_call
from quire.session import exchange as exchanges

from tests.client.session_scene import Setting, allocate, set_periods, setting

SOON_S = 20.0


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that collects the kinds of messages that were sent and answered in one operation."""
    kinds: list[str] = []

    async def counting(call: Any, request: Any) -> Any:
        kinds.append(request.WhichOneof("message"))
        return await exchanges.exchange(call, request)

    monkeypatch.setattr(session_call, "exchange", counting)
    return kinds


def grow(token_count: int) -> StepBuilder:
    step = StepBuilder()
    step.grow(1, token_count)
    return step


def test_the_installed_grpc_is_one_that_was_looked_at() -> None:
    """With a newer gRPC release the client uses the public interface until a developer has checked the private one."""
    major, minor, *_ = version("grpcio").split(".")
    assert (int(major), int(minor)) == exchanges.LAST_KNOWN
    assert exchanges.IS_OFFERED


async def test_steps_that_are_waited_for_are_exchanged_for_their_answers(exchanged: list[str]) -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        exchanged.clear()  # The first step may not be exchanged, because a read may still be in flight.
        for token_count in range(7, 12):
            assert (await scene.session.step(grow(token_count))).grows[0].result is Result.OK
        assert exchanged.count("step") == 5


async def test_steps_that_are_submitted_ahead_are_written_while_answers_are_read(exchanged: list[str]) -> None:
    async with setting() as scene:
        answers = [await scene.session.submit(allocate(number)) for number in range(1, 5)]
        assert [(await answer).grows[0].result for answer in answers] == [Result.OK] * 4
        assert "step" not in exchanged
        await scene.session.step(grow(7))
        await scene.session.step(grow(8))
        exchanged.clear()
        answers = [await scene.session.submit(grow(token_count)) for token_count in range(9, 12)]
        assert [(await answer).grows[0].token_count for answer in answers] == [9, 10, 11]
        assert "step" not in exchanged


async def test_a_stream_that_ends_while_nothing_is_asked_is_left_at_once(exchanged: list[str]) -> None:
    async with setting() as scene:
        assert scene.service is not None
        await scene.session.step(allocate(1))
        await scene.session.step(grow(7))
        assert exchanged
        scene.break_stream()
        async with asyncio.timeout(SOON_S):
            while scene.service.attach_count < 2:
                await asyncio.sleep(0)
        assert (await scene.session.step(grow(8))).grows[0].result is Result.OK


async def test_an_answer_whose_caller_was_cancelled_is_still_read(exchanged: list[str]) -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        await scene.session.step(grow(7))
        exchanged.clear()
        step = asyncio.create_task(scene.session.step(grow(8)))
        async with asyncio.timeout(SOON_S):
            while not exchanged:
                await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        async with asyncio.timeout(SOON_S):
            ((_, outcome),) = await scene.session.missed()
        assert outcome.grows[0].token_count == 8
        assert scene.service is not None
        assert scene.service.attach_count == 1


@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("seed", range(3))
async def test_any_order_of_steps_is_answered_and_both_sides_agree(
    seed: int, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats come in between, and streams break."""
    monkeypatch.setattr(exchanges, "IS_OFFERED", offered)
    set_periods(monkeypatch, 0.01)
    dice = random.Random(seed)
    async with setting() as scene, asyncio.timeout(SOON_S):
        held, ids = list[int](), itertools.count(1)
        for _ in range(150):
            await one_thing(scene, dice, held, ids)
        while scene.session.unanswered_count:
            await asyncio.sleep(0)
        assert scene.session.disagreement_count == 0
        assert list(scene.session.ledger.sequences) == sorted(scene.pool.sequences) == held
        for sequence_id, sequence in scene.session.ledger.sequences.items():
            assert [list(table) for table in sequence.tables] == [
                list(table) for table in scene.pool.tables(scene.pool.sequences[sequence_id])
            ]


async def one_thing(scene: Setting, dice: random.Random, held: list[int], ids: Iterator[int]) -> None:
    assert scene.service is not None
    if dice.random() < 0.05:
        scene.break_stream()
    if dice.random() < 0.05:
        scene.service.replies_to_lose += 1
    if dice.random() < 0.1:
        scene.session._owner.heartbeat()
        await scene.session._flush()
    steps = []
    for _ in range(dice.choice([1, 1, 1, 3])):
        step = StepBuilder()
        if len(held) > 2:
            step.free(held.pop(dice.randrange(len(held))))
        held.append(next(ids))
        step.allocate(held[-1], dice.randint(1, 9))
        steps.append(step)
    if len(steps) == 1:
        await scene.session.step(steps[0])
        return
    for answer in [await scene.session.submit(step) for step in steps]:
        await answer
