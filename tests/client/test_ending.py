"""A call ends with the reason that the peer gave, even during a write."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter

from grpc import aio
from quire.errors import Reason
from quire.session.call_status import Ending
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc

from tests.allocator.service.harness import StreamOwner, running_allocator

CALLS = 150  # enough calls: of a few hundred, grpc.aio alone loses the reason of several
BAD_CHUNK = pb.SessionRequest(report_chunk=pb.ReportChunk(namespaces=["x" * 129]))


async def test_a_refusal_is_heard_by_an_owner_that_goes_on_writing() -> None:
    heard = Counter[Reason | None]()
    async with running_allocator(check_invariants=False) as allocator:
        for epoch in range(1, CALLS + 1):
            owner = StreamOwner(allocator)
            ending = Ending(owner.call)
            await owner.attach(epoch=epoch)
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await owner.call.write(BAD_CHUNK)
            error = await ending.error()
            assert error is not None
            heard[error.reason] += 1
    assert heard == {Reason.MALFORMED: CALLS}


async def test_a_call_that_ends_well_or_is_cancelled_has_no_error() -> None:
    async with running_allocator() as allocator:
        owner = await StreamOwner.ready(allocator)
        ending = Ending(owner.call)
        await owner.hang_up()
        assert await ending.error() is None
        call = allocator.stub.Session()
        ending = Ending(call)
        await call.wait_for_connection()
        call.cancel()
        assert await ending.error() is None


async def test_an_allocator_that_is_gone_is_an_error_without_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        error = await Ending(pb_grpc.AllocatorServiceStub(channel).Session()).error()
    assert error is not None
    assert error.reason is None
    assert error.code.name == "UNAVAILABLE"


async def test_a_call_that_does_not_end_has_no_error_to_tell() -> None:
    async with running_allocator() as allocator:
        owner = await StreamOwner.ready(allocator)
        assert await Ending(owner.call).error(timeout_s=0.05) is None
