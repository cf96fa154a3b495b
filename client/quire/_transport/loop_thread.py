"""An event loop in its own thread, which keeps leases alive while a caller is busy, idle, or does not use asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quire._transport.inherited import REMEDY
from quire.errors import UnavailableError

ResultT = TypeVar("ResultT")


class LoopThread:
    """Runs an event loop in its own thread, from the constructor until `end`.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Tells whether the loop no longer runs. A forked child never has the thread."""
        return self.loop.is_closed() or os.getpid() != self._pid

    def ended(self) -> UnavailableError:
        """Returns the error for a use after the end."""
        kind = self._thread.name.removeprefix("quire-")
        if os.getpid() != self._pid:
            return UnavailableError(f"the {kind} was made before this process was forked, and {REMEDY}")
        return UnavailableError(f"the {kind} is closed")

    def run(self, work: Coroutine[Any, Any, ResultT], timeout_s: float | None = None) -> ResultT:
        """Runs a coroutine in the loop and returns its result. An interrupt (Ctrl-C) or a timeout cancels it.

        Raises:
            TimeoutError: the coroutine took too long.
            UnavailableError: the loop has ended, or belongs to the parent of this forked process.
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
        """Calls `make` inside the loop and returns its result. If `make` fails, the loop ends."""

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
