"""Unary sessions: owners that make one call for each step, instead of streaming steps.

Lifecycle of a unary session:

    1. open   `open` has taken a pool, which starts empty; a repeated request id takes no other pool
    2. gone   `close` gave the pool back, or its lease ended

While a session is open, `apply` takes its steps one by one. A repeat of the last step gets the kept reply. Both calls
renew the lease, but a refused call does not. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire.protocol.permissions import Permissions
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.session.steps import answer_step
from quire_allocator.wire import authorization, routes, translate
from quire_allocator.wire.step_columns import StepColumns
from quire_allocator.wire.translate import require

if TYPE_CHECKING:
    from quire_allocator.metrics.counters import Counters


class UnarySessions:
    """Opens, finds, serves and closes the unary sessions among all sessions of an allocator."""

    def __init__(self, sessions: SessionRegistry, counters: Counters) -> None:
        self._sessions = sessions
        self._directory = sessions.directory
        self._counters = counters

    def open(self, request: pb.OpenSessionRequest, permissions: Permissions, now: float) -> Ownership:
        """Takes a pool for a new session, or returns the session that the same request id opened before.

        Raises:
            Refusal: DRAINING, VERSION, MALFORMED, LAYOUT, POOL_FORBIDDEN, POOL_QUARANTINED, POOL_OWNED, LIMIT.
        """
        require(not self._sessions.draining, "the allocator is shutting down", "DRAINING")
        translate.version(request.version)
        name = translate.pool_name(request.pool)
        authorization.require_owning(permissions, name)
        self._sessions.check_quarantine(name, now)
        worker = routes.worker_of(request)
        owner = self._directory.open_unary(
            name=name,
            spec=translate.pool_spec(request.spec),
            request_id=translate.request_id(request.request_id),
            session_id=self._sessions.new_session_id(),
            now=now,
            caller=permissions,
        )
        self._sessions.router.register(name, worker)
        self._sessions.memory.share_event_logs(owner.caller)
        self._sessions.observer.opened(owner)
        return owner

    def find(self, session_id: bytes, permissions: Permissions) -> Ownership:
        """Returns the session that a call names.

        Raises:
            Refusal: SESSION_UNKNOWN; POOL_FORBIDDEN; FENCED if the pool's owner streams.
        """
        owner = self._directory.session(session_id)
        authorization.require_owning(permissions, owner.name)
        require(
            owner.unary,
            f"pool {owner.name} is owned over the Session stream, so a unary call cannot change it",
            "FENCED",
        )
        return owner

    def apply(self, step: packed.Step, permissions: Permissions, now: float) -> packed.StepReply:
        """Applies a step to the session that it names. A repeat of the last step gets the kept reply.

        Raises:
            Refusal: the refusals of `find` and `answer_step`; also NAMESPACE_FORBIDDEN if another caller's live
                sequence is in a namespace that this caller may not use.
        """
        owner = self.find(step.session_id, permissions)
        authorization.require_sequences(permissions, owner.pool)  # the session may have sequences of another caller
        if not step.number:
            reply = _renewal(owner, step)
        else:
            started = time.perf_counter()
            restricted = None if permissions.namespaces.are_all else permissions
            answer, applied = answer_step(self._sessions, owner, step, restricted, now)
            reply = answer.step_reply
            if applied is not None:
                self._sessions.kept_bytes.count(owner, step.number, step.ByteSize() + reply.ByteSize())
                numbers = self._counters.of(owner.name)
                numbers.observe_step(owner.pool, applied, reply, time.perf_counter() - started)
                numbers.observe_blocks(owner.pool, applied, reply, now)
        self._directory.renew(owner, now)
        return reply

    def close(self, session_id: bytes, permissions: Permissions) -> None:
        """Gives a pool back; a session that is gone already is no error.

        Raises:
            Refusal: POOL_FORBIDDEN or FENCED.
        """
        try:
            owner = self.find(session_id, permissions)
        except Refusal as refusal:
            if refusal.reason != "SESSION_UNKNOWN":
                raise
        else:
            self._sessions.drop(owner)


def _renewal(owner: Ownership, step: packed.Step) -> packed.StepReply:
    """Returns the answer to a step that only renews the lease.

    Raises:
        Refusal: MALFORMED if the step has operations.
    """
    are_none = not StepColumns(step).operation_count
    require(are_none, f"number must be {owner.steps.next_step}, the number of the next step, not 0", field="number")
    return packed.StepReply(session_id=owner.session_id, free_block_count=owner.pool.blocks.free_count)
