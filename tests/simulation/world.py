"""The product's own state machines, with a faulty transport, a virtual clock and one seeded scheduler.

Real parts: `quire_allocator.session.machine` with its pool, `quire.session.owner` with its ledger. Simulated parts:
streams (`Link`), dying processes, time, and an engine that writes tokens into pages and reads them back (`histories`).

Every message is serialized when it is sent, so that a dead stream can still deliver it later.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from quire.errors import QuireError, Reason
from quire.protocol.steps import StepBuilder
from quire.session.owner import Phase, PoolOwner, Verdict
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.machine import Phase as StreamPhase
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.registry import SessionRegistry

from tests.simulation.cache_view import CacheView, counts_of
from tests.simulation.histories import History

LEASE_S = 10.0
POOL = "pool"


class ViolationError(AssertionError):
    """A rule of the protocol was violated."""


@dataclass
class Clock:
    """A clock that the scheduler advances."""

    now: float = 1000.0


class Quiet:
    """A silent log; remembers the events that the checks read."""

    def __init__(self) -> None:
        self.quarantined_pools: list[tuple[str, Exception]] = []
        self.expired_pools: list[Ownership] = []

    def opened(self, owner: Ownership) -> None: ...

    def recovered(self, owner: Ownership, reported_block_count: int, asked: float) -> None: ...

    def disagreed(self, owner: Ownership) -> None: ...

    def resumed(self, owner: Ownership) -> None: ...

    def dropped(self, owner: Ownership) -> None: ...

    def published(self, owner: Ownership) -> None: ...

    def expired(self, owner: Ownership) -> None:
        self.expired_pools.append(owner)

    def quarantined(self, owner: Ownership, error: Exception) -> None:
        self.quarantined_pools.append((owner.name, error))


class Allocator:
    """One allocator process after another at one address. `crash` ends one and starts the next, which is empty."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self._rng = rng
        self.links: list[Link] = []
        self.heard: dict[int, float] = {}
        self.start()

    def start(self) -> None:
        """Starts a new process."""
        self.directory = Directory(lease_s=LEASE_S, pools_max=2)
        self.observer = Quiet()
        self.sessions = SessionRegistry(
            self.directory, self.observer, new_session_id=lambda: self._rng.randbytes(16), check_invariants=False
        )
        self.heard = {}

    def crash(self) -> None:
        """Loses all state and every stream. Replies in flight may still arrive."""
        for link in self.links:
            link.server_died()
        self.links = []
        self.start()


@dataclass(eq=False)
class Link:
    """One stream, in order both ways. The client may be gone long before the server notices."""

    allocator: Allocator
    clock: Clock
    to_server: deque[bytes] = field(default_factory=deque)
    # Messages and errors to the client; None stands for an error of gRPC itself.
    to_client: deque[bytes | QuireError | None] = field(default_factory=deque)
    client_gone: bool = False
    server_gone: bool = False

    def __post_init__(self) -> None:
        self.machine = SessionMachine(self.allocator.sessions, self._ended_from_outside)
        self.allocator.links.append(self)

    def deliver_to_server(self) -> None:
        """Lets the server handle the oldest message."""
        data, machine = self.to_server.popleft(), self.machine
        try:
            replies = machine.receive(packed.SessionRequest.FromString(data), self.clock.now)
        except Refusal as refusal:
            self._close(QuireError.of(Reason(refusal.reason), refusal.message))
            return
        self.to_client.extend(reply.SerializeToString() for reply in replies)
        if machine.owner is not None:
            self.allocator.heard[id(machine.owner)] = self.clock.now
        if machine.phase is StreamPhase.DETACHED:
            self._close(None)

    def server_beats(self) -> None:
        """Lets the server send a heartbeat while it reads a report."""
        if not self.server_gone and self.machine.phase is StreamPhase.REPORTING:
            self.to_client.append(packed.SessionReply(heartbeat=pb.Heartbeat()).SerializeToString())

    def server_notices(self) -> None:
        """Tells the server that the client is gone."""
        self._close(None)

    def server_died(self) -> None:
        """Ends the server's process, with all messages that it has not read."""
        self.server_gone = True
        self.to_server.clear()
        self.to_client.append(None)

    def _ended_from_outside(self) -> None:
        ending = self.machine.ending
        assert ending is not None
        self._close(QuireError.of(Reason(ending.reason), ending.message))

    def _close(self, error: QuireError | None) -> None:
        if not self.server_gone:
            self.server_gone = True
            self.machine.close()
            self.allocator.links.remove(self)
            self.to_client.append(error)


class Worker:
    """One life of the worker process, which has the pages.

    Attributes:
        answered: steps whose answers were applied.
        waits_until: the worker tries nothing before this time.
        heard_at: when the current stream last delivered a message.
    """

    def __init__(self, spec: pb.PoolSpec, rng: random.Random, clock: Clock, counts: Counter[str], window: int) -> None:
        self.rng = rng
        self.clock = clock
        self.counts = counts
        self.owner = PoolOwner(POOL, spec, incarnation=rng.randbytes(16), window=window)
        self.history = History(spec, rng)
        self.link: Link | None = None
        self.old_links: list[Link] = []
        self.answered = 0
        self.waits_until = 0.0
        self.heard_at = 0.0
        self.steps_without_answer = 0
        self.view = CacheView(spec)
        self._steps: dict[int, packed.Step] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether the worker is attached, with nothing in flight in either direction."""
        link = self.link
        return (
            self.owner.phase is Phase.OPEN
            and link is not None
            and not (link.to_server or link.to_client or link.server_gone)
        )

    def connect(self, allocator: Allocator) -> None:
        """Opens a new stream to the process behind the name."""
        self.leave()
        self.link = Link(allocator, self.clock)
        self.heard_at = self.clock.now
        self.owner.attach()
        self.flush()

    def leave(self) -> None:
        """Loses the stream. The server may not notice for long."""
        if self.link is not None:
            self.link.client_gone = True
            self.old_links.append(self.link)
            self.link = None
            self.owner.lose_stream()

    def flush(self) -> None:
        """Sends the messages of the outbox."""
        while self.owner.outbox and self.link is not None:
            self.link.to_server.append(self.owner.outbox.popleft().SerializeToString())

    def act(self) -> None:
        """Sends a step if the window has room, after all answers or ahead of some."""
        owner = self.owner
        if not owner.has_room:
            return
        self.submit(self.history.make(ahead=owner.unanswered_count > 0))

    def submit(self, step: StepBuilder) -> None:
        """Submits a step."""
        number = self.owner.submit(step)
        self._steps[number] = step.message
        self.flush()

    def receive(self) -> None:
        """Handles the oldest message of the current stream."""
        assert self.link is not None
        message = self.link.to_client.popleft()
        if message is None or isinstance(message, QuireError):
            self._ended(message)
            return
        self.heard_at = self.clock.now
        reports, committed = self.owner.report_count, counts_of(self.owner.ledger)
        answer = self.owner.receive(packed.SessionReply.FromString(message))
        if self.owner.report_count > reports:
            self.view.lose()
        if self.owner.disagreement_count:
            raise ViolationError("both sides' states differ")
        if answer is not None:
            step = self._steps.pop(answer.number)
            fails = self.rng.random() < 0.05
            self.counts["device failures"] += fails
            self.counts["drops"] += len(step.drops)
            self.counts["outside drops"] += len(answer.outcome.outside_drops)
            self.view.take(step, answer.outcome, committed)
            self.history.take(step, answer.outcome, self.owner.ledger, fails=fails)
            self.answered += 1
            self.steps_without_answer = 0
        self.flush()

    def _ended(self, error: QuireError | None) -> None:
        verdict, _ = self.owner.ended(error)
        self.link = None
        if error is not None and error.reason is Reason.FENCED:
            raise ViolationError(f"our newest stream was fenced: {error}")
        if verdict in (Verdict.LOST, Verdict.STEP_REFUSED, Verdict.REFUSED, Verdict.FINAL):
            raise ViolationError(f"the allocator refused us: {error}")
        if self.owner.disagreement_count:
            raise ViolationError(f"the allocator does not know our steps: {error}")
        if error is not None and error.reason is Reason.POOL_OWNED:
            self.counts["refused as a rival"] += 1
        self.waits_until = self.clock.now + (self.rng.uniform(0.2, 1.0) if verdict is Verdict.LATER else 0.05)
