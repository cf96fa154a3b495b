"""Unary sessions: owners that make one call for each operation, instead of streaming steps.

Lifecycle of a unary session:

    1. open   `open` has taken a pool, which starts empty; a repeated request id takes nothing anew
    2. gone   `close` gave the pool back, or its lease ended

While it is open, `once` applies each request once: a repeated one gets its kept answer. Both renew the lease, and a
refused request does not. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.message import Message
from quire.protocol.permissions import Permissions
from quire.v1 import allocator_pb2 as pb

from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.wire import authorization, translate
from quire_allocator.wire.translate import require

if TYPE_CHECKING:
    from quire_allocator.metrics.counters import Counters

ResponseT = TypeVar("ResponseT", bound=Message)


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
        owner = self._directory.open_unary(
            name=name,
            spec=translate.pool_spec(request.spec),
            request_id=translate.request_id(request.request_id),
            session_id=self._sessions.new_session_id(),
            now=now,
            caller=permissions,
        )
        self._sessions.observer.opened(owner)
        return owner

    def find(self, session_id: bytes, permissions: Permissions) -> Ownership:
        """Returns the session that a call names.

        Raises:
            Refusal: SESSION_UNKNOWN; POOL_FORBIDDEN; FENCED, the pool's owner streams.
        """
        owner = self._directory.session(session_id)
        authorization.require_owning(permissions, owner.name)
        require(owner.unary, f"pool {owner.name} is owned over the Session stream: calls cannot change it", "FENCED")
        return owner

    def once(
        self,
        request: Any,
        permissions: Permissions,
        operation: str,
        operate: Callable[[Ownership], ResponseT],
        now: float,
    ) -> ResponseT:
        """Applies `operate` to the session that a request names, or returns the kept answer to the same request.

        Raises:
            Refusal: those of `find`; NAMESPACE_FORBIDDEN; MALFORMED; STEP_MISMATCH, another request had this id;
                POOL_QUARANTINED; those of `operate`.
        """
        owner = self.find(request.session_id, permissions)
        authorization.require_operation(permissions, owner.pool, request)
        request_id = translate.request_id(request.request_id)
        # The type is part of the content: a Fork and a Grow with equal numbers are equal bytes.
        content = type(request).__name__.encode() + request.SerializeToString(deterministic=True)
        sha256 = hashlib.sha256(content).digest()
        kept = owner.answers.replay(request_id, sha256)
        if kept is not None:
            self._directory.renew(owner, now)
            return cast("ResponseT", kept)
        response = self._sessions.apply(owner, lambda: operate(owner), now)
        self._directory.renew(owner, now)
        self._sessions.publish(owner)
        owner.answers.record(request_id, sha256, response, size=response.ByteSize())
        self._counters.of(owner.name).count(operation, response.result)  # type: ignore[attr-defined]
        return response

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
