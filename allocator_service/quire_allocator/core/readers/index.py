"""Iterates over all blocks that a prompt can hit, while the pool changes.

A walk yields all blocks that exist from its start to its end. Others may be missing; the event log has their changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from quire_allocator.core.events import Event, digest_count_before
from quire_allocator.core.groups.manager import IndexedStretch
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, Match

DIGESTS_PER_PIECE_MAX: Final = 4_096


def pieces(stretch: IndexedStretch) -> Iterator[IndexedStretch]:
    """Cuts a stretch into parts that fit a message. Only blocks of full attention name the block before."""
    names_parent = stretch.spec.kind is GroupKind.FULL_ATTENTION
    size = DIGESTS_PER_PIECE_MAX * DIGEST_BYTES
    parent, position = stretch.parent_digest, stretch.first_position
    for start in range(0, len(stretch.digests), size):
        digests = stretch.digests[start : start + size]
        yield stretch._replace(parent_digest=parent, digests=digests, first_position=position)
        parent, position = digests[-DIGEST_BYTES:] if names_parent else b"", position + DIGESTS_PER_PIECE_MAX


def walk(pool: Pool) -> Iterator[IndexedStretch]:
    """Yields every published block, parents before children."""
    for space in list(pool.blocks.namespaces.values()):
        for manager, scope in zip(pool.managers, space.scopes, strict=True):
            yield from manager.walk(scope)


def walk_acknowledged(pool: Pool) -> Iterator[IndexedStretch]:
    """Yields the blocks that readers other than the owner may see. Blocks stored by an unacknowledged step are left
    out: their events follow after the acknowledgment."""
    seen, untold = (-1, -1, ""), set[bytes]()
    for stretch in walk(pool):
        now = (pool.log.step, pool.log.last_cursor, stretch.namespace)
        if seen != now:
            seen, untold = now, pool.log.untold(stretch.namespace)
        told = digest_count_before(untold, stretch.digests) if untold else len(stretch.digests)
        if told:
            yield stretch._replace(digests=stretch.digests[: told * DIGEST_BYTES])


def find_acknowledged(pool: Pool, namespace: str, digests: bytes) -> Match:
    """Returns the part of the result of `Pool.find` that readers other than the owner may see."""
    found = pool.find(namespace, digests)
    untold = pool.log.untold(namespace) if any(found) else None
    if not untold:
        return found
    told = digest_count_before(untold, digests)
    return pool.find(namespace, digests[: told * DIGEST_BYTES])


def stretch_of(event: Event) -> IndexedStretch:
    """Returns the stretch that an event is about."""
    manager = event.scope.manager
    return IndexedStretch(
        event.scope.namespace.name,
        manager.groups,
        manager.spec,
        event.parent_digest,
        event.digests,
        event.first_position,
    )
