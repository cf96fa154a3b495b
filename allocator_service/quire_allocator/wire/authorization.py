"""What a caller's permissions mean for the protocol. Pure; everything here changes nothing.

Namespaces come into a stream in three places: with the live sequences of a session that is resumed, with a report, and
with a grow that makes a sequence. Each is checked, so the live sequences of an open stream are always permitted ones,
and whatever else names a sequence needs no look. A fork is in its parent's namespace, and what a step forks its grows
do not make.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

from quire.protocol.permissions import Permissions
from quire.v1 import allocator_pb2 as pb

from quire_allocator.core.pool import Pool
from quire_allocator.wire.step_columns import StepColumns
from quire_allocator.wire.translate import require


def require_owning(permissions: Permissions, pool: str) -> None:
    """Refuses who may not own a pool.

    Raises:
        Refusal: POOL_FORBIDDEN.
    """
    require(permissions.may_own(pool), "the certificate does not permit owning this pool", "POOL_FORBIDDEN")


def require_observing(permissions: Permissions, pool: str) -> None:
    """Refuses who may not know of a pool, whether or not there is one.

    Raises:
        Refusal: POOL_FORBIDDEN.
    """
    require(permissions.may_observe(pool), "the certificate does not permit looking into this pool", "POOL_FORBIDDEN")


def require_namespace(permissions: Permissions, namespace: str) -> None:
    """Refuses a namespace. The message does not name it: it may be a tenant's, and messages are logged.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    require(permissions.may_use(namespace), "the certificate does not permit this namespace", "NAMESPACE_FORBIDDEN")


def require_operation(permissions: Permissions, pool: Pool, request: Any) -> None:
    """Refuses a unary operation in another namespace; a sequence that is not there is the operation's to answer.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if isinstance(request, pb.AllocateRequest):
        require_namespace(permissions, request.namespace)
        return
    sequence = pool.sequences.get(request.parent_id if isinstance(request, pb.ForkRequest) else request.sequence_id)
    if sequence is not None:
        require_namespace(permissions, sequence.namespace.name)


def require_sequences(permissions: Permissions, pool: Pool) -> None:
    """Refuses a session that has live sequences of another namespace.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if not permissions.namespaces.are_all:
        for namespace in {sequence.namespace.name for sequence in pool.sequences.values()}:
            require_namespace(permissions, namespace)


def require_report(permissions: Permissions, chunk: pb.ReportChunk) -> None:
    """Refuses a part of a report that names another namespace, before anything is made of it.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if not permissions.namespaces.are_all:
        for namespace in chunk.namespaces:
            require_namespace(permissions, namespace)


def forbidden_rows(permissions: Permissions, pool: Pool, columns: StepColumns) -> frozenset[int]:
    """Rows of a checked step's grows that must not make a sequence: FORBIDDEN, where they otherwise would. The rest of
    the step is not theirs: a worker has one certificate for all its callers."""
    if not columns.has_new or permissions.namespaces.are_all:
        return frozenset()
    rows = zip(columns.grow_sequences, columns.grow_namespaces or repeat(""), strict=False)
    return frozenset(
        row
        for row, (sequence_id, namespace) in enumerate(rows)
        if sequence_id > pool.last_sequence_id and not permissions.may_use(namespace)
    )
