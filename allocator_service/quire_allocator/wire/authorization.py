"""Checks a caller's permissions for each request of the protocol. Pure: no function here changes anything.

Namespaces enter a session in three ways. Another stream or caller continues a session with live sequences, a report
lists sequences, or a grow makes a sequence. All three are checked here. So all live sequences of an open session are
in permitted namespaces, and operations on them need no check. A fork is in its parent's namespace, and a grow never
makes a sequence with the id of one of its step's forks.
"""

from __future__ import annotations

from itertools import repeat

from quire.protocol.permissions import Permissions
from quire.v1 import allocator_pb2 as pb

from quire_allocator.core.drop import CacheDrop
from quire_allocator.core.pool import Pool
from quire_allocator.wire.step_columns import StepColumns
from quire_allocator.wire.translate import require


def require_owning(permissions: Permissions, pool: str) -> None:
    """Refuses a caller that may not own a pool.

    Raises:
        Refusal: POOL_FORBIDDEN.
    """
    require(permissions.may_own(pool), f"the certificate does not permit owning pool {pool}", "POOL_FORBIDDEN")


def require_observing(permissions: Permissions, pool: str) -> None:
    """Refuses a caller that may not observe a pool, whether or not the pool is attached.

    Raises:
        Refusal: POOL_FORBIDDEN.
    """
    require(
        permissions.may_observe(pool), f"the certificate does not permit looking into pool {pool}", "POOL_FORBIDDEN"
    )


def require_namespace(permissions: Permissions, namespace: str) -> None:
    """Refuses a caller that may not use a namespace. The message does not name the namespace: messages are logged, and
    the name may be another tenant's.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    require(permissions.may_use(namespace), "the certificate does not permit this namespace", "NAMESPACE_FORBIDDEN")


def require_drop(permissions: Permissions, drop: CacheDrop) -> None:
    """Refuses a drop of a namespace that is not permitted, or of all namespaces if one is not permitted.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if drop.namespace is not None:
        require_namespace(permissions, drop.namespace)
    else:
        are_all = permissions.namespaces.are_all
        require(
            are_all, "the certificate does not permit every namespace: name one that it permits", "NAMESPACE_FORBIDDEN"
        )


def require_sequences(permissions: Permissions, pool: Pool) -> None:
    """Refuses a session that has live sequences in a namespace that is not permitted.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if not permissions.namespaces.are_all:
        for namespace in {sequence.namespace.name for sequence in pool.sequences.values()}:
            require_namespace(permissions, namespace)


def require_report(permissions: Permissions, chunk: pb.ReportChunk) -> None:
    """Refuses a chunk of a report that names a namespace that is not permitted, before the chunk is staged.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if not permissions.namespaces.are_all:
        for namespace in chunk.namespaces:
            require_namespace(permissions, namespace)


def forbidden_rows(permissions: Permissions, pool: Pool, columns: StepColumns) -> frozenset[int]:
    """Returns the rows of a checked step's grows that must not make a sequence and are answered FORBIDDEN.

    The step's other operations are applied: a worker has one certificate for all its callers, and one caller's sequence
    must not stop sequences of other callers.
    """
    if not columns.has_new or permissions.namespaces.are_all:
        return frozenset()
    rows = zip(columns.grow_sequences, columns.grow_namespaces or repeat(""), strict=False)
    return frozenset(
        row
        for row, (sequence_id, namespace) in enumerate(rows)
        if sequence_id > pool.last_sequence_id and not permissions.may_use(namespace)
    )
