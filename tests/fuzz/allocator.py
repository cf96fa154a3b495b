"""Sends malformed messages to the allocator's handlers and state machines directly, without a network.

An `Episode` has three pools: one is owned over streams, one by unary calls, and one by a bystander.
Each round takes a valid request, spoils it, and sends it. Conditions:

- the only exception is a `Refusal` with a reason of the table; POOL_QUARANTINED would be a defect
- a refused request changes nothing, and an accepted one does not change the other pools
- an accepted request keeps the pool's invariants, and its owner reads the answer as the allocator meant it
- the valid request is served afterwards"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from quire.errors import Reason
from quire.protocol.permissions import EVERYTHING
from quire.session.block_report import report_chunks, report_end
from quire.session.owner import Phase, PoolOwner
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.readers import invariants
from quire_allocator.core.refusal import Refusal
from quire_allocator.metrics.counters import Counters
from quire_allocator.service import AllocatorService
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.steps import pool_digest

from tests.fuzz.look import deeply_seen_of, seen_of
from tests.fuzz.messages import Malformer
from tests.fuzz.requests import GROW, READING, Plausible, pool_of
from tests.simulation.histories import GROUPS, pool_spec
from tests.simulation.world import Quiet

UNARY = ("OpenSession", "Apply", "DropCache", "CloseSession")
INVARIANTS_EVERY, LOOK_DEEPER_EVERY = 16, 16  # intervals of checks, in accepted requests and in messages


class ViolationError(AssertionError):
    """A condition above was violated."""


@dataclass
class Seen:
    """The counts of a run: messages by kind, and answers by reason ("OK" if accepted)."""

    messages: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return sum(self.messages.values())


class Clock:
    """A clock that an episode advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Episode:
    """Makes pools and malformed messages to them, from one source of chance."""

    def __init__(self, chance: random.Random, seen: Seen) -> None:
        self.chance = chance
        self.seen = seen
        self.clock = Clock()
        self.malformer = Malformer(chance)
        self.plausible = Plausible(chance)
        self.directory = Directory(lease_s=10.0, pools_max=6, blocks_max=400)
        self.service = AllocatorService(self.directory, Counters(), clock=self.clock)
        self.sessions = self.service.sessions
        self.sessions.observer, self.sessions.new_session_id = Quiet(), lambda: chance.randbytes(16)
        self._incarnations = itertools.count(1)
        self._accepted = 0
        kinds = chance.choice(sorted(GROUPS))
        self.spec = pool_spec(kinds, chance.choice((12, 24, 48)), chance.choice(("lru", "")))
        self.owner, self.machine = self._attached("pool")
        self.bystander, self.bystander_machine = self._attached("bystander")
        self.unary_id = self._open_unary()
        for _ in range(12):
            self._right_step(self.owner, self.machine)
            self._right_step(self.bystander, self.bystander_machine)
            self._right_unary()
        self._state = self._look()

    # -- kinds of rounds -----------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Sends one malformed message, or one exchange that contains a malformed message."""
        self.clock.now += self.chance.random() * 0.02
        for owner in self.directory._owners.values():
            owner.lease_end = self.clock.now + 10.0  # extends each lease, so that no lease expires by accident
        rounds = (self._bad_step, self._bad_step, self._bad_unary, self._bad_unary, self._bad_reading)
        self.chance.choice((*rounds, self._bad_message, self._bad_attach, self._bad_report))()
        if self.chance.random() < 0.05 and not self.is_worn_out:
            self._right_step(self.owner, self.machine)
            self._right_unary()
            self._state = self._look()

    def end(self) -> None:
        """Causes refusals that malformed messages alone do not: by a crowd, a defect, silence, and a draining
        server."""
        for owner, machine in ((self.owner, self.machine), (self.bystander, self.bystander_machine)):
            machine.close()
            self.sessions.drop(self.directory._owners[owner.pool])
        self._crowd()
        self.owner, self.machine = self._attached("pool")
        self.directory.pool("pool").pool.blocks.cached_count += 1  # a planted defect
        self.sessions.check_invariants = True
        self._expect("POOL_QUARANTINED")
        self.owner, self.machine = self._attached("last")
        self.clock.now += 11.0
        self.sessions.expire(self.clock.now)
        self._expect("IDLE")
        self.machine = SessionMachine(self.sessions)
        self.sessions.drain()
        self._expect("DRAINING")

    def _crowd(self) -> None:
        """Sends more concurrent reports, and more pools, than the allocator admits."""
        self._state = self._look()
        freed = pb.ReportChunk(freed_blocks=bytes(4), freed_steps=[1], freed_operations=[1], freed_positions=[1])
        chunk = packed.SessionRequest(report_chunk=freed)
        crowd = [SessionMachine(self.sessions) for _ in range(limits.REPORTS_MAX + 4)]
        for place, machine in enumerate(crowd):
            attach = self._attach_message(f"crowd-{place}")
            attach.spec.block_count, attach.last_step = 8, int(place <= limits.REPORTS_MAX)  # 0: nothing to report
            if self._receive(machine, packed.SessionRequest(attach=attach), "Session: attach", attach.pool) is not None:
                self._receive(machine, chunk, "Session: report", attach.pool)
        for machine in crowd:
            machine.close()
        self.clock.now += 11.0
        self.sessions.expire(self.clock.now)

    def _expect(self, reason: str) -> None:
        """Checks that the owner's next message is refused with this reason."""
        self.seen.messages["Session: step"] += 1
        step = packed.Step(session_id=self.owner.session_id, number=1, grows=GROW)
        try:
            self.machine.receive(packed.SessionRequest(step=step), self.clock.now)
        except Refusal as refusal:
            self.seen.answers[Reason(refusal.reason)] += 1
            if refusal.reason != reason:
                raise
            return
        raise ViolationError(f"what should be {reason} was accepted")

    @property
    def is_worn_out(self) -> bool:
        """Whether hardly any sequence ids are left above the highest one."""
        return any(owner.pool.last_sequence_id > 1 << 60 for owner in self.directory.open_pools())

    def _spoil(self, message: Message) -> Message | None:
        malformer = self.malformer
        malformer.words = [b"", self.owner.session_id, self.unary_id, *self.plausible.digests]
        malformer.names = ["", "pool", "unary", "bystander", "tenant", "lru", self.plausible.used_id]
        malformer.numbers = [0, *self.owner.ledger.sequences, self.owner.last_step, self.owner.ledger.last_sequence_id]
        match self.chance.randint(0, 5):
            case 0:
                return malformer.anything(type(message))
            case 1 | 2:
                return malformer.in_bytes(message)
            case _:
                return malformer.changed(message)

    def _bad_step(self) -> None:
        step = self.plausible.step(self.owner.ledger, self.directory.pool("pool").pool).message
        number = self.owner.last_step + 1
        step.session_id, step.number, step.ack = self.owner.session_id, number, self.owner.last_step
        bad = self._spoil(step)
        if bad is not None:
            self._send_step(bad)

    def _send_step(self, bad: Message) -> None:
        request = packed.SessionRequest(step=bad)
        replies = self._receive(self.machine, request, "Session: step", "pool")
        if replies is None:
            self._resume()
        elif request.step.number == self.owner.last_step + 1:
            self._take_over(request, replies)

    def _take_over(self, request: packed.SessionRequest, replies: list[packed.SessionReply]) -> None:
        """Reads the answer to a changed step that is still valid, and checks that both sides agree on its effects."""
        owner = self.owner
        owner._unanswered.append(request)
        for reply in replies:
            owner.receive(reply)
        if owner.ledger.digest() != pool_digest(self.directory.pool("pool").pool):
            raise ViolationError("owner and allocator disagree on what a step did")

    def _bad_message(self) -> None:
        """Sends a malformed message of any kind, at any time."""
        right = self.chance.choice(
            (
                packed.SessionRequest(heartbeat=pb.Heartbeat(ack=self.owner.last_step)),
                packed.SessionRequest(report_end=pb.ReportEnd(chunk_count=1)),
                packed.SessionRequest(report_chunk=pb.ReportChunk(freed_blocks=bytes(8))),
                packed.SessionRequest(attach=self._attach_message("pool")),
                packed.SessionRequest(),
            )
        )
        bad = self._spoil(right)
        if bad is None or bad.WhichOneof("message") == "detach":  # type: ignore[arg-type]
            return
        if bad.WhichOneof("message") == "step":  # type: ignore[arg-type]
            self._send_step(bad.step)  # type: ignore[attr-defined]
        elif self._receive(self.machine, bad, "Session: any", "pool") is None:  # type: ignore[arg-type]
            self._resume()

    def _bad_attach(self) -> None:
        bad = self._spoil(self._attach_message(self.chance.choice(("pool", "pool", "other", "unary", "bystander"))))
        if bad is None:
            return
        machine = SessionMachine(self.sessions)
        name = bad.pool  # type: ignore[attr-defined]
        accepted = self._receive(machine, packed.SessionRequest(attach=bad), "Session: attach", name)
        machine.close()
        if accepted is None:
            return
        claimed = machine.owner
        assert claimed is not None
        if name == "pool":
            self._resume(epoch=claimed.epoch)
        elif name == "bystander":
            raise ViolationError("a bystander's pool was taken")
        else:
            self.sessions.drop(claimed)
            self._state = self._look()

    def _bad_report(self) -> None:
        """Reports the owner's pool under another name, with an error in a chunk or in the report's end."""
        chunks = report_chunks(self.owner.ledger)
        place = self.chance.randint(0, len(chunks))
        if place < len(chunks):
            spoiled = self._spoil(chunks[place])
            if spoiled is None:
                return
            chunks[place] = spoiled  # type: ignore[call-overload]
        last_id = self.owner.ledger.last_sequence_id
        end: Any = report_end(chunks, last_step=self.owner.last_step, last_sequence_id=last_id)
        if place == len(chunks) or self.chance.random() < 0.1:
            end = self._spoil(end)
            if end is None:
                return
        machine = SessionMachine(self.sessions)
        machine.receive(packed.SessionRequest(attach=self._attach_message("reported")), self.clock.now)
        self._state = self._look()
        requests = [packed.SessionRequest(report_chunk=chunk) for chunk in chunks] + [
            packed.SessionRequest(report_end=end)
        ]
        for request in requests:
            if self._receive(machine, request, "Session: report", "reported") is None:
                break
        machine.close()
        if machine.owner is not None:
            if machine.phase is type(machine.phase).OPEN:
                invariants.check(machine.owner.pool)
            self.sessions.drop(machine.owner)
        self._state = self._look()

    def _bad_unary(self) -> None:
        method = self.chance.choice((*UNARY, *["Apply"] * len(UNARY)))
        right = self.plausible.unary(method, self.directory.session(self.unary_id), self.spec)
        bad = self._spoil(right)
        if bad is None:
            return
        if isinstance(bad, packed.Step) and bad.number and self.chance.random() < 0.1:
            bad.number -= 1  # the previous step's number, but other content
        answer = self._call(method, bad)
        if method == "OpenSession" and answer is not None and bad.pool != "unary":  # type: ignore[attr-defined]
            self.sessions.drop(self.directory.pool(bad.pool))  # type: ignore[attr-defined]
            self._state = self._look()
        if "unary" not in self.directory._owners:
            self.unary_id = self._open_unary()
            self._state = self._look()

    def _bad_reading(self) -> None:
        method = self.chance.choice(READING)
        bad = self._spoil(self.plausible.reading(method))
        if bad is not None:
            self._call(method, bad)

    # -- conditions ----------------------------------------------------------------------------------------------------

    def _receive(
        self, machine: SessionMachine, request: packed.SessionRequest, kind: str, pool: str
    ) -> list[packed.SessionReply] | None:
        """Returns the answers, or None if the request was refused."""
        return self._judged(kind, pool, lambda: machine.receive(request, self.clock.now))

    def _call(self, method: str, request: Message) -> Message | None:
        handler = getattr(AllocatorService, method).__wrapped__
        answer: Message | None = self._judged(
            method, pool_of(request), lambda: handler(self.service, request, EVERYTHING)
        )
        if answer is not None:
            answer.SerializeToString()
        return answer

    def _judged(self, kind: str, pool: str, send: Any) -> Any:
        self.seen.messages[kind] += 1
        is_deep = self.seen.count % LOOK_DEEPER_EVERY == 0
        deep = self._look(deeply_seen_of) if is_deep else None
        try:
            answer = send()
        except Refusal as refusal:
            self.seen.answers[Reason(refusal.reason)] += 1
            if refusal.reason == "POOL_QUARANTINED":
                raise ViolationError(f"{kind}: an invariant broke") from refusal
            if self._look() != self._state or (is_deep and self._look(deeply_seen_of) != deep):
                raise ViolationError(f"{kind}: refused as {refusal.reason}, and something has changed") from refusal
            return None
        self.seen.answers["OK"] += 1
        state = self._look()
        for name, before in self._state.items():
            if name != pool and state.get(name) != before and name not in ("other", "reported"):
                raise ViolationError(f"{kind} on pool {pool!r} changed pool {name!r}")
        self._state = state
        self._accepted += 1
        if self._accepted % INVARIANTS_EVERY == 0:
            self.directory.check_invariants()
        return answer

    def _look(self, of: Callable[[Ownership], Any] | None = None) -> dict[str, Any]:
        """Returns everything that a refused request must not change."""
        see = of or seen_of
        return {name: see(owner) for name, owner in self.directory._owners.items() if owner.session_id}

    # -- valid requests ------------------------------------------------------------------------------------------------

    def _attach_message(self, name: str) -> pb.Attach:
        is_own = name == "pool"
        return pb.Attach(
            version=3,
            pool=name,
            incarnation=self.owner.incarnation if is_own else b"someone else    ",
            epoch=self.owner.epoch + 1 if is_own else 1,
            resume_session=self.owner.session_id,
            last_step=self.owner.last_step,
            spec=self.spec,
            window=1,
        )

    def _attached(self, name: str) -> tuple[PoolOwner, SessionMachine]:
        incarnation = next(self._incarnations).to_bytes(16, "big")
        owner, machine = PoolOwner(name, self.spec, incarnation=incarnation), SessionMachine(self.sessions)
        owner.attach()
        self._talk(owner, machine)
        return owner, machine

    def _talk(self, owner: PoolOwner, machine: SessionMachine) -> None:
        while owner.outbox:
            for reply in machine.receive(owner.outbox.popleft(), self.clock.now):
                owner.receive(reply)
        if owner.phase is not Phase.OPEN:
            raise ViolationError(f"a right message of {owner.pool} was not served")

    def _resume(self, epoch: int = 0) -> None:
        """Attaches the owner again after its stream has ended, and checks that everything is as before."""
        self.machine.close()
        owner = self.owner
        if max(epoch, owner.epoch) >= (1 << 64) - 2:  # No higher epoch exists, so only a new owner can attach.
            self.sessions.drop(self.directory._owners["pool"])
            self.owner, self.machine = self._attached("pool")
            self._state = self._look()
            return
        reports = owner.report_count
        owner.lose_stream()
        owner.epoch = max(epoch, owner.epoch)
        owner.attach()
        self.machine = SessionMachine(self.sessions)
        self._talk(owner, self.machine)
        if owner.report_count != reports:
            raise ViolationError("a refused message cost the session")
        self._state = self._look()

    def _right_step(self, owner: PoolOwner, machine: SessionMachine) -> None:
        owner.submit(self.plausible.step(owner.ledger, self.directory.pool(owner.pool).pool))
        self._talk(owner, machine)

    def _open_unary(self) -> bytes:
        request_id = f"open {next(self._incarnations)}"
        request = pb.OpenSessionRequest(version=3, request_id=request_id, pool="unary", spec=self.spec)
        return bytes(AllocatorService.OpenSession.__wrapped__(self.service, request, EVERYTHING).session_id)  # type: ignore[attr-defined]

    def _right_unary(self) -> None:
        request = self.plausible.unary("Apply", self.directory.session(self.unary_id), self.spec)
        AllocatorService.Apply.__wrapped__(self.service, request, EVERYTHING)  # type: ignore[attr-defined]
