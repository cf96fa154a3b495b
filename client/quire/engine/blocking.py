"""The engine for threads: the same one, on an event loop in a thread of its own.

The loop keeps the lease while the caller is busy or idle, as in a notebook. A sequence is changed by the caller's
thread between two calls, and by the loop only inside of one: nothing is locked, as long as one thread uses an engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Self, TypedDict, TypeVar, Unpack

from quire.engine.sequence import Sequence
from quire.engine.turns import AsyncEngine
from quire.protocol.outcomes import Copy
from quire.types import PoolSpec

ResultT = TypeVar("ResultT")


class AdmitOptions(TypedDict, total=False):
    """The keyword arguments of `AsyncEngine.admit`."""

    namespace: str
    token_count_max: int | None
    priority: int
    defer_token_count: int
    is_return: bool
    turn_ends: tuple[int, ...]
    root: bytes | None


class Engine:
    """Owns a pool and its sequences, for one thread; `with` takes the pool, and gives it back at the end.

    Made by `AllocatorClient.engine` or `.unary_engine`. Methods do and raise what those of `AsyncEngine` do.

    Args:
        make: makes the engine, and what closes the client that it is on; called inside the loop.
    """

    def __init__(self, make: Callable[[], tuple[AsyncEngine[Any], Callable[[], Awaitable[None]]]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-engine", daemon=True)
        self._thread.start()
        try:
            self._engine, self._disconnect = self._run(_called(make))
        except BaseException:
            self._end_loop()
            raise

    @property
    def pool(self) -> str:
        """Returns the name of the pool."""
        return self._engine.pool

    @property
    def spec(self) -> PoolSpec:
        """Returns the specification of the pool."""
        return self._engine.spec

    @property
    def live(self) -> tuple[Sequence, ...]:
        """Returns the sequences that were not freed, the oldest first."""
        return self._engine.live

    def ready(self) -> list[Sequence]:
        """Returns the sequences that have tokens due, the oldest first: what the next pass computes."""
        return self._engine.ready()

    def refused(self) -> list[Sequence]:
        """Returns the sequences that get no room for their next pass; see `AsyncEngine.refused`."""
        return self._engine.refused()

    def open(self) -> None:
        """Takes the pool; see `AsyncEngine.open`."""
        self._run(self._engine.open())

    def admit(self, tokens: Iterable[int], **options: Unpack[AdmitOptions]) -> Sequence:
        """Lets a prompt in; see `AsyncEngine.admit`."""
        return self._run(self._engine.admit(tokens, **options))

    def turn(self) -> list[Copy]:
        """Says, asks, takes in, and returns what to copy; see `AsyncEngine.turn`."""
        return self._run(self._engine.turn())

    def close(self) -> None:
        """Gives the pool back, and ends the thread; closing twice is no error."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._close())
        finally:
            self._end_loop()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of pool {self.pool}: {len(self.live)} sequences>"

    async def _close(self) -> None:
        try:
            await self._engine.close()
        finally:
            await self._disconnect()

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Runs it in the loop. Who is interrupted while waiting, by Ctrl-C say, cancels it."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _called(make: Callable[[], ResultT]) -> ResultT:
    """Calls it inside a loop."""
    return make()
