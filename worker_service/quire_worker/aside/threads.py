"""A few daemon threads that run calls in order.

Unlike the threads of `concurrent.futures`, these threads do not keep the interpreter from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from quire.errors import QuireError, Reason

ResultT = TypeVar("ResultT")


class Threads:
    """Daemon threads that run calls of the event loop. The threads start when calls need them."""

    def __init__(self, name: str, count: int, waiting_max: int) -> None:
        """Creates the queue; the first calls start the threads.

        Args:
            name: name of the threads; messages use it, too.
            count: largest number of threads.
            waiting_max: largest number of calls that wait for a thread.
        """
        self._name, self._count, self._waiting_max = name, count, waiting_max
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = 0
        self._open = 0

    async def run(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Runs a function on a thread, and returns its result or raises its exception.

        Raises:
            QuireError: QUEUE_FULL, too many calls wait already.
        """
        if self._open >= self._count + self._waiting_max:
            raise QuireError.of(
                Reason.QUEUE_FULL, f"too many calls wait to be {self._name} ({self._waiting_max}); try again later"
            )
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
    """Runs one call unless its caller was cancelled, and hands the result to the event loop."""
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
