"""Chunks of one request as they come, for threads and for asyncio.

A stream that meets UNAVAILABLE before its first chunk is started again (`quire._channel.Attempts`); what comes after a
chunk is an error, because another attempt would begin at the beginning.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Self

import grpc

from quire import _messages as messages
from quire import types
from quire._channel import AsyncLink, Attempts, SyncLink
from quire.v1 import worker_pb2 as worker_pb


class ChunkStream(Iterator[types.Chunk]):
    """Chunks of one request as they come.

    `close`, leaving the `with` block and losing the last reference (as `break` out of a loop over `client.stream(...)`
    does) cancel the request, which frees its blocks at once.
    """

    def __init__(self, link: SyncLink, attempts: Attempts, request_id: str) -> None:
        self.request_id = request_id
        self._link = link
        self._attempts = attempts
        self._closed = threading.Event()

    def __next__(self) -> types.Chunk:
        while not self._closed.is_set():
            try:
                message = next(self._attempts.call)
            except grpc.RpcError as error:
                self._try_again(error)
            else:
                self._attempts.begun = True
                return messages.chunk(message)
        self._attempts.call.cancel()  # another thread may have closed the stream just before this attempt was started
        raise StopIteration

    def close(self) -> None:
        """Cancels the request unless it has ended; iteration ends."""
        self._closed.set()
        self._attempts.call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_again(self, error: grpc.RpcError) -> None:
        """Starts the next attempt after a pause, unless the stream is closed, which also ends the pause.

        Raises:
            QuireError: the error is final.
        """
        if self._closed.is_set():
            return
        pause_s = self._attempts.pause_s(error)
        if pause_s is None:
            raise self._link.translate(error, self.request_id) from None
        if not self._closed.wait(pause_s):
            self._attempts.again()


class AsyncChunkStream(AsyncIterator[types.Chunk]):
    """Chunks of one request as they come.

    `aclose`, leaving the `async with` block and losing the last reference (as `break` out of a loop over
    `client.stream(...)` does) cancel the request, which frees its blocks at once.
    """

    def __init__(self, link: AsyncLink, attempts: Attempts, request_id: str) -> None:
        self.request_id = request_id
        self._link = link
        self._attempts = attempts
        self._closed = False

    async def __anext__(self) -> types.Chunk:
        while not self._closed:
            try:
                message = await self._attempts.call.read()
            except grpc.RpcError as error:
                await self._try_again(error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._closed or task is None or task.cancelling():
                    raise  # else another task has called `aclose`
            else:
                if not isinstance(message, worker_pb.GenerateResponse):  # aio.EOF
                    break
                self._attempts.begun = True
                return messages.chunk(message)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancels the request unless it has ended; iteration ends."""
        self._closed = True
        self._attempts.call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._attempts.call.cancel()  # gRPC's own tasks keep an abandoned call alive; its other flavour does not

    async def _try_again(self, error: grpc.RpcError) -> None:
        """Starts the next attempt after a pause, unless the stream is closed by then.

        Raises:
            QuireError: the error is final.
        """
        if self._closed:
            return
        pause_s = self._attempts.pause_s(error)
        if pause_s is None:
            raise self._link.translate(error, self.request_id) from None
        await asyncio.sleep(pause_s)
        if not self._closed:
            self._attempts.again()
