"""The owner's side of a Session stream: one pool, numbered steps, nothing applied twice.

Lifecycle:

    1. open       attach under a fresh incarnation. The pool starts empty
    2. step       steps are sent at once, up to `window` of them unanswered, and answered in order, with heartbeats
    3. lost       the stream broke, or was silent for 3 s or the allocator's `Limits.silence_ms`. The session attaches
                  again with a higher epoch until it succeeds. If the allocator still has the session, unanswered steps
                  are sent again byte for byte. If not (it was restarted or replaced, or the lease ended), it gets a
                  report of the pages, and continues with the same sequences on the same blocks. Callers notice only
                  the delay
    4. refused    another allocator behind the name refuses the session (token, version, specification). The session
                  retries as when lost. Only a session that was never open is refused permanently
    5. close      detach: the allocator drops the pool at once. An `open` that fails or is canceled closes, too

`owner.py` has all rules, and `ledger.py` the record of the pool. This module has the stream, the clock and the waiting.

`SessionLostError` only means that an allocator refused the report: a new session is open, and the pool is empty. A sent
step cannot be taken back. If a step's caller is canceled, the step is still applied. The step's answer then has blocks
to note and copies to run. Such answers are kept. No new step is accepted until the engine has asked for them by
`missed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Self

from quire._transport.backoff import Backoff
from quire._transport.messages import routed_worker_message
from quire.errors import FailedPreconditionError, InternalError, QuireError, Reason, UnavailableError
from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session.answers import Answers
from quire.session.call import EndedError, SessionCall, SessionStub
from quire.session.liveness import Silence
from quire.session.lookahead import AHEAD_TOKENS, RoomAhead
from quire.session.owner import LedgerLostError, Phase, PoolOwner, Verdict
from quire.session.owner_view import OwnerView
from quire.session.waits import Waits
from quire.types import RoutedWorker
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

TICKS_PER_HEARTBEAT: Final = 4  # checks for silence per heartbeat
# Seconds between streams, before jitter. While no stream succeeds, the pause grows from 0.01 to 0.16.
BACKOFF_S, BACK_S = (0.01, 0.16), 0.5  # `close` waits up to BACK_S for a lost stream to come back.
WINDOW: Final = 4

log = logging.getLogger(__name__)


class AsyncSession(OwnerView):
    """Owns one pool over a stream. A session is opened once, and one task at a time may call its methods.

    Args:
        stub: a stub on an asyncio channel.
        pool: the pool's name.
        spec: the pool's specification.
        metadata: sent with the call, such as a bearer token.
        on_wait: called with the error before each retry of attaching. Without it each reason is logged once.
        reconnect: returns a stub on a new connection, to replace a silent connection. Without `reconnect`, a silent
            connection lasts until TCP ends it.
        disconnect: called at the end of `close`.
        window: steps that may be unanswered at a time, 1 to 8.
        ahead_tokens: future tokens for which a decoding sequence should hold slots, beyond its next token.

    Attributes:
        ahead: requests slots for future tokens, so that decoding continues in an outage (`quire.session.lookahead`).
        on_change: called with True when a stream is attached, and with False when it is lost.
    """

    def __init__(
        self,
        stub: SessionStub,
        pool: str,
        spec: pb.PoolSpec,
        *,
        metadata: tuple[tuple[str, str], ...] = (),
        on_wait: Callable[[QuireError], None] | None = None,
        reconnect: Callable[[], Awaitable[SessionStub]] | None = None,
        disconnect: Callable[[], Awaitable[None]] | None = None,
        window: int = WINDOW,
        ahead_tokens: int = AHEAD_TOKENS,
    ) -> None:
        self.pool, self.spec = pool, spec
        self.on_change: Callable[[bool], None] = lambda _connected: None
        self._stub, self._metadata, self._reconnect, self._disconnect = stub, metadata, reconnect, disconnect
        self._answers, self._waits = Answers(), Waits(pool)
        self._on_wait = on_wait or self._waits
        self._owner = PoolOwner(pool, spec, incarnation=secrets.token_bytes(16), window=window)
        self.ahead = RoomAhead(self._owner, ahead_tokens)
        self._connected, self._closing, self._pid = False, False, os.getpid()
        self._call: SessionCall | None = None
        self._asks = False  # True while the sender of the last step waits for the step's answer
        self._silence = Silence(time.monotonic())
        self._fell_silent = self._has_served = False  # the last stream was silent; this stream has received a message
        self._refusal: QuireError | None = None
        self._refused_for: Reason | None = None  # reason of the last refusal. Each reason is logged once.
        self._changed = asyncio.Event()  # set when an answer arrives, or a stream opens or is refused
        self._tasks, self._flushes = list[asyncio.Task[None]](), set[asyncio.Task[None]]()

    def __repr__(self) -> str:
        state = "closed" if self._closing else "attached" if self._connected else "not attached"
        return f"<{type(self).__name__} of pool {self.pool}, {state}>"

    @property
    def connected(self) -> bool:
        """Tells whether a stream is attached."""
        return self._connected

    def register(self, worker: RoutedWorker) -> None:
        """Tells the allocator what routers may know of this pool's worker: at once, and again after each outage."""
        self._owner.worker = routed_worker_message(worker)
        self._send_heartbeat()

    async def open(self) -> None:
        """Attaches. Waits without a limit for an allocator that is down, or for a former owner's lease to end.

        Raises:
            QuireError: the allocator refuses permanently (specification, version, token).
            UnavailableError: the session was closed.
            RuntimeError: the session was opened before.
        """
        if self._closing:
            raise self._closed()
        if self._tasks:
            raise RuntimeError("the session is already open or was closed: make a new session")
        self._tasks = [asyncio.create_task(self._guarded(each())) for each in (self._keep_up, self._beat)]
        try:
            while not self._connected:
                await self._wait_for_change()
                if self._closing:
                    raise self._closed()
                if self._refusal is not None:
                    raise self._refusal
        except BaseException:
            await self.close()  # An open session would acquire the pool later, in vain.
            raise

    async def step(self, operations: StepBuilder) -> StepOutcome:
        """Applies a step exactly once and returns its outcome, which is in `missed` if the caller is canceled."""
        self._asks = True
        return await (await self._submit(operations))

    async def submit(self, operations: StepBuilder) -> asyncio.Future[StepOutcome]:
        """Sends a step as soon as the window is not full. The returned future gets the outcome. If the future's caller
        is canceled, the outcome is in `missed`. A caller that does not await the future must read it later.

        If a future has failed and no caller has awaited it, its error is raised here, once, and nothing is sent.

        Raises (here, or from the future):
            SessionLostError: the pool is empty. Neither this step nor an earlier unanswered step is in effect.
            AnswersMissedError: `missed` has answers. Nothing was sent.
            QuireError: the allocator refused the step. Neither this step nor any later step was applied. TOO_LARGE is
                raised here: the step is above `limits`. Nothing was sent, and earlier steps continue.
            ValueError: a number does not fit the message, or an id is not new, or unknown. Nothing was sent.
            RuntimeError: the session was not opened.
        """
        self._asks = False
        return await self._submit(operations)

    async def _submit(self, operations: StepBuilder) -> asyncio.Future[StepOutcome]:
        if not self._tasks and not self._closing:
            raise RuntimeError("the session has not been opened")
        while not self._owner.has_room and not self._closing:
            await self._wait_for_change()
        if self._closing:
            raise self._closed()
        self._answers.check(self._refusal)
        asked = self._answers.expect(self._owner.submit(operations), operations)
        try:
            await self._flush()
        except asyncio.CancelledError:
            if not asked.cancel():
                self._answers.miss(asked)
            self._drop()  # The message may have been cut off, so the next stream sends it again.
            raise
        return asked

    async def missed(self) -> list[tuple[StepBuilder, StepOutcome]]:
        """Returns the steps of canceled callers and their outcomes, once all are answered. Each step is returned once.

        Apply them before the outcomes of later steps. Refused and lost steps are not included: the next `submit` raises
        their error.

        Raises:
            UnavailableError: the session was closed.
        """
        while self._answers.are_coming():
            await self._wait_for_change()
        if self._closing:
            raise self._closed()
        return self._answers.missed()

    async def close(self) -> None:
        """Detaches, so that the pool is dropped at once. If no allocator answers, the lease ends by itself."""
        if os.getpid() != self._pid:
            return  # Only the parent process closes the session, not a forked child.
        if self._tasks and not self._connected and self._refusal is None:  # A lost stream is usually back soon.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait_for_change(), BACK_S)
        self._closing = True
        try:
            if self._connected and self._tasks:
                self._owner.detach()
                await self._flush()
                await asyncio.wait(self._tasks[:1], timeout=self._owner.silence_s)
        finally:
            await self._stop()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a background task. A failure of this task ends the session, and every waiting caller gets the error."""
        try:
            await work
        except Exception as error:
            log.exception("the session of pool %s has ended", self.pool)
            self._refusal = InternalError(f"the session has ended: {type(error).__name__}")
            self._answers.fail(self._owner.give_up_steps(), self._refusal)
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()  # None of the tasks can run without the others.
            with contextlib.suppress(Exception):  # `_drop` may call a callback, which has just raised an error.
                self._drop()
            self._changed.set()

    async def _keep_up(self) -> None:
        """Attaches, serves, and attaches again until the session is closed."""
        backoff, patient = Backoff(*BACKOFF_S), False
        while not self._closing:
            self._has_served = False
            error = await self._serve_once(patient=patient)
            if self._closing:
                return
            if self._fell_silent and self._reconnect is not None:
                self._fell_silent, self._stub = False, await self._reconnect()
            patient = not self._connected
            waited_for = error or UnavailableError("the allocator does not answer")
            is_step_refused = self._end_stream(error, waited_for) is Verdict.STEP_REFUSED
            asked_s = None if is_step_refused else waited_for.retry_after_s
            if self._has_served or is_step_refused:
                backoff.reset()
            if asked_s or not (self._has_served or is_step_refused):
                self._on_wait(waited_for)
            await asyncio.sleep(backoff.next_s(asked_s))

    async def _serve_once(self, *, patient: bool) -> QuireError | None:
        """Runs one stream from attach to end, and returns the reason for its end, if any. With `patient` it waits for a
        connection, because a pause would lengthen the outage."""
        owner = self._owner
        self._silence.heard()  # Silence is measured from now on, as after a message.
        call = self._call = SessionCall(self._stub.Session(metadata=self._metadata, wait_for_ready=patient))
        try:
            await call.connect()
            self._silence.heard()
            owner.attach()
            await self._flush()
            while owner.phase is not Phase.IDLE:
                self._take(await (call.answer() if self._asks and owner.is_quiet else call.read()))
                if owner.outbox:
                    self._flush_soon()  # Sending a report takes long, and this task must keep receiving.
        except EndedError as ended:
            return ended.said
        except FailedPreconditionError as error:  # the allocator lacks a feature
            return error
        except LedgerLostError as error:
            log.error("the pool starts again empty: %s", error)
            self._answers.lose_pool()
        except InternalError as error:
            log.error("the allocator broke the protocol: %s", error)
            # The next report gives the allocator the true state, whether or not it applied these steps.
            self._answers.fail(owner.give_up_steps(), error)
        return None

    def _take(self, reply: packed.SessionReply) -> None:
        """Applies one message of the current stream."""
        owner = self._owner
        self._silence.heard()
        self._has_served = self._connected
        answer = owner.receive(reply)
        if answer is not None:
            self._answers.take(answer.number, answer.outcome)
            self._changed.set()
        elif not self._connected and owner.phase is Phase.OPEN:
            self._refusal = self._refused_for = None
            self._waits.attached()
            self._set_connected(True)

    async def _flush(self) -> None:
        if self._call is not None:
            await self._call.send(self._owner.outbox, asks=self._asks)

    def _flush_soon(self) -> None:
        flush = asyncio.create_task(self._flush())
        self._flushes.add(flush)  # The event loop holds only weak references to tasks.
        flush.add_done_callback(self._flushes.discard)

    def _end_stream(self, error: QuireError | None, why: QuireError) -> Verdict:
        """Ends the current stream. The owner decides the verdict, and the steps that fail."""
        verdict, numbers = self._owner.ended(error)
        self._drop()
        if verdict is Verdict.LOST:
            log.error("the allocator refused our report, and the pool starts again empty: %s", error)
            self._answers.lose_pool()
        elif verdict is Verdict.STEP_REFUSED:
            self._answers.fail(numbers, why)
        elif verdict is Verdict.REFUSED:
            if why.reason is not self._refused_for:
                log.warning("the allocator refuses this pool, and granted sequences continue without it: %s", why)
            self._refused_for = why.reason
        elif verdict is Verdict.FINAL:
            log.warning("the allocator refuses this pool: %s", why)
            self._refusal = why
            self._answers.fail(self._owner.give_up_steps(), why)
        self._changed.set()
        return verdict

    def _drop(self) -> None:
        """Cancels the call. The task that reads it gets an error."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._set_connected(False)

    async def _beat(self) -> None:
        """Sends heartbeats while no step keeps the lease, and drops a stream that has fallen silent.

        A heartbeat's acknowledgement lets watchers of the pool see the changes of a quiet owner's last step.
        """
        for tick in itertools.count(1):
            await asyncio.sleep(self._owner.beat_s / TICKS_PER_HEARTBEAT)
            silence_s = self._silence.tick(time.monotonic(), self._owner.beat_s / TICKS_PER_HEARTBEAT)
            if silence_s >= self._owner.silence_s and self._call is not None:
                self._fell_silent = True
                self._drop()
            if tick % TICKS_PER_HEARTBEAT == 0:
                self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        self._owner.heartbeat()
        # A task that is already sending also sends this heartbeat. If that task hangs, silence ends the stream.
        if self._call is not None and not self._call.is_sending:
            self._flush_soon()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _set_connected(self, connected: bool) -> None:
        if connected != self._connected:
            self._connected = connected
            self._changed.set()
            self.on_change(connected)

    async def _stop(self) -> None:
        """Ends the background tasks."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            self._drop()
            self._changed.set()
            self._answers.fail_all(self._closed())
            disconnect, self._disconnect = self._disconnect, None
            if disconnect is not None:
                await disconnect()

    _closed = staticmethod(lambda: UnavailableError("the session is closed"))
