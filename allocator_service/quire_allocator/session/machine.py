"""The allocator's side of one stream, without a wire: the machine takes each message and returns its answers.

Lifecycle of a `SessionMachine`, one for each stream:

    1. attaching   the first message must be Attach; it fences every older stream of the pool
    2. reporting   the owner reports its pool in chunks, which are staged; ReportEnd puts all of them in force at once
    3. open        numbered steps and heartbeats; each message renews the lease
    4. detached    the owner gave its pool back
    5. ended       by a refusal (the owner attaches again), or from outside by `end`: fenced, lease expired, draining

Pure: time comes with every call, session ids come from a function that the caller gives, and an `Observer` gets the
events for logs and metrics. `session/stream.py` is the shell around it for gRPC, `tests/simulation` another shell.

One caller at a time: a method of one machine must return before a method of any machine of the same `SessionRegistry`
is called.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable

from quire.protocol.features import FEATURES
from quire.protocol.permissions import EVERYTHING, Permissions
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import PoolSpec
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.session.staged_report import StagedReport
from quire_allocator.session.steps import answer_step, pool_digest
from quire_allocator.wire import authorization, routes, translate
from quire_allocator.wire.step_columns import StepColumns
from quire_allocator.wire.translate import require


class Phase(enum.Enum):
    """The phases of the lifecycle above."""

    ATTACHING = enum.auto()
    REPORTING = enum.auto()
    OPEN = enum.auto()
    DETACHED = enum.auto()
    ENDED = enum.auto()


class SessionMachine:
    """Serves one stream.

    Args:
        sessions: all sessions of this allocator.
        on_end: called once when the stream is ended from outside; `ending` says why.
        permissions: the caller's permissions.

    Attributes:
        phase: see the module's docstring.
        owner: the ownership of the pool, once attached.
        attaching: the pool that its owner has asked for, and the owner's incarnation; None before.
        ending: why the stream was ended from outside; None if it was not.
        applied: the step that the last message applied to the pool; None if that message was no step, or repeated an
            earlier one.
    """

    def __init__(
        self,
        sessions: SessionRegistry,
        on_end: Callable[[], None] = lambda: None,
        permissions: Permissions = EVERYTHING,
        caller: Hashable = None,
    ) -> None:
        self.caller: Hashable = id(self) if caller is None else caller
        self.phase = Phase.ATTACHING
        self.owner: Ownership | None = None
        self.attaching: tuple[str, bytes] | None = None
        self.ending: Refusal | None = None
        self.applied: StepColumns | None = None
        self._sessions = sessions
        self._directory = sessions.directory
        self._on_end = on_end
        self._permissions = permissions
        self._restricted = None if permissions.namespaces.are_all else permissions  # None if all are permitted
        self._spec: PoolSpec | None = None
        self._report: StagedReport | None = None
        self._report_heard = self._report_asked = 0.0
        sessions.streams.add(self)

    def receive(self, request: packed.SessionRequest, now: float) -> list[packed.SessionReply]:
        """Takes the stream's next message and returns its answers.

        Raises:
            Refusal: the stream is over, and this message had no effect.
        """
        self.applied = None
        if self.ending is not None:
            raise self.ending
        try:
            if self.phase is Phase.ATTACHING:
                return [self._attach(request, now)]
            if self.phase is Phase.REPORTING:
                return self._take_report(request, now)
            require(self.phase is Phase.OPEN, "the stream is over")
            return self._serve(request, now)
        except Refusal:
            self.phase = Phase.ENDED
            raise

    def end(self, reason: str, message: str) -> None:
        """Ends the stream from outside: the next message is refused with this reason, and `on_end` is called."""
        if self.ending is None:
            self.ending = Refusal(reason, message)
            self._on_end()

    def count_kept(self, owner: Ownership, size: int) -> None:
        """Counts the bytes of the step that was applied last, and of its reply, which the session keeps for replay."""
        self._sessions.kept_bytes.count(owner, owner.steps.next_step - 1, size)

    def close(self) -> None:
        """Notes that the stream is gone. Unless its owner has detached, the allocator keeps the pool until the lease
        ends.
        """
        self._sessions.streams.discard(self)
        self._sessions.staging.discard(self)
        if self.owner is not None:
            if self._report is not None:
                self._sessions.memory.end_report(self.owner)
            self._directory.disconnect(self.owner, self)

    # -- attach --------------------------------------------------------------------------------------------------------

    def _attach(self, request: packed.SessionRequest, now: float) -> packed.SessionReply:
        _expect(request, "attach", "attach, the first message of a stream")
        attach = request.attach
        require(not self._sessions.draining, "the allocator is shutting down", "DRAINING")
        translate.version(attach.version)
        require(len(attach.incarnation) == 16, f"incarnation must be 16 bytes, not {len(attach.incarnation):,}")
        require(attach.epoch >= 1, "epoch must be at least 1, not 0")
        require(
            1 <= attach.window <= limits.WINDOW_MAX,
            f"window must be from 1 to {limits.WINDOW_MAX}, not {attach.window}",
        )
        self._spec = translate.pool_spec(attach.spec)
        worker = routes.worker_of(attach)
        name = translate.pool_name(attach.pool)
        self.attaching = name, attach.incarnation
        authorization.require_owning(self._permissions, name)
        known = self._directory.find_session(attach.resume_session)
        if known is not None and known.name == name:
            authorization.require_sequences(self._permissions, known.pool)
        self._sessions.check_quarantine(name, now)
        resumes = known is not None and known.name == name and known.incarnation == attach.incarnation
        if attach.last_step and not resumes:  # an owner without steps most likely has nothing to report
            self._reserve_report(now)
        self.owner, resumed, older = self._directory.attach(
            name=name,
            spec=self._spec,
            incarnation=attach.incarnation,
            epoch=attach.epoch,
            window=attach.window,
            resume_session=attach.resume_session,
            stream=self,
            now=now,
            caller=self._permissions,
        )
        self._sessions.router.register(name, worker)
        if isinstance(older, SessionMachine):
            older.end("FENCED", "a newer stream of this owner took over")
        if not resumed:
            self.phase, self._report_asked = Phase.REPORTING, now
            if self.owner.session_id:
                self._sessions.observer.disagreed(self.owner)
            return packed.SessionReply(report_required=pb.ReportRequired())
        self.phase = Phase.OPEN
        self._sessions.observer.resumed(self.owner)
        return packed.SessionReply(
            resumed=pb.Resumed(
                session_id=self.owner.session_id,
                next_step=self.owner.steps.next_step,
                lease_ms=int(self._directory.lease_s * 1000),
                limits=translate.LIMITS,
                features=FEATURES,
            )
        )

    # -- report --------------------------------------------------------------------------------------------------------

    def check_report(self, now: float) -> None:
        """Ends a stream that occupies one of the few places for reports and sends no chunk. Heartbeats do not count as
        chunks.
        """
        if self.phase is Phase.REPORTING and self._report_heard + limits.REPORT_PAUSE_S <= now:
            self.end("IDLE", f"no part of the report arrived for {limits.REPORT_PAUSE_S:g} s")

    def _reserve_report(self, now: float) -> None:
        """Takes a place among the few reports that are staged at a time. If no place is free, the attach is refused,
        before the owner has put its report together."""
        self._report_heard = now
        staging = self._sessions.staging
        if self not in staging:
            own_count = sum([stream.caller == self.caller for stream in staging])
            require(
                len(staging) + own_count < limits.REPORTS_MAX,
                f"{len(staging)} reports are being received, the most at a time is {limits.REPORTS_MAX}: attach "
                "again later",
                "REPORT_ADMISSION",
            )
            staging.add(self)

    def _take_report(self, request: packed.SessionRequest, now: float) -> list[packed.SessionReply]:
        owner, spec, sessions = self.owner, self._spec, self._sessions
        assert owner is not None
        assert spec is not None
        if request.HasField("heartbeat"):
            self._hear_worker(owner, request.heartbeat)
            self._directory.renew(owner, now)
            return []
        if self._report is None:
            self._directory.check_blocks(owner.name, spec, owner.caller)
            self._report = StagedReport(spec)
        report = self._report
        if request.HasField("report_chunk"):
            authorization.require_report(self._permissions, request.report_chunk)
            self._reserve_report(now)
            sessions.apply(owner, lambda: report.add(request.report_chunk), now)
            sessions.memory.allow_report(owner, report.byte_count)
            self._directory.renew(owner, now)
            return []
        _expect(
            request, "report_end", "report_chunk, report_end or heartbeat, because the allocator asked for a report"
        )
        answer = self._open(owner, spec, report, request.report_end, now)
        self._directory.renew(owner, now)
        return [answer]

    def _open(
        self, owner: Ownership, spec: PoolSpec, staged: StagedReport, end: pb.ReportEnd, now: float
    ) -> packed.SessionReply:
        """Puts the reported pool in force. If the report is refused, the earlier pool stays."""

        self._sessions.check_sequences(owner, staged.sequence_count)

        def operate() -> None:
            self._directory.open(
                owner,
                spec=spec,
                session_id=self._sessions.new_session_id(),
                last_step=end.last_step,
                make_pool=lambda _spec: staged.finish(end),
            )

        self._sessions.apply(owner, operate, now)
        for drop in owner.untold_drops:  # the owner made the report before it knew of these drops
            self._sessions.apply_drop(owner, drop, now)
        self.phase, self._report = Phase.OPEN, None
        self._sessions.staging.discard(self)
        self._sessions.memory.end_report(owner)
        self._sessions.memory.share_event_logs(owner.caller)
        self._sessions.observer.opened(owner)
        if not staged.is_empty:
            self._sessions.observer.recovered(owner, staged.block_count, self._report_asked)
        return packed.SessionReply(
            ready=pb.Ready(
                session_id=owner.session_id,
                next_step=owner.steps.next_step,
                state_digest=pool_digest(owner.pool),
                lease_ms=int(self._directory.lease_s * 1000),
                limits=translate.LIMITS,
                features=FEATURES,
            )
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _serve(self, request: packed.SessionRequest, now: float) -> list[packed.SessionReply]:
        owner = self.owner
        assert owner is not None
        kind = request.WhichOneof("message")
        if kind == "step":
            answer = self._step(owner, request.step, now)
            self._directory.renew(owner, now)
            return [answer]
        if kind == "heartbeat":
            self._hear_worker(owner, request.heartbeat)
            self._directory.renew(owner, now)
            self._sessions.publish(owner, min(request.heartbeat.ack, owner.steps.next_step - 1))
            return [packed.SessionReply(heartbeat=pb.Heartbeat())]
        _expect(request, "detach", "step, heartbeat or detach")
        self.phase = Phase.DETACHED
        self._sessions.drop(owner)
        return []

    def _hear_worker(self, owner: Ownership, heartbeat: pb.Heartbeat) -> None:
        """Registers the worker in an owner's heartbeat; most heartbeats have none."""
        worker = routes.worker_of(heartbeat)
        if worker is not None:
            self._sessions.router.register(owner.name, worker)

    def _step(self, owner: Ownership, step: packed.Step, now: float) -> packed.SessionReply:
        session_id = step.session_id  # read once, because each access to a message costs time
        require(
            bool(session_id) and session_id == owner.session_id,
            "session_id is not the one of this stream, which is in Resumed or Ready",
            "SESSION_UNKNOWN",
            "session_id",
        )
        answer, self.applied = answer_step(self._sessions, owner, step, self._restricted, now)
        return answer


def _expect(request: packed.SessionRequest, kind: str, expected: str) -> None:
    """Refuses a message of another kind as MALFORMED, and names the expected kind."""
    sent = request.WhichOneof("message")
    if sent != kind:
        raise Refusal("MALFORMED", f"the message is {sent or 'empty'}; expected {expected}")
