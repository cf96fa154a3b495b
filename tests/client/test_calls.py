"""Tests calls before they reach their handlers: memory of their messages, and objects that a refused call leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from grpc import aio
from quire._serving import calls
from quire._serving.rpc import abort
from quire.errors import QuireError, Reason

from tests.security.raw_http2 import framed, raw_caller

METHOD = "/test.Service/Call"
Answer = Callable[[BytesValue, Any], Awaitable[BytesValue]]


@contextlib.asynccontextmanager
async def serving(answer: Answer, calls_max: int = 200) -> AsyncIterator[str]:
    """Serves one unary method, and yields the server's address."""
    server = aio.server(interceptors=[calls.CallInterceptor(None, calls_max)])
    handler = grpc.unary_unary_rpc_method_handler(answer, BytesValue.FromString, BytesValue.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@contextlib.asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[Callable[[bytes], Awaitable[BytesValue]]]:
    """Serves one unary method, and yields a function that calls it."""
    async with serving(answer) as address, aio.insecure_channel(address) as channel:
        method = channel.unary_unary(METHOD, BytesValue.SerializeToString, BytesValue.FromString)

        async def call(data: bytes) -> BytesValue:
            answered: BytesValue = await method(BytesValue(value=data))
            return answered

        yield call


async def test_of_a_refused_call_nothing_is_left_though_no_garbage_is_collected() -> None:
    class Marker:
        """Stands in for a message, because weak references to messages are impossible."""

    left, gone = list[weakref.ref[Marker]](), asyncio.Semaphore(0)

    async def refuse(_request: BytesValue, context: Any) -> BytesValue:
        marker = Marker()
        left.append(weakref.ref(marker, lambda _: gone.release()))
        try:
            raise QuireError.of(Reason.TOO_LARGE, "too large")
        except QuireError as error:
            await abort(context, error)

    gc.disable()
    try:
        async with served(refuse) as call:
            for _ in range(3):
                with pytest.raises(aio.AioRpcError) as caught:
                    await call(b"text")
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            async with asyncio.timeout(10):
                for _ in range(3):
                    await gone.acquire()
    finally:
        gc.enable()
    assert len(left) == 3


async def test_messages_of_one_caller_have_so_many_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MESSAGES_BYTES_MAX", 100_000)
    ended, arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(request: BytesValue, _context: Any) -> BytesValue:
        arrived.release()
        await ended.wait()
        return BytesValue(value=str(len(request.value)).encode())

    async with served(wait) as call:
        large = [asyncio.ensure_future(call(bytes(40_000))) for _ in range(2)]
        async with asyncio.timeout(10):
            for _ in large:
                await arrived.acquire()
        with pytest.raises(aio.AioRpcError, match="requests of one caller may have 100,000 bytes") as caught:
            await call(bytes(40_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        small = asyncio.ensure_future(call(b"small"))
        async with asyncio.timeout(10):
            await arrived.acquire()
        ended.set()
        assert [answer.value for answer in await asyncio.gather(*large, small)] == [b"40000", b"40000", b"5"]
        assert (await call(bytes(40_000))).value == b"40000"


async def test_answers_that_nobody_takes_keep_their_places_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MESSAGES_BYTES_MAX", 100_000)
    answered = list[int]()

    async def repeat(request: BytesValue, _context: Any) -> BytesValue:
        size = int(request.value)
        answered.append(size)
        return BytesValue(value=bytes(size))

    async def asked(size: int, count: int) -> int:
        """Returns how many calls the server has refused; it cannot send the answers to the other calls."""
        before = len(caller.ended)
        message = framed(BytesValue(value=str(size).encode()).SerializeToString())
        await caller.send({caller.begin(METHOD, ()): message for _ in range(count)}, are_last=True)
        return len(caller.ended) - before

    async with serving(repeat, 20) as address, raw_caller(address, window=0) as caller:
        assert await asked(20_000, 5) == 3, "two answers take the bytes"
        assert await asked(1, 20) == 12, "ten calls take the places of one caller"
        assert answered == [20_000] * 5 + [1] * 8
        async with aio.insecure_channel(address) as other:
            method = other.unary_unary(METHOD, BytesValue.SerializeToString, BytesValue.FromString)
            assert len((await method(BytesValue(value=b"9"))).value) == 9
