"""What an owner does where its allocator does not take what it sends, or does not take it at all."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from grpc import StatusCode
from quire import Reason, ResourceExhaustedError
from quire.session import BACKOFF_S
from quire.steps import Result, StepBuilder

from tests.client.session_scene import allocate, setting


async def test_a_step_of_more_than_the_allocator_takes_is_refused_before_anything_changes() -> None:
    async with setting() as scene:
        assert scene.service is not None
        limits = scene.session.limits
        large, many = StepBuilder(), StepBuilder()
        large.allocate(1, 6, bytes(32 * 70_000))  # more than a message may have
        for _ in range(limits.operations_per_step_max + 1):
            many.free(1)
        under_way = await scene.session.submit(allocate(1))
        for step, said in (
            (large, rf"the step has 22400\d\d bytes, and at most {limits.step_bytes_max} are taken"),
            (many, f"the step has 16385 operations, and at most {limits.operations_per_step_max} are taken"),
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
        step.allocate(1 + step.operation_count, 1, b"", "x" * 128)
        with pytest.raises(ResourceExhaustedError):
            await scene.session.step(step)


async def test_a_step_that_never_gets_through_is_tried_again_with_pauses() -> None:
    async with setting() as scene:
        await scene.stop_allocator()
        await scene.start_allocator(("grpc.max_receive_message_length", 4_000))  # fewer bytes than it says
        assert scene.service is not None
        large = StepBuilder()
        large.allocate(1, 6, bytes(32 * 200))
        waiting = asyncio.create_task(scene.session.step(large))
        async with asyncio.timeout(30):
            while len(scene.waits) < 8:
                await asyncio.sleep(0)
        gaps = [later - earlier for earlier, later in pairwise(scene.service.attached_at)]
        assert min(gaps) >= BACKOFF_S[0] / 2
        assert [error.code for error in scene.waits[-4:]] == [StatusCode.RESOURCE_EXHAUSTED] * 4
        assert scene.waits[-1].reason is None
        assert not waiting.done()
        waiting.cancel()
