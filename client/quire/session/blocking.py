"""A session for threads: any thread submits steps, and waits for their answers as long as it needs.

    with client.session("mine", spec) as session:
        answer = session.submit(step)          # sent at once; returns at once
        outcome = answer.result(timeout=0.02)  # TimeoutError: it is still to come, and stays so

The stream is an `AsyncSession` on an event loop in its own thread. That thread keeps the lease and attaches again after
an outage, independently of the callers. A step is applied even if no caller waits for its answer, which has blocks to
note.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import Self

from quire._transport.loop_thread import LoopThread
from quire.errors import UnavailableError
from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session.answers import Pending
from quire.session.pool_session import AsyncSession


class Session:
    """Owns one pool over a stream. Made by `Allocator.session`. `with` opens and closes the session.

    Args:
        make: called inside the loop. Returns the session, and a function that closes its client.
    """

    def __init__(self, make: Callable[[], tuple[AsyncSession, Callable[[], Awaitable[None]]]]) -> None:
        self._loop = LoopThread("quire-session")
        self._closing = threading.Lock()
        self._steps: asyncio.Queue[tuple[StepBuilder, Future[StepOutcome]]] = asyncio.Queue()
        self._sender: asyncio.Task[None] | None = None
        self._tellers: set[asyncio.Task[None]] = set()
        self._session, self._disconnect = self._loop.made(make)

    @property
    def pool(self) -> str:
        """Returns the name of the pool."""
        return self._session.pool

    @property
    def connected(self) -> bool:
        """Tells whether a stream is attached."""
        return self._session.connected

    def open(self, timeout_s: float | None = None) -> None:
        """Attaches. Waits for an allocator that is down, or for a former owner's lease to end.

        Raises:
            TimeoutError: no allocator has admitted the session in time. The session is closed.
            QuireError: as in `AsyncSession.open`.
        """
        self._loop.run(self._opened(), timeout_s)

    def submit(self, operations: StepBuilder) -> Future[StepOutcome]:
        """Sends a step after all earlier ones, and returns a future of its answer.

        The future's `result(timeout)` raises the errors of `AsyncSession.submit` and of its future. A sent step cannot
        be taken back: canceling the future does nothing.
        """
        answer: Future[StepOutcome] = Future()
        answer.set_running_or_notify_cancel()
        try:
            if self._loop.has_ended:
                raise RuntimeError
            self._loop.loop.call_soon_threadsafe(self._steps.put_nowait, (operations, answer))
        except RuntimeError:  # The event loop is closed.
            answer.set_exception(self._loop.ended())
        return answer

    def close(self) -> None:
        """Gives the pool back, within some seconds, and ends the thread. Closing twice is not an error. In a forked
        child it does nothing, because the parent owns the session."""
        if self._loop.has_ended:
            return
        with self._closing:
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
        return f"<{type(self).__name__} of pool {self.pool}>"

    # -- inside the loop -----------------------------------------------------------------------------------------------

    async def _opened(self) -> None:
        await self._session.open()
        self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Submits step after step. While the window is full or the allocator is down, further steps wait here."""
        while True:
            operations, answer = await self._steps.get()
            try:
                pending = await self._session.submit(operations)
            except asyncio.CancelledError:
                answer.set_exception(UnavailableError("the session is closed"))
                raise
            except Exception as error:  # Errors of every kind go to the caller.
                answer.set_exception(error)
                continue
            assert isinstance(pending, Pending)
            teller = asyncio.create_task(_tell(pending, answer))
            self._tellers.add(teller)
            teller.add_done_callback(self._tellers.discard)

    async def _close(self) -> None:
        """Ends all running work. Callers that wait for an answer get the error that the session is closed."""
        try:
            await self._session.close()
        finally:
            if self._sender is not None:
                self._sender.cancel()
            for task in [*self._tellers, *([self._sender] if self._sender is not None else [])]:
                task.cancel()
                await asyncio.wait([task])
            while not self._steps.empty():
                self._steps.get_nowait()[1].set_exception(UnavailableError("the session is closed"))
            await self._disconnect()


async def _tell(pending: Pending, answer: Future[StepOutcome]) -> None:
    """Passes a step's answer, or its error, to the caller's future."""
    try:
        answer.set_result(await pending)
    except (asyncio.CancelledError, CancelledError):
        answer.set_exception(UnavailableError("the session is closed"))
        raise
    except Exception as error:
        answer.set_exception(error)
