"""Chunks of one request as they come, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import grpc

from quire import _messages as messages
from quire import types
from quire._channel import AsyncLink, SyncLink
from quire.v1 import worker_pb2 as worker_pb


class ChunkStream(Iterator[types.Chunk]):
    """Chunks of one request as they come.

    `close`, leaving the `with` block and losing the last reference (as `break` out of a loop over `client.stream(...)`
    does) cancel the request, which frees its blocks at once.
    """

    def __init__(self, link: SyncLink, call: Any, request_id: str) -> None:
        self.request_id = request_id
        self._link = link
        self._call = call
        self._closed = False

    def __next__(self) -> types.Chunk:
        if self._closed:
            raise StopIteration
        try:
            return messages.chunk(next(self._call))
        except grpc.RpcError as error:
            if self._closed:  # by another thread, meanwhile
                raise StopIteration from None
            raise self._link.translate(error, self.request_id) from None

    def close(self) -> None:
        """Cancels the request unless it has ended; iteration ends."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncChunkStream(AsyncIterator[types.Chunk]):
    """Chunks of one request as they come.

    `aclose`, leaving the `async with` block and losing the last reference (as `break` out of a loop over
    `client.stream(...)` does) cancel the request, which frees its blocks at once.
    """

    def __init__(self, link: AsyncLink, call: Any, request_id: str) -> None:
        self.request_id = request_id
        self._link = link
        self._call = call
        self._closed = False

    async def __anext__(self) -> types.Chunk:
        if self._closed:
            raise StopAsyncIteration
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise self._link.translate(error, self.request_id) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():  # another task has called `close`
                raise StopAsyncIteration from None
            raise
        if not isinstance(message, worker_pb.GenerateResponse):  # aio.EOF
            raise StopAsyncIteration
        return messages.chunk(message)

    async def aclose(self) -> None:
        """Cancels the request unless it has ended; iteration ends."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._call.cancel()  # gRPC's own tasks keep an abandoned call alive; its synchronous flavour does not
