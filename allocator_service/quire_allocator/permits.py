"""What a caller's permissions mean for the protocol. Pure; everything here changes nothing.

Namespaces come into a stream in three places: with the live sequences of a session that is resumed, with a report, and
with a grow that makes a sequence. Each is checked, so the live sequences of an open stream are always permitted ones,
and whatever else names a sequence needs no look.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire._serving.permissions import Grant
from quire.v1 import allocator_pb2 as pb

from quire_allocator.arrays import StepArrays
from quire_allocator.core.pool import Pool
from quire_allocator.translate import require


def require_owning(grant: Grant, pool: str) -> None:
    """Refuses who may not own a pool.

    Raises:
        Refusal: POOL_FORBIDDEN.
    """
    require(grant.may_own(pool), "the certificate does not permit owning this pool", "POOL_FORBIDDEN")


def require_observing(grant: Grant, pool: str) -> None:
    """Refuses who may not know of a pool, whether or not there is one.

    Raises:
        Refusal: POOL_FORBIDDEN.
    """
    require(grant.may_observe(pool), "the certificate does not permit looking into this pool", "POOL_FORBIDDEN")


def require_namespace(grant: Grant, namespace: str) -> None:
    """Refuses a namespace. The message does not name it: it may be a tenant's, and messages are logged.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    require(grant.may_use(namespace), "the certificate does not permit this namespace", "NAMESPACE_FORBIDDEN")


def require_operation(grant: Grant, pool: Pool, request: Any) -> None:
    """Refuses a unary operation in another namespace; a sequence that is not there is the operation's to answer.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if isinstance(request, pb.AllocateRequest):
        require_namespace(grant, request.namespace)
        return
    sequence = pool.sequences.get(request.parent_id if isinstance(request, pb.ForkRequest) else request.sequence_id)
    if sequence is not None:
        require_namespace(grant, sequence.namespace.name)


def require_sequences(grant: Grant, pool: Pool) -> None:
    """Refuses a session that has live sequences of another namespace.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if not grant.namespaces.are_all:
        for namespace in {sequence.namespace.name for sequence in pool.sequences.values()}:
            require_namespace(grant, namespace)


def require_report(grant: Grant, chunk: pb.ReportChunk) -> None:
    """Refuses a part of a report that names another namespace, before anything is made of it.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if not grant.namespaces.are_all:
        for namespace in chunk.namespaces:
            require_namespace(grant, namespace)


def require_step(grant: Grant, pool: Pool, arrays: StepArrays) -> None:
    """Refuses a checked step that may make a sequence in another namespace.

    Raises:
        Refusal: NAMESPACE_FORBIDDEN.
    """
    if arrays.has_new and not grant.namespaces.are_all:
        for namespace in set(_namespaces_of_new(pool, arrays)):
            require_namespace(grant, namespace)


def _namespaces_of_new(pool: Pool, arrays: StepArrays) -> Iterator[str]:
    """Namespaces of the grows that may make a sequence: all of ids that are new, but for children of certain forks,
    which are in their parent's."""
    children = _certain_children(pool, arrays)
    for row, sequence_id in enumerate(arrays.grow_sequences):
        if sequence_id > pool.last_sequence_id and sequence_id not in children:
            yield arrays.grow_namespaces[row] if arrays.grow_namespaces else ""


def _certain_children(pool: Pool, arrays: StepArrays) -> set[int]:
    """Children of forks that cannot fail, whatever the phases before them do.

    A fork fails if its parent is gone (freed by the step, or a hold whose time comes), if ids do not rise, or, where
    blocks are written in place, if the parent has tokens that are not committed; commits only make these fewer.
    """
    freed, certain, last = set(arrays.frees), set[int](), pool.last_sequence_id
    for parent_id, child_id in zip(arrays.parents, arrays.children, strict=True):
        parent = pool.sequences.get(parent_id) if parent_id not in freed and parent_id not in pool.holds else None
        written = parent is not None and (
            not pool.groups.in_place or parent.token_count <= parent.committed_token_count
        )
        if child_id > last and (written or parent_id in certain):
            certain.add(child_id)
        last = max(last, child_id)
    return certain
