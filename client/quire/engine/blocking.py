"""The engine for threads: an `AsyncEngine` on an event loop in its own thread.

The loop keeps the lease while the caller is busy or idle, as in a notebook. The caller's thread changes sequences only
between two calls, and the loop only during a call. One thread may use an engine, so no lock is needed.
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
    """Owns a pool and its sequences, for one thread. `with` takes the pool, and gives it back at the end.

    Made by `Allocator.engine`. Methods do the same and raise the same errors as in `AsyncEngine`.

    Args:
        make: called inside the loop. Returns the engine, and a function that closes its client.
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
        """Tells whether the allocator is reachable, as far as is known."""
        return self._engine.connected

    @property
    def report_count(self) -> int:
        """Returns how many allocators got a report of the pages. Always 0 over "calls"."""
        return self._engine.report_count

    @property
    def live(self) -> tuple[EngineSequence, ...]:
        """Returns the sequences that were not freed, oldest first."""
        return self._engine.live

    def ready(self) -> list[EngineSequence]:
        """Returns the sequences with due tokens, oldest first: the next pass computes them."""
        return self._engine.ready()

    def refused(self) -> list[EngineSequence]:
        """Returns the sequences without blocks for their next pass; see `AsyncEngine.refused`."""
        return self._engine.refused()

    def open(self) -> None:
        """Takes the pool; see `AsyncEngine.open`."""
        self._loop.run(self._engine.open())

    def admit(self, tokens: Iterable[int], **options: Unpack[AdmitOptions]) -> EngineSequence:
        """Admits a prompt; see `AsyncEngine.admit`."""
        return self._loop.run(self._engine.admit(tokens, **options))

    def turn(self) -> list[Copy]:
        """Exchanges one step with the allocator, and returns the blocks to copy; see `AsyncEngine.turn`."""
        return self._loop.run(self._engine.turn())

    def close(self) -> None:
        """Gives the pool back, and ends the thread. Closing twice is not an error."""
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
