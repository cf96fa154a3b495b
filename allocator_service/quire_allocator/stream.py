"""One Session stream: attach, report, steps, heartbeats.

Lifecycle:

    1. opened      Attach must come within 5 s
    2. reporting   the owner accounts for its pool (this server starts every session with an empty one)
    3. open        numbered steps and heartbeats; each message renews the lease
    4. ended       by Detach (the pool is dropped), by the owner's end of stream (the lease runs), by a refusal (the
                   owner attaches again), or from outside by `end`: fenced, lease expired, server draining
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from grpc import aio
from quire._serving.rpc import abort
from quire.errors import QuireError, Reason
from quire.limits import PROTOCOL_VERSION
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits, steps, translate
from quire_allocator.core.directory import Ownership, Refusal
from quire_allocator.core.spec import PoolSpec
from quire_allocator.translate import require

if TYPE_CHECKING:
    from quire_allocator.service import AllocatorService

log = structlog.get_logger()


class SessionStream:
    """Handler of one stream; `end` may be called by anybody on the event loop."""

    def __init__(self, service: AllocatorService, context: aio.ServicerContext[Any, Any]) -> None:
        self._service = service
        self._directory = service.directory
        self._context = context
        task = asyncio.current_task()
        assert task is not None, "made inside its handler"
        self._task: asyncio.Task[Any] = task
        self._reading = False
        self._ending: QuireError | None = None

    def end(self, reason: Reason, message: str) -> None:
        """Ends the stream with an error: at once where it waits for a message, else as soon as its answer is out."""
        if self._ending is None:
            self._ending = QuireError.of(reason, message)
            if self._reading:
                self._task.cancel()

    async def run(self) -> None:
        """Serves the stream until it ends."""
        owner: Ownership | None = None
        code = "OK"
        self._service.streams.add(self)
        try:
            attach = await self._read_attach()
            spec = translate.pool_spec(attach.spec)
            owner, resumed = self._attach(attach, spec)
            if resumed:
                await self._resume(owner)
            else:
                await self._write(report_required=pb.ReportRequired())
                await self._report(owner, spec)
            if await self._serve(owner):
                self._service.drop(owner)
                log.info("pool detached", pool=owner.name)
        except Refusal as refusal:
            error = QuireError.of(Reason(refusal.reason), refusal.message)
            code = error.code.name
            await self._abort(owner, error)
        except _EndedError as ended:
            code = ended.error.code.name
            await self._abort(owner, ended.error)
        except asyncio.CancelledError:  # the owner hung up
            code = "CANCELLED"
            raise
        finally:
            self._service.streams.discard(self)
            if owner is not None:
                self._directory.disconnect(owner, self)
            self._service.telemetry.count_rpc("Session", code)

    async def _read_attach(self) -> pb.Attach:
        try:
            async with asyncio.timeout(limits.ATTACH_TIMEOUT_S):
                request = await self._read()
        except TimeoutError:
            raise Refusal("IDLE", f"no Attach within {limits.ATTACH_TIMEOUT_S:g} s") from None
        require(request is not None and request.HasField("attach"), "the first message must be Attach")
        assert request is not None
        attach = request.attach
        require(not self._service.draining, "the allocator is shutting down", "DRAINING")
        require(attach.version == PROTOCOL_VERSION, f"version {attach.version} is not served", "VERSION")
        require(len(attach.incarnation) == 16, "incarnation must be 16 bytes")
        require(attach.epoch >= 1, "epoch must be at least 1")
        require(1 <= attach.window <= limits.WINDOW_MAX, f"window must be 1 to {limits.WINDOW_MAX}")
        return attach

    def _attach(self, attach: pb.Attach, spec: PoolSpec) -> tuple[Ownership, bool]:
        """Becomes the pool's current stream; returns whether its session goes on."""
        owner, resumed, older = self._directory.attach(
            name=translate.pool_name(attach.pool),
            spec=spec,
            incarnation=attach.incarnation,
            epoch=attach.epoch,
            window=attach.window,
            resume_session=attach.resume_session,
            stream=self,
            now=self._service.clock(),
        )
        if isinstance(older, SessionStream):
            older.end(Reason.FENCED, "a newer stream of this owner took over")
        return owner, resumed

    async def _resume(self, owner: Ownership) -> None:
        log.info("session resumed", pool=owner.name, next_step=owner.steps.next_step)
        await self._write(
            resumed=pb.Resumed(
                session_id=owner.session_id,
                next_step=owner.steps.next_step,
                lease_ms=int(self._directory.lease_s * 1000),
                limits=translate.LIMITS,
            )
        )

    async def _report(self, owner: Ownership, spec: PoolSpec) -> None:
        request = await self._read()
        while request is not None and request.HasField("heartbeat"):
            self._directory.renew(owner, self._service.clock())
            request = await self._read()
        require(
            request is None or not request.HasField("report_chunk"),
            "this server starts every session with an empty pool and takes no report of blocks",
            "NOT_SUPPORTED",
        )
        require(request is not None and request.HasField("report_end"), "a report was asked for")
        assert request is not None
        end = request.report_end
        require(end.chunk_count == 0, "chunk_count differs from the chunks sent")
        require(end.sha256 == hashlib.sha256().digest(), "sha256 differs from that of the chunks sent")
        require(end.last_step <= limits.LAST_STEP_MAX, f"last_step must be at most {limits.LAST_STEP_MAX}")
        self._directory.open(owner, spec=spec, session_id=secrets.token_bytes(16), last_step=end.last_step)
        self._directory.renew(owner, self._service.clock())
        self._service.watching.wake(owner.name)
        log.info("session opened", pool=owner.name, kind="stream", blocks=owner.spec.block_count)
        await self._write(
            ready=pb.Ready(
                session_id=owner.session_id,
                next_step=owner.steps.next_step,
                lease_ms=int(self._directory.lease_s * 1000),
                limits=translate.LIMITS,
            )
        )

    async def _serve(self, owner: Ownership) -> bool:
        """Answers messages until the owner leaves; True if it detached, False if it just ended the stream."""
        while (request := await self._read()) is not None:
            self._directory.renew(owner, self._service.clock())
            kind = request.WhichOneof("message")
            if kind == "step":
                await self._write(step_reply=self._step(owner, request.step))
            elif kind == "heartbeat":
                self._service.publish(owner, min(request.heartbeat.ack, owner.steps.next_step - 1))
                await self._write(heartbeat=pb.Heartbeat())
            elif kind == "detach":
                return True
            else:
                raise Refusal("MALFORMED", f"{kind or 'an empty message'} is not expected in an open session")
        return False

    def _step(self, owner: Ownership, step: pb.Step) -> pb.StepReply:
        started = time.perf_counter()
        require(
            bool(owner.session_id) and step.session_id == owner.session_id,
            "not this stream's session",
            "SESSION_UNKNOWN",
        )
        require(step.ack < step.number, "ack must be below the step's own number")
        kept = owner.steps.replay(step.number, step)
        if isinstance(kept, pb.StepReply):
            return kept
        arrays = steps.check_step(owner.pool, step)
        reply = self._service.apply(owner, lambda: steps.apply_step(owner.pool, step, arrays, self._service.clock()))
        owner.steps.record(step, reply)
        owner.steps.forget(step.ack)
        self._service.publish(owner, step.ack)
        self._service.telemetry.of(owner.name).observe_step(step, reply, time.perf_counter() - started)
        return reply

    async def _read(self) -> pb.SessionRequest | None:
        """The next message, or None at the end of the stream. The only place where `end` may interrupt: an answer that
        is being sent cannot be taken back, and gRPC takes no status beside it."""
        if self._ending is not None:
            raise _EndedError(self._ending)
        self._reading = True
        try:
            request = await self._context.read()
        except asyncio.CancelledError:
            if self._ending is None:
                raise
            self._task.uncancel()
            raise _EndedError(self._ending) from None
        finally:
            self._reading = False
        return None if request is aio.EOF else request  # type: ignore[attr-defined]

    async def _write(self, **message: Any) -> None:
        await self._context.write(pb.SessionReply(**message))

    async def _abort(self, owner: Ownership | None, error: QuireError) -> None:
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            log.warning("stream ended", pool=owner.name if owner else None, reason=error.reason, error=error.message)
        await abort(self._context, error)


class _EndedError(Exception):
    """`SessionStream.end` was called."""

    def __init__(self, error: QuireError) -> None:
        super().__init__()
        self.error = error
