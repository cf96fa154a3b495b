"""Tests an owner with an allocator that refuses messages that are too large, or refuses the owner."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest
from grpc import StatusCode
from quire import AsyncAllocator, InvalidArgumentError, Reason, ResourceExhaustedError
from quire.protocol.outcomes import Result
from quire.protocol.steps import StepBuilder
from quire.session.owner import PoolOwner
from quire.session.pool_session import BACKOFF_S
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.machine import SessionMachine

from tests.client.session_scene import SPEC, allocate, setting


async def test_a_step_of_more_than_the_allocator_takes_is_refused_before_anything_changes() -> None:
    async with setting() as scene:
        assert scene.service is not None
        limits = scene.session.limits
        large, many = StepBuilder(), StepBuilder()
        large.allocate(2, 6, bytes(32 * 70_000))  # the digests exceed the size limit of a message
        for _ in range(limits.operations_per_step_max + 1):
            many.free(1)
        under_way = await scene.session.submit(allocate(1))
        for step, said in (
            (large, rf"the step has 22400\d\d bytes, but the allocator accepts at most {limits.step_bytes_max}"),
            (
                many,
                f"the step has 16385 operations, but the allocator accepts at most {limits.operations_per_step_max}",
            ),
        ):
            with pytest.raises(ResourceExhaustedError, match=said) as caught:
                await scene.session.step(step)
            assert caught.value.reason is Reason.TOO_LARGE
            assert scene.session.connected
        assert (await under_way).grows[0].result is Result.OK
        assert (await scene.session.step(allocate(2))).grows[0].result is Result.OK
        assert scene.service.attach_count == 1


async def test_the_largest_step_that_is_not_refused_here_is_taken() -> None:
    async with setting() as scene:
        limits = scene.session.limits
        step, spare = StepBuilder(), 64 << 10
        step.allocate(1, 1, bytes((limits.step_bytes_max - spare) // 32 * 32))
        while True:
            step.allocate(1 + step.operation_count, 1, b"", f"{step.operation_count:x>64}")
            if step.message.ByteSize() > limits.step_bytes_max - 140:
                break
        most = step.message.ByteSize()
        assert limits.step_bytes_max - 140 < most < limits.step_bytes_max - 29
        assert len((await scene.session.step(step)).grows) == step.operation_count
        step = StepBuilder()
        step.allocate(1 << 32, 1, bytes(limits.step_bytes_max // 32 * 32))
        with pytest.raises(ResourceExhaustedError):
            await scene.session.step(step)


async def test_a_step_that_never_gets_through_is_tried_again_with_pauses() -> None:
    async with setting() as scene:
        await scene.stop_allocator()
        # The server accepts fewer bytes than it announces.
        await scene.start_allocator(("grpc.max_receive_message_length", 4_000))
        assert scene.service is not None
        large = StepBuilder()
        large.allocate(1, 6, bytes(32 * 200))
        waiting = asyncio.create_task(scene.session.step(large))
        async with asyncio.timeout(30):
            while len(scene.waits) < 8:
                await asyncio.sleep(0)
        gaps = [later - earlier for earlier, later in pairwise(scene.service.attached_at)]
        assert min(gaps) >= BACKOFF_S[0]
        assert [error.code for error in scene.waits[-4:]] == [StatusCode.RESOURCE_EXHAUSTED] * 4
        assert scene.waits[-1].reason is None
        assert not waiting.done()
        waiting.cancel()


async def test_a_session_that_was_open_and_is_refused_goes_on_when_it_is_let_in_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = [Reason.TOKEN, Reason.VERSION, Reason.LAYOUT, Reason.POOL_FORBIDDEN, Reason.MALFORMED, Reason.TOKEN]
    current = reasons[0]

    def refuse(*_: object) -> None:
        raise Refusal(current, "not this one")

    async with setting() as scene:
        before = (await scene.session.step(allocate(1))).grows[0].blocks[0]
        await scene.stop_allocator()
        await scene.start_allocator()
        with monkeypatch.context() as patch:
            patch.setattr(SessionMachine, "_attach", refuse)
            step = asyncio.create_task(scene.session.step(allocate(2)))
            for current in reasons:
                first = len(scene.waits)
                async with asyncio.timeout(30):
                    while [error.reason for error in scene.waits[first:]].count(current) < 3:
                        await asyncio.sleep(0)
                assert not scene.session.connected
                assert not step.done()
        assert (await step).grows[0].result is Result.OK
        assert sorted(scene.pool.sequences) == [1, 2]
        assert scene.pool.tables(scene.pool.sequences[1])[0] == before
    said = [record.getMessage() for record in caplog.records if "refuses this pool" in record.getMessage()]
    assert [next(reason for reason in reasons if f"/ {reason}:" in line) for line in said] == reasons


async def test_an_owner_says_that_it_lives_three_times_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = list[float]()
    original = PoolOwner.heartbeat

    def heartbeat(owner: PoolOwner) -> None:
        beats.append(time.monotonic())
        original(owner)

    monkeypatch.setattr(PoolOwner, "heartbeat", heartbeat)
    # Heartbeats follow the lease: 16 of them, one a second, would exceed the timeout.
    async with setting(lease_s=0.3), asyncio.timeout(10):
        while len(beats) < 16:
            await asyncio.sleep(0)
    assert min(later - earlier for earlier, later in pairwise(beats)) > 0.09


@pytest.mark.parametrize("window", [0, -1, 2**32])
async def test_a_window_that_no_step_fits_is_refused_at_once(window: int) -> None:
    async with AsyncAllocator("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=f"window must be from 1 to 8 steps, not {window}$"):
            client.session("p", SPEC, window=window)


async def test_a_window_that_is_too_wide_for_the_allocator_is_refused_by_it() -> None:
    async with setting() as scene:
        async with scene.client.session("widest", SPEC, window=8) as session:
            await session.step(StepBuilder())
        session = scene.client.session("wide", SPEC, window=9)
        with pytest.raises(InvalidArgumentError, match="window must be from 1 to 8"):
            await session.open()
