"""Sessions over a real gRPC stream: attach, report, fence, resume, leases; with a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio
from quire.errors import Reason
from quire.protocol.limits import SILENCE_S
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits

from tests.allocator.service.harness import (
    DETACH,
    EMPTY_REPORT,
    HEARTBEAT,
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    grows,
    refused,
    running_allocator,
    spec,
    state,
)


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


# -- attach and report -------------------------------------------------------------------------------------------------


async def test_attach_report_ready(allocator: RunningAllocator) -> None:
    owner = StreamOwner(allocator)
    assert (await owner.attach()).HasField("report_required")
    ready = await owner.report(last_step=41)
    assert (len(ready.session_id), ready.next_step, ready.lease_ms) == (16, 42, 10_000)
    assert ready.limits.operations_per_step_max == limits.OPERATIONS_PER_STEP_MAX
    assert (await owner.step()).number == 42


async def test_a_pool_is_not_open_before_its_report(allocator: RunningAllocator) -> None:
    owner = StreamOwner(allocator)
    await owner.attach()
    with refused(Reason.POOL_UNKNOWN):
        await state(allocator)


WRONG_ATTACHES: list[tuple[dict[str, Any], Reason]] = [
    ({"version": 1}, Reason.VERSION),
    ({"version": 1, "spec": pb.PoolSpec()}, Reason.VERSION),
    ({"version": 4, "spec": pb.PoolSpec()}, Reason.VERSION),
    ({"incarnation": b"short"}, Reason.MALFORMED),
    ({"epoch": 0}, Reason.MALFORMED),
    ({"window": 0}, Reason.MALFORMED),
    ({"window": limits.WINDOW_MAX + 1}, Reason.MALFORMED),
    ({"pool": "no spaces"}, Reason.MALFORMED),
    ({"spec": pb.PoolSpec()}, Reason.MALFORMED),
    (
        {"spec": pb.PoolSpec(block_count=1, groups=[pb.GroupSpec(block_size=1)])},
        Reason.MALFORMED,
    ),
]


@pytest.mark.parametrize(("fields", "reason"), WRONG_ATTACHES, ids=range(len(WRONG_ATTACHES)))
async def test_a_wrong_attach_is_refused_and_takes_nothing(
    allocator: RunningAllocator, fields: dict[str, Any], reason: Reason
) -> None:
    with refused(reason):
        await StreamOwner(allocator).attach(**fields)
    await StreamOwner.ready(allocator)


@pytest.mark.parametrize("first", [HEARTBEAT, EMPTY_REPORT, DETACH, pb.SessionRequest()], ids=range(4))
async def test_the_first_message_must_be_attach(allocator: RunningAllocator, first: pb.SessionRequest) -> None:
    with refused(Reason.MALFORMED, "expected attach"):
        await StreamOwner(allocator).exchange(first)


async def test_a_stream_that_sends_no_attach_is_ended(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ATTACH_TIMEOUT_S", 0.01)
    with refused(Reason.IDLE):
        await StreamOwner(allocator).receive()


async def test_the_number_of_pools_is_limited() -> None:
    async with running_allocator(pools_max=1) as allocator:
        await StreamOwner.ready(allocator)
        with refused(Reason.LIMIT):
            await StreamOwner(allocator).attach(pool="b")


WRONG_REPORTS: list[tuple[pb.SessionRequest, Reason]] = [
    (pb.SessionRequest(report_chunk=pb.ReportChunk()), Reason.MALFORMED),
    (pb.SessionRequest(report_end=pb.ReportEnd(chunk_count=1)), Reason.MALFORMED),
    (
        pb.SessionRequest(report_end=pb.ReportEnd(last_step=limits.LAST_STEP_MAX + 1)),
        Reason.MALFORMED,
    ),
    (pb.SessionRequest(step=pb.Step()), Reason.MALFORMED),
    (DETACH, Reason.MALFORMED),
]


@pytest.mark.parametrize(("message", "reason"), WRONG_REPORTS, ids=range(len(WRONG_REPORTS)))
async def test_a_wrong_report_is_refused_and_opens_nothing(
    allocator: RunningAllocator, message: pb.SessionRequest, reason: Reason
) -> None:
    owner = StreamOwner(allocator)
    await owner.attach()
    with refused(reason):
        await owner.exchange(message)
    assert list((await allocator.stub.ListPools(pb.ListPoolsRequest())).pools) == []


async def test_a_failed_second_report_leaves_the_open_pool_and_shows_it_disconnected(
    allocator: RunningAllocator,
) -> None:
    first = await StreamOwner.ready(allocator)
    await first.step(grows=grows((1, 6, b"")))
    second = StreamOwner(allocator)
    await second.attach(epoch=2, spec=spec(block_count=99))
    with refused(Reason.MALFORMED):
        await second.exchange(pb.SessionRequest(report_chunk=pb.ReportChunk()))
    (pool,) = (await allocator.stub.ListPools(pb.ListPoolsRequest())).pools
    assert not pool.connected
    assert pool.spec == spec()
    assert pool.empty_block_count + pool.cached_block_count + pool.held_block_count == pool.spec.block_count


async def test_heartbeats_during_the_report_keep_the_claim(allocator: RunningAllocator) -> None:
    owner = StreamOwner(allocator)
    await owner.attach()
    allocator.pass_time(9)
    await owner.send(HEARTBEAT)
    await owner.report()
    allocator.pass_time(9)
    assert (await owner.step()).number == 1


# -- fencing, resuming, leases -----------------------------------------------------------------------------------------


async def test_while_a_report_is_awaited_the_server_says_by_itself_that_it_is_there(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_allocator.session.stream.HEARTBEAT_S", 0.01)
    owner = StreamOwner(allocator)
    assert (await owner.attach()).HasField("report_required")
    for _ in range(3):
        assert (await owner.receive()).HasField("heartbeat")
    await owner.send(EMPTY_REPORT)
    kinds = []
    while "ready" not in kinds:
        kinds.append((await owner.receive()).WhichOneof("message"))
    assert set(kinds) <= {"heartbeat", "ready"}
    await owner.send(DETACH)
    assert await owner.call.read() is aio.EOF  # no heartbeat follows


async def test_a_newer_attach_fences_the_older_stream(allocator: RunningAllocator) -> None:
    old = await StreamOwner.ready(allocator)
    new = StreamOwner(allocator)
    assert (await new.attach(epoch=2)).HasField("report_required")
    with refused(Reason.FENCED):
        await old.receive()
    await new.report()
    assert new.session_id != old.session_id
    assert (await new.step()).number == 1


@pytest.mark.parametrize("epoch", [1, 2])
async def test_an_attach_with_an_epoch_that_was_seen_is_fenced(allocator: RunningAllocator, epoch: int) -> None:
    await StreamOwner.ready(allocator)
    current = StreamOwner(allocator)
    await current.attach(epoch=2)
    with refused(Reason.FENCED):
        await StreamOwner(allocator).attach(epoch=epoch)
    await current.report()
    assert (await current.step()).number == 1


async def test_another_incarnation_is_refused_while_the_lease_lives(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    with refused(Reason.POOL_OWNED):
        await StreamOwner(allocator).attach(incarnation=b"2" * 16)
    with refused(Reason.POOL_OWNED):
        await UnaryOwner.open(allocator)
    assert (await owner.step()).number == 1


async def test_a_killed_stream_leaves_its_state_for_a_resume(allocator: RunningAllocator) -> None:
    killed = await StreamOwner.ready(allocator)
    await killed.step(grows=grows((1, 6, b"")))
    before = await state(allocator)
    killed.call.cancel()
    allocator.pass_time(9)
    resumed = StreamOwner(allocator)
    reply = await resumed.attach(epoch=2, resume_session=killed.session_id, last_step=1)
    assert (reply.resumed.session_id, reply.resumed.next_step) == (killed.session_id, 2)
    assert reply.resumed.lease_ms == 10_000
    assert await state(allocator) == before
    assert (await resumed.step(frees=pb.FreePhase(sequences=[1]))).free_block_count == 8


async def test_after_a_resume_unanswered_steps_are_answered_again_byte_for_byte(allocator: RunningAllocator) -> None:
    killed = await StreamOwner.ready(allocator)
    steps = [{"grows": grows((number, 6, b""))} for number in (1, 2, 3)]
    replies = [await killed.step(**step) for step in steps]
    killed.call.cancel()
    resumed = StreamOwner(allocator)
    await resumed.attach(epoch=2, resume_session=killed.session_id, last_step=1)
    assert [await resumed.step_as(number, **steps[number - 1]) for number in (2, 3)] == replies[1:]
    assert (await resumed.step(grows=grows((4, 6, b"")))).number == 4


async def test_any_other_session_id_does_not_resume_even_at_the_same_step(allocator: RunningAllocator) -> None:
    await StreamOwner.ready(allocator)
    other = StreamOwner(allocator)
    assert (await other.attach(epoch=2, resume_session=bytes(16))).HasField("report_required")


async def test_resuming_with_another_specification_is_refused(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    with refused(Reason.LAYOUT):
        await StreamOwner(allocator).attach(epoch=2, resume_session=owner.session_id, spec=spec(block_count=9))
    assert (await owner.step()).number == 1


async def test_heartbeats_are_answered_and_keep_the_lease(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    for _ in range(3):
        allocator.pass_time(9)
        assert (await owner.exchange(HEARTBEAT)).HasField("heartbeat")


async def test_a_silent_stream_loses_its_pool_and_is_told(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    allocator.pass_time(10.1)
    with refused(Reason.IDLE):
        await owner.receive()
    other = StreamOwner(allocator)
    assert (await other.attach(incarnation=b"2" * 16)).HasField("report_required")


async def test_an_owner_past_its_lease_is_ended_before_anybody_takes_its_pool(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    allocator.clock.now += 11  # the lease is over, but no check has run yet
    with refused(Reason.POOL_OWNED):
        await StreamOwner(allocator).attach(incarnation=b"2" * 16)
    allocator.service.expire_leases(allocator.clock.now)
    await StreamOwner(allocator).attach(incarnation=b"2" * 16)
    with refused(Reason.IDLE):
        await owner.step(grows=grows((1, 6, b"")))


async def test_detach_drops_the_pool_at_once(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.send(DETACH)
    await owner.hang_up()
    with refused(Reason.POOL_UNKNOWN):
        await state(allocator)
    await StreamOwner(allocator).attach(incarnation=b"2" * 16)


async def test_hanging_up_without_detach_keeps_the_pool_for_the_lease(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.hang_up()
    with refused(Reason.POOL_OWNED):
        await StreamOwner(allocator).attach(incarnation=b"2" * 16)


async def test_draining_ends_every_stream_whatever_it_waits_for(allocator: RunningAllocator) -> None:
    ready = await StreamOwner.ready(allocator, "a")
    reporting, new = StreamOwner(allocator), StreamOwner(allocator)
    await reporting.attach(pool="b")
    await new.call.wait_for_connection()
    # The answer to a unary call on the same connection shows that the server has seen the stream opened before it.
    await allocator.stub.ListPools(pb.ListPoolsRequest())
    allocator.service.drain()
    for owner in (ready, reporting, new):
        with refused(Reason.DRAINING):
            await owner.receive()


async def test_a_fenced_stream_whose_owner_takes_no_answers_loses_its_place(allocator: RunningAllocator) -> None:
    # each answer takes over a megabyte, and gRPC buffers one or two
    size, count = {"block_count": 400_000, "block_size": 1}, 8
    deaf = StreamOwner(allocator)
    await deaf.attach(spec=spec(**size), window=count)
    await deaf.report()
    for number in range(1, count + 1):
        frees = pb.FreePhase(sequences=[number - 1] if number > 1 else [])
        step = pb.Step(session_id=deaf.session_id, number=number, frees=frees, grows=grows((number, 390_000, b"")))
        await deaf.send(pb.SessionRequest(step=step))
    (machine,), written, since_s = allocator.service.sessions.streams, 1, 0.0
    async with asyncio.timeout(10 * SILENCE_S):
        while written == 1 or time.monotonic() - since_s < 0.5:  # until gRPC's buffers are full and an answer waits
            assert machine.owner is not None
            if written != machine.owner.steps.next_step:
                written, since_s = machine.owner.steps.next_step, time.monotonic()
            await asyncio.sleep(0)
    successor, begun_s = StreamOwner(allocator), time.monotonic()
    await successor.attach(epoch=2, spec=spec(**size))
    is_soon = time.monotonic() - begun_s < SILENCE_S  # otherwise the old stream may already have lost its place
    assert len(allocator.service.sessions.streams) == 2 or not is_soon, "its answer is under way"
    async with asyncio.timeout(3 * SILENCE_S):
        while len(allocator.service.sessions.streams) > 1:
            await asyncio.sleep(0)
