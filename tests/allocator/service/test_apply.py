"""Numbers of a unary session's steps: a reply is repeated, never a step, and no step gets the reply to another step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from quire.errors import Reason
from quire.protocol.steps import StepBuilder
from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import (
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    commits,
    d,
    grows,
    refused,
    running_allocator,
    spec,
    state,
)
from tests.allocator.service.test_service import blocks_view, summary


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


async def test_a_repeated_step_is_answered_again_and_not_applied_again(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    steps = [
        {"grows": grows((1, 6, d("a")))},
        {"commits": commits((1, 6, d("a")))},
        {"forks": pb.ForkPhase(parents=[1], children=[2])},
        {"grows": grows((2, 9, b""))},
        {"frees": pb.FreePhase(sequences=[1])},
        {"drops": [pb.CacheDrop()]},
        {},
    ]
    for number, phases in enumerate(steps, 1):
        step = owner.message(ack=number - 1, **phases)
        first = await owner.apply(step)
        assert (first.number, first.session_id) == (number, owner.session_id)
        before = await blocks_view(allocator)
        assert before.summary.last_step == number
        assert await owner.apply(step) == first
        assert await blocks_view(allocator) == before


async def test_a_number_used_for_another_step_is_a_mismatch(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.allocate(1, 6)
    before = await blocks_view(allocator)
    for phases in ({"grows": grows((1, 7, b""))}, {"frees": pb.FreePhase(sequences=[1])}, {}):
        with refused(Reason.STEP_MISMATCH):
            await owner.apply(owner.message(1, **phases))
    assert await blocks_view(allocator) == before


async def test_a_step_that_is_neither_the_next_nor_the_last_one_is_a_gap(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    first = owner.message(grows=grows((1, 6, b"")))
    await owner.apply(first)
    await owner.apply(owner.message())
    for step in (first, owner.message(4)):
        with refused(Reason.STEP_GAP):
            await owner.apply(step)
    assert (await summary(allocator)).last_step == 2


async def test_of_equal_steps_at_the_same_time_one_is_applied_and_all_get_its_reply(
    allocator: RunningAllocator,
) -> None:
    owner = await UnaryOwner.open(allocator)
    step = owner.message(grows=grows((1, 6, b"")))
    replies = await asyncio.gather(*(owner.apply(step) for _ in range(20)))
    assert all(reply == replies[0] for reply in replies)
    assert (await summary(allocator)).held_block_count == 2


async def test_a_reply_is_kept_no_longer_than_its_session(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    step = owner.message(grows=grows((1, 6, b"")))
    await owner.apply(step)
    allocator.pass_time(10.1)
    with refused(Reason.SESSION_UNKNOWN):
        await owner.apply(step)
    again = await UnaryOwner.open(allocator)
    assert (await again.allocate(1, 24)).ok


async def test_only_the_last_step_and_its_reply_are_kept(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    for number in range(1, 20):
        await owner.allocate(number, 1, d("abcdefg"))
        await owner.free(number)
    assert len(allocator.service.directory.pool("a").steps._kept) == 1


async def test_a_renewal_is_no_step_and_may_come_between_a_step_and_its_repetition(
    allocator: RunningAllocator,
) -> None:
    owner = await UnaryOwner.open(allocator)
    step = owner.message(grows=grows((1, 6, b"")))
    first = await owner.apply(step)
    allocator.pass_time(9)
    renewed = await owner.renew()
    assert (renewed.number, renewed.free_block_count) == (0, 6)
    allocator.pass_time(9)
    assert await owner.apply(step) == first


async def test_opening_again_says_where_the_session_is(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.allocate(5, 1)
    await owner.free(5)
    request = pb.OpenSessionRequest(version=3, request_id="open a", pool="a", spec=spec())
    opened = await allocator.stub.OpenSession(request)
    assert (opened.session_id, opened.next_step, opened.last_sequence_id) == (owner.session_id, 3, 5)


async def test_a_step_of_all_phases_does_what_it_does_on_a_stream(allocator: RunningAllocator) -> None:
    unary, stream = await UnaryOwner.open(allocator, "unary"), await StreamOwner.ready(allocator, "stream")
    steps = [
        StepBuilder().allocate(1, 6, d("a")).allocate(2, 4),
        StepBuilder().commit(1, 6, d("a")).free(2).fork(1, 3).grow(3, 7).allocate(4, 5, d("a")),
        StepBuilder().free(1).drop().allocate(5, 40).grow(3, 8),
    ]
    for operations in steps:
        message = pb.Step.FromString(operations.message.SerializeToString())
        phases = {field.name: value for field, value in message.ListFields()}
        told, expected = await unary.apply(unary.message(**phases)), await stream.step(**phases)
        told.session_id = expected.session_id
        assert told == expected
    assert await state(allocator, "unary") == await state(allocator, "stream")
