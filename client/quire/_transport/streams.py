"""What a server streams, as it comes: chunks of a request, events of a pool; for threads and for asyncio.

A request that meets UNAVAILABLE before its first chunk is started again (`attempts.Attempts`); what comes after a
chunk is an error, because another attempt would begin at the beginning. A watch is taken up again as often as it takes
(`watch.Watch`), because the next attempt goes on after the last event.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Protocol, Self, TypeVar

import grpc
from grpc import aio

from quire._transport.channel import AsyncLink, SyncLink, is_task_cancelled, readable
from quire.errors import UnavailableError

ItemT = TypeVar("ItemT")
ReadT_co = TypeVar("ReadT_co", covariant=True)


class _Attempts(Protocol[ReadT_co]):
    """A call and its repetition: `Attempts` or `Watch`, which say what the methods do."""

    call: Any

    @property
    def request_id(self) -> str | None: ...

    @property
    def timeout_s(self) -> float | None: ...

    def read(self, message: Any) -> ReadT_co | None: ...

    def pause_s(self, error: grpc.RpcError) -> float | None: ...

    def again(self) -> None: ...


class SyncStream(Iterator[ItemT]):
    """Items of one stream as they come, for threads."""

    def __init__(self, link: SyncLink, attempts: _Attempts[ItemT]) -> None:
        self._link = link
        self._attempts = attempts
        self._closed = threading.Event()
        _STREAMS.add(self)

    def __next__(self) -> ItemT:
        while not self._closed.is_set():
            try:
                message = next(self._attempts.call)
            except grpc.RpcError as error:
                self._try_again(error)
            else:
                item = self._attempts.read(message)
                if item is not None:
                    return item
        self._attempts.call.cancel()  # another thread may have closed the stream just before this attempt was started
        raise StopIteration

    def close(self) -> None:
        """Cancels the call unless it has ended; iteration ends."""
        self._closed.set()
        if not self._link.is_inherited:
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
            raise self._link.translate(error, self._attempts.request_id, self._attempts.timeout_s) from None
        if not self._closed.wait(pause_s):
            self._attempts.again()


_STREAMS: Final[weakref.WeakSet[SyncStream[Any]]] = weakref.WeakSet()


def _keep_calls() -> None:
    """Keeps the calls of a process alive in a child that was forked from it: gRPC cancels a call that is collected,
    under a lock that a thread of the parent may hold."""
    for stream in _STREAMS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream._attempts.call))


os.register_at_fork(after_in_child=_keep_calls)


class AsyncStream(AsyncIterator[ItemT]):
    """Items of one stream as they come, for asyncio."""

    def __init__(self, link: AsyncLink, attempts: _Attempts[ItemT]) -> None:
        self._link = link
        self._attempts = attempts
        self._closed = False

    async def __anext__(self) -> ItemT:
        while not self._closed:
            try:
                message = await self._attempts.call.read()
            except grpc.RpcError as error:
                await self._try_again(error)
            except asyncio.CancelledError:
                if is_task_cancelled():
                    raise
                if not self._closed:  # else another task has called `aclose`
                    raise UnavailableError("the client was closed meanwhile") from None
            else:
                if message is aio.EOF:  # type: ignore[attr-defined]
                    break
                item = self._attempts.read(readable(message))
                if item is not None:
                    return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancels the call unless it has ended; iteration ends."""
        self._closed = True
        if not self._link.is_inherited:
            self._attempts.call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._link.is_inherited:
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
            attempts = self._attempts
            final = await asyncio.to_thread(self._link.translate, error, attempts.request_id, attempts.timeout_s)
            raise final from None
        await asyncio.sleep(pause_s)
        if not self._closed:
            self._attempts.again()
