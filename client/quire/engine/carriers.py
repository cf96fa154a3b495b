"""Carriers of a turn's operations to the allocator: a Session stream, or unary calls one by one.

| | stream | unary calls |
| --- | --- | --- |
| a step | one message | a call for each operation |
| room ahead | asked for, so that decoding goes on through an outage | none: a block at a time |
| the allocator is lost | its successor gets a report of the pages | the pool is lost, and begins anew |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from quire._transport import messages
from quire._transport.backoff import Backoff
from quire.engine.operations import Admission, Operations
from quire.errors import DeadlineExceededError, QuireError, Reason, UnavailableError
from quire.protocol.outcomes import NULL_BLOCK, Copy, GrowOutcome, Result, StepOutcome, Swap
from quire.session import AsyncCallSession, AsyncSession, SessionLostError
from quire.types import Allocation, Growth

ReplyT = TypeVar("ReplyT")

BACKOFF_S = (0.05, 1.0)  # between two attempts of a call, before it is spread
# The session is gone, and the pool with it: the allocator forgot it, or gave it to somebody else.
_LOST = frozenset({Reason.SESSION_UNKNOWN, Reason.FENCED, Reason.POOL_UNKNOWN})
_LATER = frozenset({Reason.POOL_OWNED, Reason.LIMIT, Reason.DRAINING})


class Carrier(Protocol):
    """Carries operations; one set of them at a time."""

    @property
    def connected(self) -> bool:
        """Tells whether an allocator answers, as far as is known."""

    @property
    def report_count(self) -> int:
        """Counts the allocators that were told what the pages hold."""

    async def open(self) -> None:
        """Takes the pool, waiting as long as that takes."""

    async def carry(self, operations: Operations) -> StepOutcome:
        """Has them applied, each once, and returns what they did.

        Raises:
            SessionLostError: the pool is empty.
            QuireError: none of them was applied.
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
    """Carries operations as unary calls, in the order of a step's phases.

    A call that meets an outage or its deadline is repeated under its request id until it is answered, so that it is
    applied once.

    Args:
        new_session: makes a session, not open yet.
        on_wait: called with the error whenever a call has to be tried again.
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
        """Returns the session that holds the pool now."""
        assert self._session is not None, "the engine has not been opened"
        return self._session

    async def open(self) -> None:
        session = self._new_session()
        await self._persist(session.open)
        self._session = session

    async def carry(self, operations: Operations) -> StepOutcome:
        try:
            return await self._carry(operations)
        except QuireError as error:
            if error.reason not in _LOST:
                raise
        await self.open()
        raise SessionLostError

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _carry(self, operations: Operations) -> StepOutcome:
        session = self.session
        commits, swaps = list[Result](), list[Swap]()
        grows, copies = list[GrowOutcome](), list[Copy]()
        for each in operations.commits:
            done = await self._repeat(
                session.commit,
                each.sequence.id,
                each.token_count,
                each.digests,
                keep_token_count=each.keep_token_count,
            )
            commits.append(done.result)
            swaps += done.swaps
        frees = [await self._repeat(session.free, each.id) for each in operations.frees]
        forks = [await self._repeat(session.fork, each.parent.id, each.child.id) for each in operations.forks]
        for grow in operations.grows:
            growth = await self._repeat(session.grow, grow.sequence.id, grow.token_count)
            grows.append(_outcome(grow.sequence.id, grow.token_count, growth))
            copies += growth.copies
        for admission in operations.admissions:
            try:
                allocation = await self._admit(session, admission)
            except QuireError as error:
                if error.reason in _LOST:
                    raise
                admission.answer = error  # what came before it was applied: this is no error of the whole
                grows.append(GrowOutcome(admission.sequence.id, Result.NOT_FOUND, 0, (), 0))
                continue
            matched = allocation.matched_token_count
            grown = _outcome(admission.sequence.id, max(admission.token_count, matched), allocation)
            grows.append(
                grown._replace(
                    matched_token_count=matched,
                    pending_token_count=allocation.pending_token_count,
                    attended_token_count=allocation.attended_token_count,
                    stops=allocation.stops,
                )
            )
            copies += allocation.copies
        return StepOutcome(commits, frees, forks, grows, swaps, copies, free_block_count=0)

    async def _admit(self, session: AsyncCallSession, admission: Admission) -> Allocation:
        return await self._repeat(
            session.allocate,
            admission.sequence.id,
            admission.token_count,
            admission.digests,
            admission.sequence.namespace,
            prompt_token_count=len(admission.sequence.tokens),
            priority=admission.priority,
            defer_token_count=admission.defer_token_count,
            is_return=admission.is_return,
        )

    async def _repeat(
        self, method: Callable[..., Coroutine[Any, Any, ReplyT]], *arguments: object, **options: object
    ) -> ReplyT:
        request_id = messages.new_request_id()
        return await self._persist(lambda: method(*arguments, request_id=request_id, **options))

    async def _persist(self, call: Callable[[], Awaitable[ReplyT]]) -> ReplyT:
        """Calls again and again, as long as waiting may help."""
        backoff = Backoff(*BACKOFF_S)
        while True:
            refused: QuireError
            try:
                answer = await call()
                self._is_answered = True
                return answer
            except (UnavailableError, DeadlineExceededError) as error:
                refused = error
            except QuireError as error:
                if error.reason not in _LATER:
                    raise
                refused = error
            self._is_answered = False
            self._on_wait(refused)
            await asyncio.sleep(backoff.next_s(refused.retry_after_s))


def _outcome(sequence_id: int, token_count: int, done: Allocation | Growth) -> GrowOutcome:
    """Returns what a unary grow did in the words of a step."""
    return GrowOutcome(
        sequence_id,
        done.result,
        0,
        tuple([NULL_BLOCK if block is None else block for block in row] for row in done.tables),
        done.shortfall,
        victim=done.victim,
        token_count=token_count,
    )
