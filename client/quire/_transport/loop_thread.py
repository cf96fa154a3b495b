"""An event loop in a thread of its own, for what keeps a lease while its caller is busy, idle or not asyncio's."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quire.errors import UnavailableError

ResultT = TypeVar("ResultT")


class LoopThread:
    """Runs from the start until `end`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Tells whether nothing can be run any more: a forked child has no such thread."""
        return self.loop.is_closed() or os.getpid() != self._pid

    def ended(self) -> UnavailableError:
        """Returns what to raise of a use after the end."""
        kind = self._thread.name.removeprefix("quire-")
        if os.getpid() != self._pid:
            return UnavailableError(
                f"the {kind} belongs to the process that this one was forked from: make another one here"
            )
        return UnavailableError(f"the {kind} is closed")

    def run(self, work: Coroutine[Any, Any, ResultT], timeout_s: float | None = None) -> ResultT:
        """Runs it in the loop, and cancels it if the caller is interrupted, by Ctrl-C say, or waits no longer.

        Raises:
            TimeoutError: it was not done in time.
            UnavailableError: it has ended, or is of the process that this one was forked from.
        """
        if self.has_ended:
            work.close()
            raise self.ended()
        running = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return running.result(timeout_s)
        except BaseException:
            running.cancel()
            raise

    def made(self, make: Callable[[], ResultT]) -> ResultT:
        """Returns what is made inside the loop; where it cannot be, the loop ends."""

        async def called() -> ResultT:
            return make()

        try:
            return self.run(called())
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Ends the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
