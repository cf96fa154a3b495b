"""A session without a stream: each step is a unary call."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from quire import types
from quire._keep_alive import KeptByTask, warn_unclosed
from quire._transport import messages
from quire._transport.channel import AsyncLink
from quire.errors import AnswersMissedError, InternalError, QuireError, UnavailableError
from quire.protocol.features import check_served
from quire.protocol.outcomes import StepOutcome, highest_created, read_reply
from quire.protocol.steps import StepBuilder
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc


class AsyncCallSession:
    """Owns one pool without a stream. `async with` takes the pool, and gives it back at the end.

    Steps are numbered, one is in flight at a time, and each is applied exactly once. The allocator drops the pool after
    `lease_ms` without a call. By default a task of its own renews the lease.

    Made by `session(..., transport="calls")` of an allocator's client.

    Attributes:
        pool: the pool's name.
        lease_ms: length of the lease, known once the session is open.
    """

    def __init__(
        self,
        link: AsyncLink,
        pool: str,
        spec: types.PoolSpec,
        *,
        keep_alive: bool = True,
        request_id: str | None = None,
    ) -> None:
        self.pool = pool
        self.lease_ms = 0
        self._request = messages.open_request(pool, spec, request_id)
        self._group_count = len(spec.groups)
        self._link = link
        self._stub = pb_grpc.AllocatorServiceStub(link.channel)
        self._apply = link.channel.unary_unary(
            "/quire.v1.AllocatorService/Apply", packed.Step.SerializeToString, packed.StepReply.FromString
        )
        self._session_id: bytes | None = None
        self._one_at_a_time = asyncio.Lock()
        self._last_step = 0
        self._last_sequence_id = 0
        self._unanswered: packed.Step | None = None  # The allocator may have applied this step.
        self._is_closed = False
        self._keeps_alive = keep_alive
        self._kept: KeptByTask | None = None

    @property
    def session_id(self) -> bytes:
        """Returns the session's id at the allocator.

        Raises:
            UnavailableError: the session is not open.
        """
        if self._session_id is None:
            raise UnavailableError(f"the session of pool {self.pool} is not open: call `open`, or use a `with` block")
        return self._session_id

    async def open(self, *, timeout_s: float | None = None) -> None:
        """Takes the pool, which starts empty. A retry after an outage takes the same session.

        Raises:
            AlreadyExistsError: POOL_OWNED, another owner has the pool.
            FailedPreconditionError: VERSION, the allocator does not support this protocol or a feature of the pool.
            QuireError: any other failure of a call.
        """
        opened = await self._link.call(self._stub.OpenSession, self._request, timeout_s)
        check_served(self._request.spec.features, opened.features)
        self._session_id, self.lease_ms = opened.session_id, opened.lease_ms
        self._last_step, self._last_sequence_id = opened.next_step - 1, opened.last_sequence_id
        if self._keeps_alive and self._kept is None:
            self._kept = KeptByTask(self, opened.lease_ms)

    async def step(self, operations: StepBuilder, *, timeout_s: float | None = None) -> StepOutcome:
        """Applies a step exactly once and returns its outcome.

        The answer may be lost: DeadlineExceededError, UnavailableError, or the caller was canceled. Then repeat the
        step with the same operations. If the allocator had applied the step, it sends the same answer again. Until then
        no other step is sent.

        Raises:
            AnswersMissedError: another step has no answer yet. Nothing was sent.
            QuireError: with a `reason`, the allocator refused the step, and no operation was applied. Without a
                `reason`, the answer was lost.
            ValueError: a number does not fit the message, or an id is not new, or unknown. Nothing was sent.
        """
        self._link.check_open()  # Raises an error in a forked child, where the lock would never be released.
        async with self._one_at_a_time:
            step = self._numbered(operations)
            try:
                reply = await self._link.call(self._apply, step, timeout_s)
            except QuireError as error:
                if error.reason is not None:
                    self._unanswered = None
                raise
            return self._taken(step, reply)

    def _numbered(self, operations: StepBuilder) -> packed.Step:
        """Returns the message of the next step, or again that of the unanswered step."""
        step = packed.Step(session_id=self.session_id, number=self._last_step + 1, ack=self._last_step)
        operations.fill(step)
        if self._unanswered is not None and self._unanswered != step:
            raise AnswersMissedError(
                f"step {step.number} of pool {self.pool} may have been applied, but its answer was lost: repeat it "
                "with the same operations before any other step"
            )
        operations.check_ids(self._last_sequence_id, self._last_sequence_id)
        self._unanswered = step
        return step

    def _taken(self, step: packed.Step, reply: packed.StepReply) -> StepOutcome:
        """Returns the step's outcome, and notes that the step is answered."""
        if reply.number != step.number:
            raise InternalError(f"the answer to step {step.number} has the number of step {reply.number}")
        try:
            outcome = read_reply(step, reply, self._group_count)
        except ValueError as error:
            raise InternalError(f"the answer to step {step.number} does not match the step: {error}") from error
        self._unanswered, self._last_step = None, step.number
        self._last_sequence_id = highest_created(step, outcome, self._last_sequence_id)
        return outcome

    async def keep_alive(self, *, timeout_s: float | None = None) -> None:
        """Renews the lease. Every step renews it, too."""
        await self._link.call(self._apply, packed.Step(session_id=self.session_id), timeout_s)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Gives the pool back. Closing twice is not an error."""
        self._is_closed = True
        if self._session_id is None or self._link.is_inherited:  # never opened, or owned by the parent process
            return
        if self._kept is not None:
            self._kept.stop()
        await self._link.call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=self.session_id), timeout_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of pool {self.pool} at {self._link.address}{', closed' * self._is_closed}>"

    def __del__(self) -> None:
        if getattr(self, "_session_id", None) is not None and not (self._is_closed or self._link.is_inherited):
            warn_unclosed(self)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        # A failure to close must not hide the error of the `with` block. Without a close, the lease runs out.
        with contextlib.suppress(QuireError) if error is not None else contextlib.nullcontext():
            await self.close()
