"""Sends raw bytes to real servers over gRPC, and checks the conditions of every answer."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import grpc
from quire.errors import QuireError, code_of, from_rpc_error

TIMEOUT_S = 30.0
RunningT = TypeVar("RunningT")


@contextlib.contextmanager
def in_a_thread(make: Callable[[], AbstractAsyncContextManager[RunningT]]) -> Iterator[RunningT]:
    """Runs asynchronous code on an event loop in a thread, so that Hypothesis can use it."""
    started: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def run() -> None:
        done = asyncio.Event()
        async with make() as running:
            started.put((running, asyncio.get_running_loop(), done))
            await done.wait()

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=main)
    thread.start()
    first = started.get(timeout=120)
    if isinstance(first, BaseException):
        raise first
    running, loop, done = first
    try:
        yield running
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)
        assert not thread.is_alive()


def ask(channel: grpc.Channel, path: str, data: bytes) -> QuireError | None:
    """Makes a unary call; returns the error of its refusal, or None."""
    method = channel.unary_unary(path, request_serializer=None, response_deserializer=None)
    return _judged(lambda: method(data, timeout=TIMEOUT_S))


def listen(channel: grpc.Channel, path: str, data: bytes) -> QuireError | None:
    """Makes a call with a stream of answers, and reads the first answer; returns the error of its refusal, or None."""
    call = channel.unary_stream(path, request_serializer=None, response_deserializer=None)(data, timeout=TIMEOUT_S)
    error = _judged(lambda: next(call, None))
    call.cancel()
    return error


def converse(channel: grpc.Channel, path: str, messages: Sequence[bytes]) -> QuireError | None:
    """Sends a stream of messages; returns the error that ended the stream, or None."""
    method = channel.stream_stream(path, request_serializer=None, response_deserializer=None)
    return _judged(lambda: list(method(iter(messages), timeout=TIMEOUT_S)))


def _judged(call: Callable[[], Any]) -> QuireError | None:
    """Returns a call's error, if any. Checks that the error's reason is in the table under its code, and does not
    report a bug."""
    try:
        call()
    except grpc.RpcError as raised:
        error = from_rpc_error(raised)
        assert error.reason is not None, error
        assert error.code is code_of(error.reason)
        assert error.code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), error
        return error
    return None


@contextlib.asynccontextmanager
async def serving(server: grpc.aio.Server) -> AsyncIterator[str]:
    """Serves on a free port; yields the address."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
