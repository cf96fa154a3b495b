"""A few threads that compute what they are given, in order. Unlike those of `concurrent.futures`, the interpreter ends
without waiting for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from quire.errors import QuireError, Reason

ResultT = TypeVar("ResultT")


class Threads:
    """Daemon threads, started with the first call. For the event loop alone."""

    def __init__(self, name: str, count: int, waiting_max: int) -> None:
        """Starts nothing yet.

        Args:
            name: of the threads.
            count: of them.
            waiting_max: calls that wait for one, at most.
        """
        self._name, self._count, self._waiting_max = name, count, waiting_max
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = 0
        self._open = 0

    async def run(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Returns what a function returns, or raises what it raises.

        Raises:
            QuireError: QUEUE_FULL, too many calls wait already.
        """
        if self._open >= self._count + self._waiting_max:
            raise QuireError.of(Reason.QUEUE_FULL, f"{self._waiting_max} calls wait to be {self._name}; try again")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[ResultT] = loop.create_future()
        self._open += 1
        self._calls.put(lambda: _answer(loop, result, self._closed, function, arguments))
        if self._started < min(self._open, self._count):
            self._started += 1
            threading.Thread(target=self._work, name=f"{self._name} {self._started}", daemon=True).start()
        return await result

    def _closed(self) -> None:
        self._open -= 1

    def _work(self) -> None:
        while True:
            self._calls.get()()


def _answer(
    loop: asyncio.AbstractEventLoop,
    result: asyncio.Future[Any],
    on_end: Callable[[], None],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Computes one call, unless nobody waits for it any more, and tells the event loop."""
    value, failure = None, None
    if not result.cancelled():
        try:
            value = function(*arguments)
        except BaseException as error:
            failure = error

    def tell() -> None:
        on_end()
        if result.done():
            return
        if failure is None:
            result.set_result(value)
        else:
            result.set_exception(failure)

    if not loop.is_closed():
        loop.call_soon_threadsafe(tell)
