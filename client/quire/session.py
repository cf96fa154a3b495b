"""The owner's side of a Session stream: one pool, numbered steps, nothing applied twice.

Lifecycle:

    1. open       attach under a fresh incarnation; the pool starts empty
    2. step       one at a time: sent, applied once, answered; heartbeats in between keep the lease
    3. lost       the stream broke or fell silent: attach again with a higher epoch. If the allocator still has the
                  session, the unanswered step is sent again byte for byte and nothing shows outside. If not (it was
                  restarted, or the lease ended), a new and empty session is opened and `SessionLostError` says so
    4. close      detach: the allocator drops the pool at once

An owner that gets `SessionLostError` holds nothing any more: it drops its tables and computes anew what it still needs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
from collections.abc import Callable
from typing import Any, Final, NoReturn

import grpc
from grpc import aio

from quire.errors import (
    AlreadyExistsError,
    InternalError,
    QuireError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
    from_rpc_error,
)
from quire.limits import PROTOCOL_VERSION
from quire.steps import StepBuilder, StepOutcome, read_reply
from quire.v1 import allocator_pb2 as pb

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 3.0  # without an answer for this long the stream counts as lost
BACKOFF_S: Final = (0.05, 0.5)

log = logging.getLogger(__name__)


class SessionLostError(Exception):
    """The allocator no longer had the session; a new one is open and the pool is empty."""


class PoolSession:
    """Owner of one pool. Not for concurrent use, except that heartbeats go on by themselves.

    Args:
        stub: `AllocatorServiceStub` on an asyncio channel.
        pool: name of the pool.
        spec: its specification.
        metadata: sent with the call, such as a bearer token.
        on_wait: told why, whenever attaching has to be tried again.

    Attributes:
        limits: what the allocator accepts; known once open.
        on_change: called with whether a stream is up, whenever that changes.
    """

    def __init__(
        self,
        stub: Any,
        pool: str,
        spec: pb.PoolSpec,
        *,
        metadata: tuple[tuple[str, str], ...] = (),
        on_wait: Callable[[QuireError], None] | None = None,
    ) -> None:
        self.pool = pool
        self.spec = spec
        self.limits = pb.Limits()
        self.on_change: Callable[[bool], None] = lambda _connected: None
        self._stub = stub
        self._metadata = metadata
        self._on_wait = on_wait or (lambda error: log.info("waiting for the allocator: %s", error))
        self._incarnation = secrets.token_bytes(16)
        self._epoch = 0
        self._session_id = b""
        self._last_step = 0
        self._call: aio.StreamStreamCall[pb.SessionRequest, pb.SessionReply] | None = None
        self._connected = False
        self._lost = False
        self._in_use = asyncio.Lock()
        self._heartbeats: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether a stream is up and attached."""
        return self._connected

    def _set_connected(self, connected: bool) -> None:
        if connected != self._connected:
            self._connected = connected
            self.on_change(connected)

    async def open(self) -> None:
        """Attaches, waiting as long as it takes for an allocator that is down or a former owner's lease to end.

        Raises:
            QuireError: the allocator refuses for good (specification, version, token, limits).
        """
        async with self._in_use:
            await self._attach()
            self._lost = False
        self._heartbeats = asyncio.create_task(self._beat())

    async def step(self, operations: StepBuilder) -> StepOutcome:
        """Applies a step exactly once and returns what it did.

        Raises:
            SessionLostError: none of it is in force, and nothing of what was there before.
            QuireError: the allocator refused the step; nothing of it was applied.
            ValueError: a number does not fit the message; nothing was sent.
        """
        async with self._in_use:
            self._raise_if_lost()
            request = pb.SessionRequest()
            step = request.step
            operations.fill(step)
            step.session_id, step.number, step.ack = self._session_id, self._last_step + 1, self._last_step
            while True:
                try:
                    reply = (await self._exchange(request)).step_reply
                    break
                except _StreamLostError:
                    await self._attach()
                    self._raise_if_lost()
            if (reply.session_id, reply.number) != (step.session_id, step.number):
                self._drop()
                raise InternalError(f"the answer to step {step.number} is one to step {reply.number}")
            self._last_step = step.number
            try:
                return read_reply(step, reply, len(self.spec.groups))
            except ValueError as error:
                self._drop()
                raise InternalError(f"the answer to step {step.number} does not fit it: {error}") from error

    async def close(self) -> None:
        """Detaches if the stream is up, so that the pool is dropped at once; else its lease ends by itself."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()  # it may be waiting for an allocator that is down
            await asyncio.wait((self._heartbeats,))
        async with self._in_use:
            call, self._call = self._call, None
            if call is None or not self._connected:
                return
            self._set_connected(False)
            try:
                async with asyncio.timeout(SILENCE_S):
                    await call.write(pb.SessionRequest(detach=pb.Detach()))
                    await call.done_writing()
                    while await call.read() is not aio.EOF:  # type: ignore[attr-defined]
                        pass
            except (aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                call.cancel()

    # -- one stream ----------------------------------------------------------------------------------------------------

    async def _exchange(self, request: pb.SessionRequest) -> pb.SessionReply:
        """Sends a message and returns its answer."""
        call = self._call
        if call is None:
            raise _StreamLostError
        try:
            async with asyncio.timeout(SILENCE_S):
                await call.write(request)
                return await self._receive(call)
        except TimeoutError:
            self._drop()
            raise _StreamLostError from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # we are cancelled, not the call: its state is unknown
                self._drop()
                raise
            await self._explain(call, error)
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            await self._explain(call, error)

    async def _receive(self, call: Any) -> pb.SessionReply:
        reply = await call.read()
        if reply is aio.EOF:  # type: ignore[attr-defined]
            raise asyncio.InvalidStateError("the stream ended")
        return reply  # type: ignore[no-any-return]

    async def _explain(self, call: Any, error: BaseException) -> NoReturn:
        """Turns what a broken stream raised into lost (attach again) or refused (the owner's mistake)."""
        ended = await _status(call)
        self._drop()
        # Without a reason it is gRPC itself that failed, under whatever code.
        if ended is None or ended.reason is None or ended.reason in _ATTACH_AGAIN:
            raise _StreamLostError(ended) from error
        raise ended from error

    def _drop(self) -> None:
        self._set_connected(False)
        if self._call is not None:
            self._call.cancel()
            self._call = None

    # -- attaching -----------------------------------------------------------------------------------------------------

    async def _attach(self) -> None:
        """Attaches until it works; sets `_lost` if the state behind an earlier session is gone."""
        delay = BACKOFF_S[0]
        while True:
            try:
                await self._attach_once()
                self._set_connected(True)
                return
            except _StreamLostError as lost:
                error = lost.ended or UnavailableError("the allocator does not answer")
            except (AlreadyExistsError, ResourceExhaustedError) as later:  # a lease will end, a place be free
                error = later
            self._on_wait(error)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, BACKOFF_S[1])

    async def _attach_once(self) -> None:
        self._epoch += 1
        self._drop()
        self._call = self._stub.Session(metadata=self._metadata)
        reply = await self._exchange(
            pb.SessionRequest(
                attach=pb.Attach(
                    version=PROTOCOL_VERSION,
                    pool=self.pool,
                    incarnation=self._incarnation,
                    epoch=self._epoch,
                    resume_session=self._session_id,
                    last_step=self._last_step,
                    spec=self.spec,
                    window=1,
                )
            )
        )
        if reply.HasField("resumed"):
            self.limits = reply.resumed.limits
            # The unanswered step was applied, or it was not.
            if reply.resumed.session_id != self._session_id or not 0 < reply.resumed.next_step - self._last_step <= 2:
                self._drop()
                raise InternalError("the allocator resumed another session than ours")
            return
        end = pb.ReportEnd(chunk_count=0, last_step=self._last_step, sha256=hashlib.sha256().digest())
        ready = (await self._exchange(pb.SessionRequest(report_end=end))).ready
        self._lost = bool(self._session_id)
        self._session_id = ready.session_id
        self._last_step = ready.next_step - 1
        self.limits = ready.limits

    def _raise_if_lost(self) -> None:
        if self._lost:
            self._lost = False
            raise SessionLostError

    async def _beat(self) -> None:
        """Keeps the lease while no step does, and attaches again as soon as the stream is lost.

        The acknowledgement lets watchers of the pool see what the last step of a quiet owner did.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            async with self._in_use:
                try:
                    await self._exchange(pb.SessionRequest(heartbeat=pb.Heartbeat(ack=self._last_step)))
                except (_StreamLostError, QuireError):  # whatever it was, attaching again is the answer
                    await self._attach_in_background()

    async def _attach_in_background(self) -> None:
        """Attaches; a refusal for good is left for the next step to meet, which has somebody to tell."""
        try:
            await self._attach()
        except QuireError as error:
            log.warning("the allocator refuses this pool: %s", error)


class _StreamLostError(Exception):
    """The stream is gone for a reason that attaching again may mend; `ended` says which, if it is known."""

    def __init__(self, ended: QuireError | None = None) -> None:
        super().__init__()
        self.ended = ended


_ATTACH_AGAIN: Final = frozenset(
    {Reason.FENCED, Reason.SESSION_UNKNOWN, Reason.IDLE, Reason.DRAINING, Reason.POOL_QUARANTINED}
)


async def _status(call: Any) -> QuireError | None:
    """Why a call ended; None if it ended well, was cancelled here, or does not say."""
    try:
        async with asyncio.timeout(SILENCE_S):
            code = await call.code()
    except TimeoutError:
        return None
    if code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
        return None
    details = await call.details()
    return from_rpc_error(aio.AioRpcError(code, aio.Metadata(), await call.trailing_metadata(), details, details))
