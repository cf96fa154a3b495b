"""If a peer sends invalid bytes or a part of the session fails, every waiting caller gets an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from quire import AsyncAllocator, AsyncClient
from quire.errors import InternalError, QuireError, UnavailableError
from quire.protocol.outcomes import Result
from quire.protocol.steps import StepBuilder
from quire.session import WINDOW
from quire.session.ledger import Ledger
from quire.types import PoolSpec
from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import running_allocator
from tests.client.session_scene import allocate, setting

SPEC = PoolSpec.full_attention(block_count=10, block_size=16)
NO_MESSAGE = b"\xff\xff\xff\xff"
SOON_S = 10.0


class Spoiler(grpc.GenericRpcHandler):
    """Serves one pool, but answers the first steps, or every attach, with bytes that are no message."""

    def __init__(self, *, spoils_attach: bool) -> None:
        self.seen: list[str] = []
        self.ended = asyncio.Event()
        self._spoils_attach = spoils_attach

    def service(self, details: Any) -> Any:
        """Handles the Session stream, as bytes."""
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            await self._serve(requests, context)
        finally:
            self.ended.set()

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for data in requests:
            request = pb.SessionRequest.FromString(data)
            kind = request.WhichOneof("message")
            self.seen.append(kind)
            if kind == "step" or self._spoils_attach:
                await context.write(NO_MESSAGE)
            elif kind == "attach":
                await context.write(pb.SessionReply(report_required=pb.ReportRequired()).SerializeToString())
            elif kind == "report_end":
                ready = pb.Ready(session_id=b"x" * 16, next_step=1, lease_ms=10_000)
                await context.write(pb.SessionReply(ready=ready).SerializeToString())


class Deaf(Spoiler):
    """Stops reading and sending on its first stream once the stream is open."""

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await super()._serve(requests if "report_end" in self.seen else self._until_open(requests), context)

    async def _until_open(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for data in requests:
            yield data
            if pb.SessionRequest.FromString(data).HasField("report_end"):
                await asyncio.Future()


@asynccontextmanager
async def spoiled(
    *, spoils_attach: bool, kind: type[Spoiler] = Spoiler
) -> AsyncIterator[tuple[Spoiler, AsyncAllocator]]:
    """Serves with a spoiler; yields it and a client."""
    spoiler, server = kind(spoils_attach=spoils_attach), aio.server()
    server.add_generic_rpc_handlers((spoiler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncAllocator(f"127.0.0.1:{port}") as client:
            yield spoiler, client
    finally:
        await server.stop(0)


def grow() -> StepBuilder:
    step = StepBuilder()
    step.allocate(1, 16)
    return step


async def test_bytes_that_are_no_message_are_told_and_the_session_attaches_again() -> None:
    told: asyncio.Queue[QuireError] = asyncio.Queue()
    async with spoiled(spoils_attach=True) as (spoiler, client):
        session = client.session("p", SPEC, on_wait=told.put_nowait)
        opening = asyncio.create_task(session.open())
        for _ in range(2):
            error = await asyncio.wait_for(told.get(), SOON_S)
            assert isinstance(error, UnavailableError)
            assert "not an allocator" in error.message
        assert spoiler.seen.count("attach") >= 2
        opening.cancel()
        await session.close()


async def test_a_step_whose_answer_is_no_message_is_sent_again() -> None:
    async with spoiled(spoils_attach=False) as (spoiler, client):
        session = client.session("p", SPEC)
        await session.open()
        answer = await session.submit(grow())
        async with asyncio.timeout(SOON_S):
            while spoiler.seen.count("attach") < 3:
                await asyncio.sleep(0)
        assert not answer.done()
        await session.close()


async def test_steps_that_are_being_written_when_their_stream_is_left_are_sent_on_the_next_one() -> None:
    async with spoiled(spoils_attach=False, kind=Deaf) as (spoiler, client):
        session = client.session("p", SPEC)
        await session.open()
        steps = [StepBuilder() for _ in range(WINDOW)]
        for number, step in enumerate(steps, 1):
            step.allocate(number, 16, bytes(1_900_000 // 32 * 32))
        async with asyncio.timeout(SOON_S):
            # The stream takes no more data, so the last steps stay unsent.
            answers = [await session.submit(step) for step in steps]
            while "step" not in spoiler.seen:
                await asyncio.sleep(0)
        assert not any(answer.done() for answer in answers)
        await session.close()


async def test_a_callback_that_raises_ends_the_session_for_those_who_wait() -> None:
    def refuse(connected: bool) -> None:
        raise RuntimeError("xyzzy")

    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = client.session("p", SPEC)
        session.on_change = refuse
        with pytest.raises(InternalError, match="RuntimeError") as caught:
            await asyncio.wait_for(session.open(), SOON_S)
        assert "xyzzy" not in caught.value.message
        await session.close()


async def test_a_session_that_ended_by_itself_leaves_its_stream_and_stays_ended() -> None:
    was_lost = asyncio.Event()

    def refuse(connected: bool) -> None:
        if not connected:
            was_lost.set()
            raise RuntimeError

    async with spoiled(spoils_attach=False) as (spoiler, client):
        session = client.session("p", SPEC)
        session.on_change = refuse
        await session.open()
        await asyncio.wait_for(was_lost.wait(), SOON_S)  # The server answers no heartbeat.
        await asyncio.wait_for(spoiler.ended.wait(), SOON_S)
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=1.0)
        assert spoiler.seen.count("attach") == 1
        with pytest.raises(InternalError):
            await asyncio.wait_for(session.step(grow()), SOON_S)
        await session.close()


async def test_a_session_whose_client_is_closed_takes_no_step() -> None:
    async with running_allocator() as allocator:
        client = AsyncAllocator(allocator.address)
        session = client.session("p", SPEC)
        await session.open()
        await client.close()
        with pytest.raises(QuireError):
            await asyncio.wait_for(session.step(grow()), SOON_S)
        await session.close()


async def test_a_closed_session_is_not_opened_again() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = client.session("p", SPEC)
        await session.open()
        await session.close()
        with pytest.raises(UnavailableError, match="closed"):
            await asyncio.wait_for(session.open(), SOON_S)


class Gibberish(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message."""

    def service(self, details: Any) -> Any:
        """Handles any method with one answer, as a stream or not."""
        if details.method.endswith(("Generate", "WatchEvents")):
            return grpc.unary_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, _request: bytes, _context: Any) -> bytes:
        return NO_MESSAGE

    async def _stream(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield NO_MESSAGE


async def test_calls_that_are_answered_with_no_message_fail_as_calls_do() -> None:
    server = aio.server()
    server.add_generic_rpc_handlers((Gibberish(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncAllocator(address) as allocator, AsyncClient(address) as worker:
        for call in (allocator.list_pools(), worker.status(), worker.generate("x"), anext(allocator.watch_events("p"))):
            with pytest.raises(InternalError):
                await asyncio.wait_for(call, SOON_S)
    await server.stop(0)


async def test_who_waits_for_a_session_to_open_is_told_when_it_is_closed() -> None:
    async with AsyncAllocator("127.0.0.1:1") as client:
        waits: asyncio.Queue[QuireError] = asyncio.Queue()
        session = client.session("p", SPEC, on_wait=waits.put_nowait)
        opening = asyncio.create_task(session.open())
        await asyncio.wait_for(waits.get(), SOON_S)
        await session.close()
        with pytest.raises(UnavailableError, match="closed"):
            await asyncio.wait_for(opening, SOON_S)


async def test_who_waits_for_an_answer_is_told_when_the_session_is_closed() -> None:
    async with spoiled(spoils_attach=False) as (_, client):
        session = client.session("p", SPEC)
        await session.open()
        stepping = asyncio.create_task(session.step(grow()))
        while not session.unanswered_count:
            await asyncio.sleep(0)
        await session.close()
        with pytest.raises(UnavailableError, match="closed"):
            await asyncio.wait_for(stepping, SOON_S)


async def test_a_step_is_not_lost_to_an_allocator_that_once_makes_another_state_of_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        await scene.stop_allocator()
        stepping = asyncio.create_task(scene.session.step(allocate(2)))
        digest, digests = Ledger.digest, []

        def differs_once(ledger: Ledger) -> bytes:
            digests.append(digest(ledger))
            return digests[-1] if len(digests) > 1 else bytes(32)

        monkeypatch.setattr(Ledger, "digest", differs_once)
        await scene.start_allocator()
        outcome = await asyncio.wait_for(stepping, SOON_S)
        assert outcome.grows[0].result is Result.OK
        assert sorted(scene.pool.sequences) == [1, 2]
        assert (len(digests), scene.session.disagreement_count) == (2, 1)


async def test_an_allocator_that_always_makes_another_state_of_the_report_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with setting() as scene:
        await scene.session.step(allocate(1))
        await scene.stop_allocator()
        stepping = asyncio.create_task(scene.session.step(allocate(2)))
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "digest", lambda _: bytes(32))
            await scene.start_allocator()
            with pytest.raises(InternalError, match="a state from our report"):
                await asyncio.wait_for(stepping, SOON_S)
        assert (await asyncio.wait_for(scene.session.step(allocate(3)), SOON_S)).grows[0].result is Result.OK
