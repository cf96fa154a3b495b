"""A pool's owner and its allocator in one process: the product's state machines, connected by function calls."""

from __future__ import annotations

import os
import time

from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session.owner import PoolOwner
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.registry import SessionRegistry


class _Nobody:
    """Ignores all events of the session machine."""

    def opened(self, owner: Ownership) -> None: ...

    def recovered(self, owner: Ownership, reported_block_count: int, asked: float) -> None: ...

    def disagreed(self, owner: Ownership) -> None: ...

    def resumed(self, owner: Ownership) -> None: ...

    def dropped(self, owner: Ownership) -> None: ...

    def expired(self, owner: Ownership) -> None: ...

    def published(self, owner: Ownership) -> None: ...

    def quarantined(self, owner: Ownership, error: Exception) -> None: ...


class InProcess:
    """A pool's owner, attached to an allocator in the same process."""

    def __init__(self, spec: pb.PoolSpec) -> None:
        self._owner = PoolOwner("in-process", spec, incarnation=os.urandom(16), window=4)
        self.replace_allocator()

    def replace_allocator(self) -> None:
        """Replaces the allocator by an empty one, which gets the owner's report."""
        directory = Directory(lease_s=3600, pools_max=1)
        self._machine = SessionMachine(SessionRegistry(directory, _Nobody(), new_session_id=lambda: os.urandom(16)))
        self._owner.lose_stream()
        self._owner.attach()
        self._exchange()

    def step(self, operations: StepBuilder) -> StepOutcome:
        """Applies one step and returns its outcome."""
        self._owner.submit(operations)
        outcome = self._exchange()
        assert outcome is not None, "a step has an answer"
        return outcome

    def _exchange(self) -> StepOutcome | None:
        """Exchanges messages until both sides have sent all of theirs; returns the last step's result."""
        outcome = None
        while self._owner.outbox:
            now = time.monotonic()
            for reply in self._machine.receive(self._owner.outbox.popleft(), now):
                answer = self._owner.receive(reply)
                outcome = answer.outcome if answer is not None else outcome
        return outcome
