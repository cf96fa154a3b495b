"""Walks through everything that a pool can hit, while the pool goes on changing.

A walk yields what is there when it gets to it. What was there from the beginning of the walk to its end is yielded;
what came or went meanwhile may be or not, and is in the event log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from quire_allocator.core.events import Event, digest_count_before
from quire_allocator.core.groups.runs import Run, RunScope
from quire_allocator.core.groups.units import UnitScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, GroupSpec


class IndexedStretch(NamedTuple):
    """Consecutive published blocks of one prefix, in the groups of one specification; fields as in `events.Event`."""

    namespace: str
    groups: tuple[int, ...]
    spec: GroupSpec
    parent_digest: bytes
    digests: bytes
    first_position: int


DIGESTS_PER_PIECE_MAX: Final = 4_096


def pieces(stretch: IndexedStretch) -> Iterator[IndexedStretch]:
    """The same in parts that fit a message. Only blocks of full attention need the one before them, and name it."""
    names_parent = stretch.spec.kind is GroupKind.FULL_ATTENTION
    size = DIGESTS_PER_PIECE_MAX * DIGEST_BYTES
    parent, position = stretch.parent_digest, stretch.first_position
    for start in range(0, len(stretch.digests), size):
        digests = stretch.digests[start : start + size]
        yield stretch._replace(parent_digest=parent, digests=digests, first_position=position)
        parent, position = digests[-DIGEST_BYTES:] if names_parent else b"", position + DIGESTS_PER_PIECE_MAX


def walk(pool: Pool) -> Iterator[IndexedStretch]:
    """Every published block, parents before children."""
    for space in list(pool.blocks.namespaces.values()):
        for manager, scope in zip(pool.managers, space.scopes, strict=True):
            groups, spec = manager.groups, manager.spec
            if isinstance(scope, RunScope):
                for run in _walk_runs(scope.root):
                    parent = run.parent.last_digest if run.parent is not None else b""
                    yield IndexedStretch(space.name, groups, spec, parent, bytes(run.digests), run.first_position)
            elif isinstance(scope, UnitScope):
                for unit in list(scope.index.values()):
                    if unit.key is not None:
                        yield IndexedStretch(space.name, groups, spec, b"", unit.key[1], unit.key[0])


def walk_acknowledged(pool: Pool) -> Iterator[IndexedStretch]:
    """The same for others than the owner: without what steps have stored that it has not acknowledged. The events of
    these follow when it has."""
    seen, untold = (-1, -1, ""), set[bytes]()
    for stretch in walk(pool):
        now = (pool.log.step, pool.log.last_cursor, stretch.namespace)
        if seen != now:
            seen, untold = now, pool.log.untold(stretch.namespace)
        told = digest_count_before(untold, stretch.digests) if untold else len(stretch.digests)
        if told:
            yield stretch._replace(digests=stretch.digests[: told * DIGEST_BYTES])


def stretch_of(event: Event) -> IndexedStretch:
    """What an event is about."""
    manager = event.scope.manager
    return IndexedStretch(
        event.scope.namespace.name,
        manager.groups,
        manager.spec,
        event.parent_digest,
        event.digests,
        event.first_position,
    )


def _walk_runs(root: Run) -> Iterator[Run]:
    """Runs below a root. One that was noted may have been split since, its upper parts being new runs, and what it was
    itself may have been evicted: so each is reached from its deep end up to where it began when it was noted."""
    noted = [(child, 0) for child in root.children.values()]
    while noted:
        run, began_at = noted.pop()
        parts = []
        part: Run | None = run
        while part is not None and part.parent is not None and part.first_position >= began_at:
            parts.append(part)
            part = part.parent
        for part in reversed(parts):
            if part.blocks:
                yield part
        end = run.first_position + run.size // DIGEST_BYTES
        noted += [(child, end) for child in run.children.values()]
