"""The Session stream over gRPC: reads messages, lets the state machine answer them, and writes the answers.

All rules are in `session/machine.py`. This module has only the transport: the deadline for the first message, the end
of a stream that waits for its owner, and the status of a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog
from grpc import aio
from quire._serving.caller_shares import CallerShares
from quire._serving.calls import ANSWER_COPIES, SMALL_BYTES, Arrivals
from quire._serving.rpc import abort, caller_of
from quire.errors import QuireError, Reason
from quire.protocol.limits import HEARTBEAT_S, SILENCE_S
from quire.protocol.permissions import Permissions
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.machine import Phase, SessionMachine
from quire_allocator.session.message import Exchange
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.wire.translate import require

if TYPE_CHECKING:
    from quire_allocator.metrics.counters import Counters

WAITERS_MAX: Final = 1_000  # waiting owners that are remembered, so that each is logged once; the oldest are forgotten
log = structlog.get_logger()

HEARTBEAT = packed.SessionReply(heartbeat=pb.Heartbeat()).SerializeToString()


class Streams:
    """The state that all streams of one allocator share.

    Attributes:
        sessions: all sessions of the allocator.
        counters: counts of calls and pools for metrics.
        clock: returns seconds that never decrease.
        places: open streams of each caller.
        unread: bytes of replies that each caller has not taken yet.
        attaching: limits how many first messages of a caller arrive at a time.
    """

    def __init__(
        self, sessions: SessionRegistry, counters: Counters, clock: Callable[[], float], streams_max: int
    ) -> None:
        self.sessions = sessions
        self.counters = counters
        self.clock = clock
        self.places = CallerShares(limits.STREAMS_OF_ALL_MAX // 2, streams_max)
        self.unread = CallerShares(limits.UNREAD_BYTES_MAX)
        self.attaching = Arrivals()
        self._waiters: dict[tuple[str, bytes] | None, None] = {}

    def is_new_waiter(self, attaching: tuple[str, bytes] | None) -> bool:
        """Returns whether an owner is refused for the first time because its pool has another owner. Waiting owners
        retry every second, and only the first refusal is logged.

        Args:
            attaching: the pool's name, and the owner's incarnation.
        """
        is_new = attaching not in self._waiters
        if is_new:
            self._waiters[attaching] = None
            while len(self._waiters) > WAITERS_MAX:
                del self._waiters[next(iter(self._waiters))]
        return is_new


class SessionStream:
    """Handles one stream from attach to end."""

    def __init__(self, streams: Streams, context: aio.ServicerContext[Any, Any], permissions: Permissions) -> None:
        self._streams = streams
        self._context = context
        task = asyncio.current_task()
        assert task is not None, "a stream must be made inside its handler"
        self._task: asyncio.Task[Any] = task
        self._reading = False
        self._beating: asyncio.Task[None] | None = None
        self._reported = asyncio.Event()
        self._permissions = permissions
        self._caller = caller_of(context)
        self._machine = SessionMachine(streams.sessions, self._interrupt, permissions, self._caller)

    async def run(self) -> None:
        """Serves the stream until it ends."""
        machine, code, places = self._machine, "OK", self._streams.places
        is_placed = False
        try:
            require(
                self._permissions.may_own_any,
                "the certificate does not permit owning a pool: make one that names the pool",
                "POOL_FORBIDDEN",
            )
            is_placed = places.take(self._caller)
            text = (
                f"one caller may have at most {places.each_max} streams, fewer if others have many: close one, or wait"
            )
            require(is_placed, text, "LIMIT")
            message: bytes | None = await self._read_first() or b""
            while message is not None:
                exchange = Exchange(machine, self._streams.counters, message, self._streams.clock())
                del message  # frees the step's memory while the owner reads the answers
                await self._send(exchange)
                del exchange  # frees the answers' memory while `run` waits for the next message
                message = None if machine.phase is Phase.DETACHED else await self._read()
        except Refusal as refusal:
            error = QuireError.of(Reason(refusal.reason), refusal.message, refusal.retry_after_s, field=refusal.field)
            code = error.code.name
            await self._abort(error)
        except asyncio.CancelledError:  # the owner hung up
            code = "CANCELLED"
            raise
        finally:
            if self._beating is not None:
                self._beating.cancel()
            machine.close()
            if is_placed:
                places.leave(self._caller)
            self._streams.counters.count_rpc("Session", code)

    async def _send(self, exchange: Exchange) -> None:
        machine = self._machine
        if self._beating is not None and machine.phase is not Phase.REPORTING:
            await self._stop_beating()
        try:
            for answer in exchange.answers:
                await self._write(answer)
        finally:  # The step counts even if writing its answer fails.
            exchange.observe()
        if self._beating is None and machine.phase is Phase.REPORTING:
            self._beating = asyncio.create_task(self._beat())

    async def _read_first(self) -> bytes | None:
        try:
            async with asyncio.timeout(limits.ATTACH_TIMEOUT_S), self._streams.attaching.of(self._caller):
                return await self._read()
        except TimeoutError:
            raise Refusal(
                "IDLE", f"the stream's first message, Attach, did not arrive within {limits.ATTACH_TIMEOUT_S:g} s"
            ) from None

    async def _read(self) -> bytes | None:
        """Returns the next message, or None at the end of the stream.

        The end of the machine may interrupt only here: an answer that is being written cannot be taken back, and gRPC
        accepts no status until it is out.
        """
        machine = self._machine
        if machine.ending is not None:
            raise machine.ending
        self._reading = True
        try:
            message = await self._context.read()
        except asyncio.CancelledError:
            if machine.ending is None:
                raise
            self._task.uncancel()
            raise machine.ending from None
        finally:
            self._reading = False
        return None if message is aio.EOF else message  # type: ignore[attr-defined]

    def _interrupt(self) -> None:
        """Ends the stream after its machine was ended from outside.

        A stream that waits for a message ends at once. A stream that writes an answer ends when the answer is out, but
        after `SILENCE_S` seconds at the latest, because an owner may take no answer.
        """
        if self._reading:
            self._task.cancel()
        else:
            asyncio.get_running_loop().call_later(SILENCE_S, self._task.cancel)

    def _write(self, answer: bytes) -> Awaitable[None]:
        size = ANSWER_COPIES * len(answer)
        return self._context.write(answer) if size <= SMALL_BYTES else self._write_large(answer, size)

    async def _write_large(self, answer: bytes, size: int) -> None:
        """Writes an answer, and counts its bytes until the owner has taken it.

        Raises:
            Refusal: LIMIT, the caller leaves too many bytes of replies unread.
        """
        unread = self._streams.unread
        if not unread.take(self._caller, size):
            text = f"one caller may leave {unread.each_max:,} bytes of replies unread, fewer if others leave many"
            raise Refusal("LIMIT", f"{text}: read replies faster")
        try:
            await self._context.write(answer)
        finally:
            unread.leave(self._caller, size)

    async def _beat(self) -> None:
        """Sends a heartbeat every second until the report is in force. The owner gets no other message during that
        time.
        """
        while not self._reported.is_set():
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._reported.wait()
            except TimeoutError:
                with contextlib.suppress(aio.BaseError):  # fails if the owner is gone; `_read` then ends the stream
                    await self._write(HEARTBEAT)

    async def _stop_beating(self) -> None:
        """Waits until a heartbeat that is being written is out: gRPC takes one message at a time."""
        if self._beating is not None:
            self._reported.set()
            await asyncio.wait([self._beating])
            self._beating = None

    async def _abort(self, error: QuireError) -> None:
        await self._stop_beating()
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            attaching = self._machine.attaching
            if error.reason is not Reason.POOL_OWNED or self._streams.is_new_waiter(attaching):
                pool = attaching[0] if attaching else None
                log.warning("stream ended", pool=pool, reason=error.reason, error=error.message)
        await abort(self._context, error)
