"""The owner's part of the session protocol, without a wire: it decides what to send, and interprets the answers.

Lifecycle of a `PoolOwner`:

    1. idle       there is no stream. Submitted steps wait
    2. attaching  a stream begins with Attach, under a higher epoch than all before
    3. reporting  the allocator has no state for this owner. The ledger is sent as a block report, and takes effect
    4. open       submitted steps are sent at once, at most `window` of them unanswered. Answers arrive in order
    5. idle       the stream was lost (`lose_stream`), or given up by this owner because both sides disagree: back to 2

A step keeps its number until it is answered. After Resumed, the same bytes are sent again; after Ready, the same
operations under the new session id. The allocator may have applied these steps before, but the ledger applies each
exactly once.

Pure: no call, clock, randomness or lock. `session.AsyncSession` is its shell for asyncio. An engine with another event
loop can write its own shell: send all messages in `outbox` in order, and pass every answer of the current stream to
`receive`, but no answer of an older stream.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Final, NamedTuple

from quire.errors import InternalError, QuireError, Reason
from quire.protocol.features import check_served
from quire.protocol.limits import HEARTBEAT_S, MESSAGE_BYTES_MAX, PROTOCOL_VERSION, SILENCE_S
from quire.protocol.outcomes import StepOutcome, read_reply
from quire.protocol.packing import unpack_uint64
from quire.protocol.steps import StepBuilder
from quire.session.block_report import report_chunks, report_end
from quire.session.ledger import Ledger
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire.v1 import server_pb2


class Phase(enum.Enum):
    """The phase of the owner's current stream; IDLE without a stream."""

    IDLE = enum.auto()
    ATTACHING = enum.auto()
    REPORTING = enum.auto()
    OPEN = enum.auto()


class LedgerLostError(InternalError):
    """An answer was readable but contradicts the ledger, so the ledger is no longer reliable."""


class Answer(NamedTuple):
    """The answer to an applied step."""

    number: int
    outcome: StepOutcome


class Verdict(enum.Enum):
    """The meaning of a stream's end for its owner."""

    AGAIN = enum.auto()  # attach again at once
    LATER = enum.auto()  # attach again later, after another owner's lease, report or call has ended
    LOST = enum.auto()  # The allocator refuses this owner's report, so the pool begins empty.
    STEP_REFUSED = enum.auto()  # The oldest unanswered step was invalid. Neither this step nor a later one was applied.
    # This allocator refuses an owner that was admitted earlier. A later allocator may accept it, so the owner retries.
    REFUSED = enum.auto()
    FINAL = enum.auto()  # The allocator refuses an owner that was never admitted. The owner gives up.


_MISREADINGS_MAX: Final = 3
_HEARTBEATS_PER_LEASE: Final = 3  # least heartbeats in a lease, so that two may be late
_PERIOD_S_MIN: Final = 0.01  # shortest period, so that no allocator's value makes the owner's loop spin
_WINDOW_FIELD_MAX: Final = 2**32 - 1
_SENT_WITH_BYTES: Final = (2 + 16) + (1 + 10)  # bytes of session id and acknowledgement. `_send_step` adds both.
_AGAIN: Final = frozenset(
    {Reason.FENCED, Reason.SESSION_UNKNOWN, Reason.IDLE, Reason.DRAINING, Reason.POOL_QUARANTINED}
)
_DISAGREE: Final = frozenset({Reason.STEP_MISMATCH, Reason.STEP_GAP})
_LATER: Final = frozenset({Reason.POOL_OWNED, Reason.LIMIT, Reason.REPORT_ADMISSION})
_UNREPORTABLE: Final = frozenset({Reason.MALFORMED, Reason.TOO_LARGE, Reason.NOT_SUPPORTED})


class PoolOwner:
    """Owns one pool.

    Args:
        pool: the pool's name.
        spec: the pool's specification.
        incarnation: 16 random bytes, new for every process that holds the pages.
        window: steps that may be unanswered at a time, 1 to 8.

    Raises:
        ValueError: the window is not a positive number. The allocator refuses a window that is too wide.

    Attributes:
        ledger: record of the pool after the last answer.
        outbox: messages to send on the current stream, in order. The sender removes each.
        session_id: id of the ledger's session. Empty before the first session, and after a session that must not be
            resumed.
        last_step: number of the last answered step.
        heartbeat_s, silence_s: interval of the owner's heartbeats, and the allocator's silence before the owner
            replaces its stream. The last allocator chose both values.
        lease_s: seconds of silence after which the allocator drops the pool; infinite until known.
        worker: what routers may know of the pool's worker. Each attach carries it, and the heartbeat after a change.
        report_count, disagreement_count: number of requested reports; how often the owner's and the allocator's states
            differed.
    """

    def __init__(self, pool: str, spec: pb.PoolSpec, *, incarnation: bytes, window: int = 1) -> None:
        if not isinstance(window, int) or isinstance(window, bool) or not 1 <= window <= _WINDOW_FIELD_MAX:
            raise ValueError(f"window must be from 1 to 8 steps, not {window!r:.80}")
        self.pool = pool
        self.spec = spec
        self.incarnation = incarnation
        self.window = window
        self.phase = Phase.IDLE
        self.ledger = Ledger(spec)
        self.outbox: deque[packed.SessionRequest] = deque()
        self.limits = server_pb2.Limits()
        self.lease_s = math.inf
        self.heartbeat_s, self.silence_s = HEARTBEAT_S, SILENCE_S
        self.epoch = 0
        self.session_id = b""
        self.last_step = 0
        self.report_count = 0
        self.disagreement_count = 0
        self._was_open = False
        self._misread_count = 0  # consecutive reports after which the allocator's state still differed
        self._unanswered: deque[packed.SessionRequest] = deque()
        self._unheard_heartbeats = 0
        self.worker: pb.RoutedWorker | None = None
        self._told_worker: pb.RoutedWorker | None = None

    @property
    def has_room(self) -> bool:
        """Tells whether another step may be submitted."""
        return len(self._unanswered) < self.window

    @property
    def unanswered_count(self) -> int:
        """Returns the number of submitted steps without an answer."""
        return len(self._unanswered)

    @property
    def beat_s(self) -> float:
        """Returns the seconds between two heartbeats. At least three heartbeats fit into a lease."""
        return min(self.heartbeat_s, self.lease_s / _HEARTBEATS_PER_LEASE)

    @property
    def is_quiet(self) -> bool:
        """Tells whether the allocator has nothing to send until it gets another message."""
        is_answered = not self._unanswered and not self._unheard_heartbeats
        return self.phase is Phase.OPEN and is_answered and not self.outbox

    # -- streams -------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Begins a stream under a new epoch. Messages of older streams are ignored."""
        self.epoch += 1
        self.phase = Phase.ATTACHING
        self.outbox.clear()
        self.outbox.append(
            packed.SessionRequest(
                attach=pb.Attach(
                    version=PROTOCOL_VERSION,
                    pool=self.pool,
                    incarnation=self.incarnation,
                    epoch=self.epoch,
                    resume_session=self.session_id,
                    last_step=self.last_step,
                    spec=self.spec,
                    window=self.window,
                    worker=self.worker,
                )
            )
        )
        self._told_worker = self.worker

    def lose_stream(self) -> None:
        """Notes that the stream is lost. Unanswered steps are sent again on the next stream."""
        self.phase = Phase.IDLE
        self.outbox.clear()

    def disown(self) -> None:
        """Makes the next stream report instead of resume, because the allocator's state differs from this owner's."""
        self.lose_stream()
        self.session_id = b""

    def start_over(self) -> list[int]:
        """Empties the ledger and returns the numbers of the abandoned steps."""
        self.disown()
        last_sequence_id = self.ledger.last_sequence_id
        self.ledger = Ledger(self.spec)
        self.ledger.last_sequence_id = last_sequence_id
        return self.give_up_steps()

    def give_up_steps(self) -> list[int]:
        """Abandons unanswered steps. Call this only if none of these steps was or will be applied."""
        numbers = [request.step.number for request in self._unanswered]
        self._unanswered.clear()
        return numbers

    def judge(self, error: QuireError | None) -> Verdict:
        """Decides what to do after a stream ended with `error` (None if it gave no reason). Changes nothing."""
        if error is None or error.reason is None or error.reason in _AGAIN or error.reason in _DISAGREE:
            return Verdict.AGAIN  # An error without a reason comes from gRPC or a proxy, not from an allocator.
        if self.phase is Phase.OPEN:
            return Verdict.STEP_REFUSED
        if error.reason in _LATER:
            return Verdict.LATER
        if self.phase is Phase.REPORTING and error.reason in _UNREPORTABLE:
            return Verdict.LOST
        return Verdict.REFUSED if self._was_open else Verdict.FINAL

    def ended(self, error: QuireError | None) -> tuple[Verdict, list[int]]:
        """Notes that the allocator ended the stream. Returns the verdict, and the steps that fail with it."""
        verdict = self.judge(error)
        if error is not None and error.reason in _DISAGREE:
            self.disagreement_count += 1
            self.disown()
        self.lose_stream()
        if verdict is Verdict.LOST:
            return verdict, self.start_over()
        if verdict is Verdict.STEP_REFUSED:
            return verdict, self.give_up_steps()
        return verdict, []

    # -- sending -------------------------------------------------------------------------------------------------------

    def submit(self, operations: StepBuilder) -> int:
        """Submits the next step and returns its number. The window must not be full.

        Raises:
            ResourceExhaustedError: TOO_LARGE, the allocator accepts fewer operations or bytes. Nothing was submitted.
            ValueError: a number does not fit the message, or an id is not new, or unknown. Nothing was submitted.
        """
        assert self.has_room, "the window is full: wait for an answer before the next step"
        request = packed.SessionRequest()
        step, number = request.step, self.last_step + len(self._unanswered) + 1
        operations.fill(step)
        self._check_ids(operations)
        step.number = number
        self._check_size("operations", operations.operation_count, self.limits.operations_per_step_max)
        byte_count = step.ByteSize() + _SENT_WITH_BYTES
        self._check_size("bytes", byte_count, self.limits.step_bytes_max or MESSAGE_BYTES_MAX)
        self._unanswered.append(request)
        if self.phase is Phase.OPEN:
            self._send_step(request)
        return number

    def _check_ids(self, operations: StepBuilder) -> None:
        """Refuses ids that are not new, or unknown. Only the id identifies a sequence on the wire. A reused id would
        get another sequence's blocks, and an unknown id would create a sequence that is never freed."""
        created = self.ledger.last_sequence_id
        if operations.names_no_newer(created):  # Most steps create no sequence.
            return
        highest = created
        for request in self._unanswered:
            step = request.step
            highest = max((highest, *unpack_uint64(step.forks.children), *unpack_uint64(step.grows.sequences)))
        operations.check_ids(created, highest)

    @staticmethod
    def _check_size(what: str, count: int, most: int) -> None:
        """Refuses a count above `most`. 0 means that no allocator has sent a limit."""
        if 0 < most < count:
            raise QuireError.of(
                Reason.TOO_LARGE, f"the step has {count} {what}, but the allocator accepts at most {most}"
            )

    def heartbeat(self) -> None:
        """Keeps the lease. The acknowledgement in a heartbeat lets watchers see the changes of the last steps."""
        if self.phase in (Phase.OPEN, Phase.REPORTING):
            # Heartbeats during a report are not counted, because the allocator answers the report before them.
            self._unheard_heartbeats += self.phase is Phase.OPEN
            news = None if self.worker == self._told_worker else self.worker
            self._told_worker = self.worker
            self.outbox.append(packed.SessionRequest(heartbeat=pb.Heartbeat(ack=self.last_step, worker=news)))

    def detach(self) -> None:
        """Gives the pool back. The allocator then ends the stream."""
        if self.phase is Phase.OPEN:
            self.outbox.append(packed.SessionRequest(detach=pb.Detach()))

    # -- receiving -----------------------------------------------------------------------------------------------------

    def receive(self, reply: packed.SessionReply) -> Answer | None:
        """Applies the current stream's next message.

        Returns the answer if the message answers a step. If the owner is IDLE afterwards, its state differs from the
        allocator's, and the stream must be replaced.

        Raises:
            InternalError: the allocator broke the protocol. The owner is IDLE, and its session is not resumed.
            FailedPreconditionError: VERSION, the allocator does not know a feature of the pool.
            LedgerLostError: the allocator broke the protocol and spoiled the ledger. The owner starts over, empty.
        """
        kind = reply.WhichOneof("message")
        try:
            if kind == "step_reply" and self.phase is Phase.OPEN:
                return self._take_answer(reply.step_reply)
            if kind == "heartbeat" and self.phase in (Phase.REPORTING, Phase.OPEN):
                self._unheard_heartbeats = max(0, self._unheard_heartbeats - 1)
                return None
            if kind == "resumed" and self.phase is Phase.ATTACHING:
                self._resume(reply.resumed)
            elif kind == "report_required" and self.phase is Phase.ATTACHING:
                self._report()
            elif kind == "ready" and self.phase is Phase.REPORTING:
                self._open(reply.ready)
            else:
                raise InternalError(
                    f"the allocator sent {kind or 'an empty message'} in the phase {self.phase.name.lower()}"
                )
        except LedgerLostError:
            self.disagreement_count += 1
            self.start_over()
            raise
        except InternalError:
            self.disagreement_count += 1
            self.disown()
            raise
        return None

    def _resume(self, resumed: pb.Resumed) -> None:
        steps_applied = resumed.next_step - 1 - self.last_step
        if resumed.session_id != self.session_id or not 0 <= steps_applied <= len(self._unanswered):
            raise InternalError("the allocator resumed a session other than ours")
        self._enter(resumed)
        for request in self._unanswered:
            if request.step.session_id:
                self.outbox.append(request)  # The request was sent before, and is sent again unchanged.
            else:
                self._send_step(request)

    def _report(self) -> None:
        self.phase = Phase.REPORTING
        self.report_count += 1
        chunks = report_chunks(self.ledger)
        for chunk in chunks:
            self.outbox.append(packed.SessionRequest(report_chunk=chunk))
        end = report_end(chunks, last_step=self.last_step, last_sequence_id=self.ledger.last_sequence_id)
        self.outbox.append(packed.SessionRequest(report_end=end))

    def _open(self, ready: pb.Ready) -> None:
        if ready.next_step != self.last_step + 1:
            raise InternalError(f"the allocator expects step {ready.next_step}, but our last step is {self.last_step}")
        if ready.state_digest and ready.state_digest != self.ledger.digest():
            self._misread_count += 1
            if self._misread_count >= _MISREADINGS_MAX:
                raise InternalError("the allocator repeatedly built a state from our report that differs from ours")
            self.disagreement_count += 1
            self.disown()  # The next report opens a new session. Unanswered steps are sent under the new session.
            return
        self._misread_count = 0
        self.session_id = ready.session_id
        self._enter(ready)
        for request in list(self._unanswered):
            self._send_step(request)

    def _enter(self, opened: pb.Resumed | pb.Ready) -> None:
        check_served(self.spec.features, opened.features)
        self.phase, self._was_open = Phase.OPEN, True
        self._unheard_heartbeats = 0
        self.limits = opened.limits
        self.lease_s = opened.lease_ms / 1000 or math.inf
        heartbeat_ms, silence_ms = opened.limits.heartbeat_ms, opened.limits.silence_ms
        self.heartbeat_s = max(heartbeat_ms / 1000, _PERIOD_S_MIN) if heartbeat_ms else HEARTBEAT_S
        self.silence_s = max(silence_ms / 1000, _PERIOD_S_MIN) if silence_ms else SILENCE_S

    def _send_step(self, request: packed.SessionRequest) -> None:
        step = request.step
        step.session_id, step.ack = self.session_id, self.last_step
        self.outbox.append(request)

    def _take_answer(self, reply: packed.StepReply) -> Answer:
        if not self._unanswered:
            raise InternalError(f"the allocator answered step {reply.number}, which is not waiting for an answer")
        step = self._unanswered[0].step
        number = step.number
        if reply.number != number or reply.session_id != self.session_id:
            raise InternalError(f"the answer to step {number} has the number of step {reply.number}")
        try:
            outcome = read_reply(step, reply, len(self.ledger.groups))
        except ValueError as error:
            raise InternalError(f"the answer to step {number} does not match the step: {error}") from error
        self._unanswered.popleft()
        self.last_step = number
        try:
            self.ledger.apply(step, outcome)
        except (LookupError, ValueError, OverflowError) as error:
            raise LedgerLostError(f"the answer to step {number} contradicts our ledger: {error!r}") from error
        digest = reply.state_digest
        if digest and digest != self.ledger.digest_after(number):
            self.disagreement_count += 1
            self.disown()
        return Answer(number, outcome)
