"""Carriers send a turn's operations to the allocator: as steps of a Session stream, or as one unary call per step.

| | stream | unary calls |
| --- | --- | --- |
| a step | one message | one call |
| slots for future tokens | requested, so that decoding continues through an outage | none: one block at a time |
| the allocator is lost | its successor gets a report of the pages | the pool is lost, and starts empty |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from quire._transport.backoff import Backoff
from quire.engine.operations import Operations
from quire.errors import DeadlineExceededError, InternalError, QuireError, Reason, UnavailableError
from quire.protocol.outcomes import StepOutcome
from quire.session import AsyncCallSession, AsyncSession, SessionLostError

ReplyT = TypeVar("ReplyT")

BACKOFF_S = (0.05, 1.0)  # shortest and longest pause between attempts, before jitter
# Any of these reasons means that the session and its pool are lost: the allocator forgot them, gave the pool to another
# owner, or has applied different steps.
_LOST = frozenset({Reason.SESSION_UNKNOWN, Reason.FENCED, Reason.POOL_UNKNOWN, Reason.STEP_MISMATCH, Reason.STEP_GAP})
_LATER = frozenset({Reason.POOL_OWNED, Reason.LIMIT, Reason.DRAINING})


class Carrier(Protocol):
    """Sends operations to the allocator, one set at a time."""

    @property
    def connected(self) -> bool:
        """Tells whether the allocator is reachable, as far as is known."""

    @property
    def report_count(self) -> int:
        """Returns how many allocators got a report of the pages."""

    async def open(self) -> None:
        """Takes the pool. Waits without a limit for an allocator that grants the pool."""

    async def carry(self, operations: Operations) -> StepOutcome:
        """Applies each operation exactly once, and returns the outcome.

        Raises:
            SessionLostError: the pool is empty.
            QuireError: no operation was applied.
        """

    async def close(self) -> None:
        """Gives the pool back."""


class StreamCarrier(Carrier):
    """Carries operations as steps of a Session stream."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session

    @property
    def connected(self) -> bool:
        return self.session.connected

    @property
    def report_count(self) -> int:
        return self.session.report_count

    async def open(self) -> None:
        await self.session.open()

    async def carry(self, operations: Operations) -> StepOutcome:
        return await self.session.step(operations.step())

    async def close(self) -> None:
        await self.session.close()


class CallCarrier(Carrier):
    """Carries operations as steps of a unary session.

    If a step's answer is lost, the step is sent again with the same number until it is answered. The allocator applies
    it once.

    Args:
        new_session: returns a new session, not open yet.
        on_wait: called with the error before each retry of a call.
    """

    def __init__(
        self,
        new_session: Callable[[], AsyncCallSession],
        on_wait: Callable[[QuireError], None] = lambda _error: None,
    ) -> None:
        self._new_session = new_session
        self._on_wait = on_wait
        self._session: AsyncCallSession | None = None
        self._is_answered = False

    @property
    def connected(self) -> bool:
        return self._is_answered

    @property
    def report_count(self) -> int:
        return 0

    @property
    def session(self) -> AsyncCallSession:
        """Returns the session that owns the pool now."""
        assert self._session is not None, "the engine has not been opened"
        return self._session

    async def open(self) -> None:
        session = self._new_session()
        await self._persist(session.open, lambda error: error.reason in _LATER)
        self._session = session

    async def carry(self, operations: Operations) -> StepOutcome:
        step, session = operations.step(), self.session
        try:
            return await self._persist(lambda: session.step(step), lambda error: error.is_grpcs_own)
        except InternalError as error:  # The answer does not fit its step, so the pool's state is unknown.
            self._on_wait(error)
        except QuireError as error:
            if error.reason not in _LOST:
                raise
        with contextlib.suppress(QuireError):
            await session.close()
        await self.open()
        raise SessionLostError

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _persist(self, call: Callable[[], Awaitable[ReplyT]], may_wait: Callable[[QuireError], bool]) -> ReplyT:
        """Retries a call while the allocator does not answer in time, or `may_wait` accepts the error."""
        backoff = Backoff(*BACKOFF_S)
        while True:
            try:
                answer = await call()
                self._is_answered = True
                return answer
            except QuireError as error:
                if not (isinstance(error, (UnavailableError, DeadlineExceededError)) or may_wait(error)):
                    raise
                refused = error
            self._is_answered = False
            self._on_wait(refused)
            await asyncio.sleep(backoff.next_s(refused.retry_after_s))
