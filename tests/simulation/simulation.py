"""The seeded scheduler: runs one event after another, some of them faults, and compares states while nothing is in
flight.

    result = Simulation(seed=7).run(100_000)

The same seed gives the same events, so running again repeats a violation.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

from quire.errors import Reason
from quire.protocol.features import FIRST_BLOCK_ID, TELLS_REMOVED
from quire.protocol.limits import SILENCE_S
from quire.session import block_report
from quire.session.owner import Phase
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.drop import CacheDrop
from quire_allocator.core.refusal import Refusal

from tests.simulation import checks
from tests.simulation.histories import GROUPS, pool_spec
from tests.simulation.world import LEASE_S, Allocator, Clock, Link, ViolationError, Worker

FAULT_RATES = (0.05, 0.2, 0.6)  # shares of faults among all events; each simulation has one of them
SMALL_CHUNKS = {
    "REPORT_CHUNK_ENTRIES_MAX": 5,
    "REPORT_CHUNK_BYTES_MAX": 248,  # holds the fixed bytes of a sequence, and all ends of its answer
    "HEADS_MAX": 4,
}  # these limits are so small that every report is split
STUCK_STEPS = 2000  # With this many steps without an answer, although the owner tries, the run fails.
FAULTS = {
    "stream lost": 6,
    "stream lost, server notices late": 6,
    "allocator crashes": 2,
    "allocator crashes with replies lost": 2,
    "worker wanders": 2,
    "worker crashes": 1,
    "rival attaches": 4,
    "lease ends": 2,
    "server stands still": 8,
    "client stands still": 8,
    "allocator drains": 1,
    "old stream delivers": 30,
    "old stream is noticed": 20,
}


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        violation: the broken rule, with the number of the step; empty if none.
    """

    seed: int
    steps: int = 0
    faults: int = 0
    comparisons: int = 0
    answers: int = 0
    reports: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    violation: str = ""


class Simulation:
    """One pool, two allocators behind one name, one worker process after another, and rival processes."""

    def __init__(self, seed: int, *, kinds: str = "", fault_rate: float | None = None) -> None:
        self.rng = rng = random.Random(seed)
        usual_rate = rng.choice(FAULT_RATES)
        self.fault_rate = usual_rate if fault_rate is None else fault_rate
        self.clock = Clock()
        self.outcome = Outcome(seed)
        kinds = kinds or rng.choice(list(GROUPS))
        blocks = rng.choice([12, 20, 32]) * (1 if len(GROUPS.get(kinds, ())) == 1 else 3)
        quotas = [pb.Quota(namespace="tenant", cached_blocks_max=2)] if rng.random() < 0.4 else []
        retention = "dense" if seed % 4 == 0 else "auto"
        first = rng.choice([0, 0, 1, 7])
        asked = [TELLS_REMOVED, *([FIRST_BLOCK_ID] if first else [])]
        self.spec = pool_spec(kinds, blocks, quotas=quotas, retention=retention, first_block_id=first, features=asked)
        self.window = rng.choice([1, 1, 2, 3])
        self.allocators = [Allocator(name, rng) for name in ("A1", "A2")]
        self.worker = self._new_worker()
        self.dead_links: list[Link] = []

    def run(self, steps: int) -> Outcome:
        """Runs this many events, or stops at a violation."""
        outcome = self.outcome
        with mock.patch.multiple(block_report, **SMALL_CHUNKS):
            for number in range(steps):
                outcome.steps = number + 1
                try:
                    self._event()
                except Exception as error:  # Any error of a state machine is a finding.
                    outcome.violation = f"step {number + 1}: {type(error).__name__}: {error}"
                    break
        return outcome

    # -- one event -----------------------------------------------------------------------------------------------------

    def _event(self) -> None:
        rng, worker = self.rng, self.worker
        self.clock.now += rng.expovariate(20.0)
        if rng.random() < self.fault_rate:
            while not self._fault(*rng.choices(list(FAULTS), list(FAULTS.values()))):
                pass
        elif worker.link is None:
            self._connect()
        else:
            self._progress(worker)
        self._look()

    def _progress(self, worker: Worker) -> None:
        link, rng = worker.link, self.rng
        assert link is not None
        choices = []
        if link.to_server and not link.server_gone:
            choices += ["serve"] * 4
        if link.to_client:
            choices += ["receive"] * 4
        if worker.owner.phase is Phase.OPEN and worker.owner.has_room:
            choices += ["act"] * 2
        if rng.random() < 0.05 or not choices:
            choices.append("beat")
        choice = rng.choice(choices)
        if choice == "serve":
            link.deliver_to_server()
            checks.check_events(worker, link.allocator)
        elif choice == "receive":
            was_reporting = worker.owner.phase is Phase.REPORTING
            worker.receive()
            if was_reporting and worker.owner.phase is Phase.OPEN and not link.to_server:
                checks.check_all_taken_over(worker)
        elif choice == "act":
            worker.act()
        else:
            worker.owner.heartbeat()
            worker.flush()

    def _connect(self) -> None:
        worker = self.worker
        self.clock.now = max(self.clock.now, worker.waits_until)
        worker.connect(self.rng.choice(self.allocators) if self.rng.random() < 0.2 else self._home())

    def _home(self) -> Allocator:
        return self.allocators[0]

    def _look(self) -> None:
        """Ends leases and silent streams as time passes, and compares both sides."""
        worker, now = self.worker, self.clock.now
        for allocator in self.allocators:
            if self.rng.random() < 0.2:
                allocator.sessions.expire(now)
                checks.check_leases(allocator, now)
            checks.check_expiries(allocator, now)
        link = worker.link
        if link is not None and self.rng.random() < 0.1:
            link.server_beats()
        if self.rng.random() < 0.005:
            self._operator_drops()
        if link is not None and not link.to_client and now - worker.heard_at > SILENCE_S:
            worker.leave()
        worker.steps_without_answer += 1
        if worker.steps_without_answer > STUCK_STEPS:
            raise ViolationError(f"nothing was answered for {STUCK_STEPS} steps")
        if worker.is_quiet and worker.answered:
            assert worker.link is not None
            checks.compare(worker, worker.link.allocator)
            self.outcome.comparisons += 1

    def _operator_drops(self) -> None:
        """Drops a pool's cache, as an operator would."""
        worker, link = self.worker, self.worker.link
        for allocator in self.allocators:
            for owner in allocator.directory.open_pools():
                namespace, digests, kept = worker.history.some_drop()
                before = set(checks.carried_by(owner.pool).values())
                try:
                    drop = CacheDrop(namespace, b"".join(digests or ()), kept)
                    allocator.sessions.drop_cache(owner, drop, self.clock.now)
                except Refusal as refusal:
                    checks.require(refusal.reason == "LIMIT", f"a drop was refused: {refusal}")
                    continue
                gone = before - set(checks.carried_by(owner.pool).values())
                if link is not None and link.machine.owner is owner and worker.owner.phase is Phase.OPEN:
                    worker.view.dropped |= {(g, name, digest) for g, name, _, digest in gone if worker.view.follows(g)}

    # -- faults --------------------------------------------------------------------------------------------------------

    def _fault(self, name: str) -> bool:
        """Causes a fault; returns whether it could happen in the present state."""
        if getattr(self, "_" + name.replace(",", "").replace(" ", "_"))() is False:
            return False
        self.outcome.faults += 1
        self.outcome.counts[name] += 1
        return True

    def _stream_lost(self) -> bool:
        """Breaks the stream. The owner and the allocator notice at once, and messages in flight are lost."""
        link = self.worker.link
        if link is None:
            return False
        self.worker.leave()
        link.to_server.clear()
        link.server_notices()
        return True

    def _stream_lost_server_notices_late(self) -> bool:
        """Ends the stream at the client alone. Any part of its messages may still arrive later."""
        link = self.worker.link
        if link is None:
            return False
        self.worker.leave()
        keep = self.rng.randrange(len(link.to_server) + 1)
        while len(link.to_server) > keep:
            link.to_server.pop()
        self.dead_links.append(link)
        return True

    def _old_stream_delivers(self) -> bool:
        self.dead_links = [link for link in self.dead_links if not link.server_gone]
        links = [link for link in self.dead_links if link.to_server]
        if not links:
            return False
        was_current, link = self._is_current(), self.rng.choice(links)
        owner = link.machine.owner
        is_older = owner is not None and owner.stream not in (None, link.machine)
        before = (owner.session_id, owner.steps.next_step, owner.lease_end) if owner is not None else None
        link.deliver_to_server()
        checks.require(self._is_current() >= was_current, "an older stream displaced the current one")
        after = (owner.session_id, owner.steps.next_step, owner.lease_end) if owner is not None else None
        checks.require(not is_older or after == before, "an older stream still changes the pool")
        return True

    def _is_current(self) -> bool:
        """Whether the worker's stream is the one that its pool listens to."""
        link = self.worker.link
        return link is not None and link.machine.owner is not None and link.machine.owner.stream is link.machine

    def _old_stream_is_noticed(self) -> bool:
        if not self.dead_links:
            return False
        self.dead_links.pop(self.rng.randrange(len(self.dead_links))).server_notices()
        return True

    def _allocator_crashes(self) -> None:
        self.rng.choice(self.allocators).crash()

    def _allocator_crashes_with_replies_lost(self) -> None:
        allocator = self.rng.choice(self.allocators)
        for link in allocator.links:
            for _ in range(self.rng.randrange(len(link.to_client) + 1)):
                link.to_client.pop()
        allocator.crash()

    def _allocator_drains(self) -> None:
        allocator = self.rng.choice(self.allocators)
        allocator.sessions.drain()
        allocator.crash()

    def _worker_wanders(self) -> None:
        """Points the name to the other allocator, which may have an older state of this pool."""
        self.allocators.reverse()
        if self.worker.link is not None:
            self.dead_links.append(self.worker.link)
            self.worker.leave()

    def _worker_crashes(self) -> None:
        """Crashes the worker, which loses its memory. Its old streams may still deliver. The next worker process waits
        for the lease to end."""
        if self.worker.link is not None:
            self.dead_links.append(self.worker.link)
            self.worker.leave()
        self.outcome.reports += self.worker.owner.report_count
        self.outcome.answers += self.worker.answered
        self.worker = self._new_worker()

    def _rival_attaches(self) -> bool:
        """Attaches a second process of the same name. The allocator must refuse it during the owner's lease."""
        allocator = self.rng.choice(self.allocators)
        rival = self._new_worker()
        held = allocator.directory._owners.get("pool")
        rival.connect(allocator)
        link = rival.link
        assert link is not None
        link.deliver_to_server()
        first = link.to_client[0]
        refused = not isinstance(first, bytes) and first is not None and first.reason is Reason.POOL_OWNED
        checks.require(refused == (held is not None), "a rival displaced the owner, or was kept out by nobody")
        if refused:
            return True
        link.server_notices()
        owner = allocator.directory._owners.get("pool")
        if owner is not None:
            allocator.sessions.drop(owner)
        return True

    def _lease_ends(self) -> bool:
        """Lets leases end: an allocator hears nothing from living owners for the length of a lease."""
        allocator = self.rng.choice(self.allocators)
        self.clock.now += LEASE_S + 0.1
        for owner in allocator.directory._owners.values():
            allocator.heard.setdefault(id(owner), owner.lease_end - LEASE_S)
        allocator.sessions.expire(self.clock.now)
        return True

    def _server_stands_still(self) -> None:
        """Pauses the server for longer than a lease. The allocator notices the pause, and ends no lease because
        of it.
        """
        self.clock.now += 30.0
        for allocator in self.allocators:
            allocator.directory.extend_leases(30.0)
            for key in allocator.heard:
                allocator.heard[key] += 30.0
        self.worker.heard_at += 30.0

    def _client_stands_still(self) -> None:
        self.clock.now += self.rng.uniform(1.0, 8.0)

    def _new_worker(self) -> Worker:
        return Worker(self.spec, self.rng, self.clock, self.outcome.counts, self.window)
