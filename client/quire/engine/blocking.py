"""The engine for threads: the same one, on an event loop in a thread of its own.

The loop keeps the lease while the caller is busy or idle, as in a notebook. A sequence is changed by the caller's
thread between two calls, and by the loop only inside of one: nothing is locked, as long as one thread uses an engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Self, TypedDict, Unpack

from quire._transport.loop_thread import LoopThread
from quire.engine.sequence import EngineSequence
from quire.engine.turns import AsyncEngine
from quire.protocol.outcomes import Copy
from quire.types import PoolSpec


class AdmitOptions(TypedDict, total=False):
    """The keyword arguments of `AsyncEngine.admit`."""

    namespace: str
    token_count_max: int | None
    priority: int
    defer_token_count: int
    is_return: bool
    root: bytes | None


class Engine:
    """Owns a pool and its sequences, for one thread; `with` takes the pool, and gives it back at the end.

    Made by `Allocator.engine`. Methods do and raise what those of `AsyncEngine` do.

    Args:
        make: makes the engine, and what closes the client that it is on; called inside the loop.
    """

    def __init__(self, make: Callable[[], tuple[AsyncEngine, Callable[[], Awaitable[None]]]]) -> None:
        self._loop = LoopThread("quire-engine")
        self._engine, self._disconnect = self._loop.made(make)

    @property
    def pool(self) -> str:
        """Returns the name of the pool."""
        return self._engine.pool

    @property
    def spec(self) -> PoolSpec:
        """Returns the specification of the pool."""
        return self._engine.spec

    @property
    def connected(self) -> bool:
        """Tells whether an allocator answers, as far as is known."""
        return self._engine.connected

    @property
    def report_count(self) -> int:
        """Counts the allocators that were told what the pages hold; 0 over "calls", where none ever is."""
        return self._engine.report_count

    @property
    def live(self) -> tuple[EngineSequence, ...]:
        """Returns the sequences that were not freed, the oldest first."""
        return self._engine.live

    def ready(self) -> list[EngineSequence]:
        """Returns the sequences that have tokens due, the oldest first: what the next pass computes."""
        return self._engine.ready()

    def refused(self) -> list[EngineSequence]:
        """Returns the sequences that get no room for their next pass; see `AsyncEngine.refused`."""
        return self._engine.refused()

    def open(self) -> None:
        """Takes the pool; see `AsyncEngine.open`."""
        self._loop.run(self._engine.open())

    def admit(self, tokens: Iterable[int], **options: Unpack[AdmitOptions]) -> EngineSequence:
        """Lets a prompt in; see `AsyncEngine.admit`."""
        return self._loop.run(self._engine.admit(tokens, **options))

    def turn(self) -> list[Copy]:
        """Says, asks, takes in, and returns what to copy; see `AsyncEngine.turn`."""
        return self._loop.run(self._engine.turn())

    def close(self) -> None:
        """Gives the pool back, and ends the thread; closing twice is no error."""
        if self._loop.has_ended:
            return
        try:
            self._loop.run(self._close())
        finally:
            self._loop.end()

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
