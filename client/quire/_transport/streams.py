"""Streams from a server, for threads and for asyncio: chunks of a request and events of a pool.

A request that meets UNAVAILABLE before its first chunk is started again (`attempts.Attempts`). After a chunk,
UNAVAILABLE is an error, because another attempt would start from the beginning. A watch is resumed without a limit of
attempts (`watch.Watch`), because the next attempt continues after the last event. The watch is also resumed when the
allocator is silent: a live allocator sends a message every few seconds, but a proxy may keep the connection of a dead
one open.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol, Self, TypeVar

import grpc
from grpc import aio

from quire._transport.channel import AsyncLink, SyncLink, is_task_cancelled, readable
from quire._transport.watch import SILENCE_S, Watch
from quire.errors import QuireError, UnavailableError, from_rpc_error
from quire.events import CacheEvent

ItemT = TypeVar("ItemT")
ReadT_co = TypeVar("ReadT_co", covariant=True)


class _Attempts(Protocol[ReadT_co]):
    """A call and its retries. `Attempts` and `Watch` implement it and describe its methods."""

    call: Any

    @property
    def request_id(self) -> str | None: ...

    @property
    def timeout_s(self) -> float | None: ...

    def read(self, message: Any) -> ReadT_co | None: ...

    def pause_s(self, error: QuireError) -> float | None: ...

    def again(self) -> None: ...


class SyncStream(Iterator[ItemT]):
    """Yields the items of one stream as they arrive, for threads."""

    def __init__(self, link: SyncLink, attempts: _Attempts[ItemT]) -> None:
        self._link = link
        self._attempts = attempts
        self._closed = threading.Event()

    def __next__(self) -> ItemT:
        while not self._closed.is_set():
            try:
                message = self._message()
            except grpc.RpcError as error:
                self._try_again(from_rpc_error(error, self._attempts.request_id))
            except QuireError as error:
                self._try_again(error)
            else:
                item = self._attempts.read(message)
                if item is not None:
                    return item
        self._attempts.call.cancel()  # Another thread may have closed the stream just before this attempt started.
        raise StopIteration

    def _message(self) -> Any:
        """Returns the next message of the current attempt, or raises the error that ended it."""
        return next(self._attempts.call)

    def close(self) -> None:
        """Cancels the call unless it has ended; iteration ends."""
        self._closed.set()
        if not self._link.is_inherited:
            self._attempts.call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_again(self, error: QuireError) -> None:
        """Starts the next attempt after a pause, unless the stream is closed. Closing also ends the pause.

        Raises:
            QuireError: the error is final.
        """
        if self._closed.is_set():
            return
        pause_s = self._attempts.pause_s(error)
        if pause_s is None:
            raise self._link.explain(error, self._attempts.timeout_s, looks=True) from None
        if not self._closed.wait(pause_s):
            self._attempts.again()


class AsyncStream(AsyncIterator[ItemT]):
    """Yields the items of one stream as they arrive, for asyncio."""

    def __init__(self, link: AsyncLink, attempts: _Attempts[ItemT]) -> None:
        self._link = link
        self._attempts = attempts
        self._closed = False

    async def __anext__(self) -> ItemT:
        while not self._closed:
            try:
                message = await self._message()
            except grpc.RpcError as error:
                await self._try_again(from_rpc_error(error, self._attempts.request_id))
            except QuireError as error:
                await self._try_again(error)
            except asyncio.CancelledError:
                if is_task_cancelled():
                    raise
                if not self._closed:  # If the stream is closed, another task has called `aclose`.
                    raise UnavailableError("the client was closed during the call") from None
            else:
                if message is aio.EOF:  # type: ignore[attr-defined]
                    break
                item = self._attempts.read(readable(message))
                if item is not None:
                    return item
        raise StopAsyncIteration

    def _message(self) -> Awaitable[Any]:
        """Returns the next message of the current attempt, or raises the error that ended it."""
        return self._attempts.call.read()  # type: ignore[no-any-return]

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
            # gRPC's own tasks keep an abandoned asyncio call alive. A blocking call needs no cancellation.
            self._attempts.call.cancel()

    async def _try_again(self, error: QuireError) -> None:
        """Starts the next attempt after a pause, unless the stream is closed by then.

        Raises:
            QuireError: the error is final.
        """
        if self._closed:
            return
        pause_s = self._attempts.pause_s(error)
        if pause_s is None:
            explain = functools.partial(self._link.explain, error, self._attempts.timeout_s, looks=True)
            raise await asyncio.to_thread(explain) from None
        await asyncio.sleep(pause_s)
        if not self._closed:
            self._attempts.again()


class SyncWatchStream(SyncStream[CacheEvent]):
    """Yields the events of one pool, for threads. A silent attempt is replaced by a new one."""

    def __init__(self, link: SyncLink, watch: Watch) -> None:
        super().__init__(link, watch)
        self._watch = watch
        self._waits_since_s = math.inf  # time since which the caller has waited for the next message
        self._was_left = False
        arguments = (weakref.ref(self), self._closed)
        threading.Thread(target=_leave_silent_calls, args=arguments, name="quire-watch", daemon=True).start()

    def _message(self) -> Any:
        self._waits_since_s = time.monotonic()
        try:
            return next(self._watch.call)
        except grpc.RpcError:
            if self._was_left:
                raise self._watch.silence() from None
            raise
        finally:
            self._waits_since_s, self._was_left = math.inf, False

    def _leave_if_silent(self) -> None:
        """Cancels a silent attempt. The thread that waits for a message then starts another attempt."""
        if time.monotonic() - self._waits_since_s > SILENCE_S:
            self._was_left = True
            self._watch.call.cancel()

    def __del__(self) -> None:
        self._closed.set()


def _leave_silent_calls(stream: Callable[[], SyncWatchStream | None], closed: threading.Event) -> None:
    """Cancels a stream's silent attempts until the stream is closed or collected."""
    while not closed.wait(SILENCE_S / 4):
        looked_after = stream()
        if looked_after is None:
            return
        looked_after._leave_if_silent()
        del looked_after  # A reference here would keep the stream alive while this thread waits.


class AsyncWatchStream(AsyncStream[CacheEvent]):
    """Yields the events of one pool, for asyncio. A silent attempt is replaced by a new one."""

    def __init__(self, link: AsyncLink, watch: Watch) -> None:
        super().__init__(link, watch)
        self._watch = watch

    async def _message(self) -> Any:
        try:
            async with asyncio.timeout(SILENCE_S):
                return await super()._message()
        except TimeoutError:
            raise self._watch.silence() from None
