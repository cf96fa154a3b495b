"""Finds again where hits can end (`retention.py`): a report names blocks, and no stops.

A stop's blocks end where a stretch of windowed blocks ends or a checkpoint is, and paths end and part at stops: at all
these places one is made, if every group can serve it there. If the blocks of several stops run into each other, only
the last stop is found. Every checkpoint counts as a stop, and the last few of a path stay. Without full attention the
paths of checkpoints are unknown. Blocks that no stop found are spare. Emptied at once, they would be lost for hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from quire_allocator.core.blocks import Namespace
from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.retention import Retention
from quire_allocator.core.groups.runs import Run, RunScope
from quire_allocator.core.groups.units import Unit, UnitKey, UnitScope
from quire_allocator.core.groups.window_parts import WindowPart
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.pool import Pool
from quire_allocator.core.retention.stop import Stop
from quire_allocator.core.sequence import SequenceState
from quire_allocator.core.spec import DIGEST_BYTES

Links = dict[str, dict[UnitKey, bytes]]  # by namespace: of a published position the digest of the one before it
_Place = tuple[int, bytes]  # tokens before a stop, the digest of all of them


def restore_stops(pool: Pool, links: dict[int, Links]) -> None:
    """Makes the stops of a pool whose blocks and sequences are all filed; `links` are by the managers' numbers."""
    retention = pool.coordinator.retention
    if retention is None:
        return
    for space in pool.blocks.namespaces.values():
        tails = [
            _Tails(window, cast(UnitScope, space.scopes[number]), links[number].get(space.name, {}))
            for number, window in retention.windows
        ]
        if retention.full:
            _restore_paths(retention, space, tails)
        else:
            for place in sorted(_ends(retention, space, tails)):
                _make(retention, space, place, [], tails, above=None)
        for sequence in pool.sequences.values():
            if sequence.namespace is space:
                _follow(retention, sequence, tails)


class _Tails:
    """The published positions of a windowed manager in one namespace, and which comes before which."""

    def __init__(self, window: WindowManager, scope: UnitScope, before: dict[UnitKey, bytes]) -> None:
        self.window = window
        self._scope = scope
        self._before = before
        going_on = {(position - 1, before) for (position, _), before in before.items()}
        self.last = [unit.key for unit in scope.units() if unit.key is not None and unit.key not in going_on]

    def units(self, digest: bytes, end: int, positions: range) -> list[Unit] | None:
        """Returns the units of some positions on the path whose block before position `end` has that digest; None if
        one is missing."""
        found: list[Unit] = []
        for position in range(end - 1, positions.start - 1, -1):
            unit = self._scope.find(position, digest)
            if position in positions:
                if unit is None:
                    return None
                found.append(unit)
            digest = self._before.get((position, digest), b"")
        return found[::-1]

    def fallen(self, part: WindowPart, positions: range) -> list[Unit]:
        """Returns those of some positions that a sequence had in its table, if all of them are known."""
        key = part.units[0].key if part.units else None
        if key is None:
            return []
        before = self._before.get(key, b"")
        return self.units(before, part.first, range(positions.start, min(positions.stop, part.first))) or []


def _ends(retention: Retention, space: Namespace, tails: Sequence[_Tails]) -> set[_Place]:
    """Edges at which stretches of windowed blocks end or checkpoints are."""
    ends = set()
    for own in tails:
        size = own.window.block_size
        ends |= {((position + 1) * size, digest) for position, digest in own.last}
    for number, state in retention.states:
        ends |= set(state.checkpoints(cast(UnitScope, space.scopes[number])))
    return {(token_count, digest) for token_count, digest in ends if token_count % retention.edge_tokens == 0}


def _restore_paths(retention: Retention, space: Namespace, tails: Sequence[_Tails]) -> None:
    """Returns the stops of a namespace, path by path from the root down."""
    ends, edge = _ends(retention, space, tails), retention.edge_tokens
    counts = {token_count for token_count, _ in ends}
    others = [
        _by_place(full, cast(RunScope, space.scopes[number]).root, edge, counts)
        for number, full in enumerate(retention.full)
    ]
    first = retention.full[0]
    pending: list[tuple[Run, Stop | None]] = [(cast(RunScope, space.scopes[0]).root, None)]
    while pending:
        run, above = pending.pop()
        for place in _places(first, run, edge, counts):
            is_end = place[0] == first.end_of(run) and len(run.children) != 1
            runs = [places.get(place) for places in others]
            if (is_end or place in ends) and None not in runs:
                own = [other for other in runs if other is not None]
                above = _make(retention, space, place, own, tails, above=above) or above
        pending += [(child, above) for child in run.children.values()]


def _by_place(full: FullAttentionManager, root: Run, edge: int, counts: set[int]) -> dict[_Place, Run]:
    return {place: run for run in full.tree.runs(root) for place in _places(full, run, edge, counts)}


def _places(full: FullAttentionManager, run: Run, edge: int, counts: set[int]) -> list[_Place]:
    """Returns the edges of a run that may be stops, the first first: its end, and those at some counts of
    tokens."""
    digests, size, begin = bytes(run.digests), full.block_size, run.first_position * full.block_size
    end, places = full.end_of(run), []
    for token_count in range((begin // edge + 1) * edge, end + 1, edge):
        if token_count in counts or token_count == end:
            last = ((token_count - begin) // size - 1) * DIGEST_BYTES
            places.append((token_count, digests[last : last + DIGEST_BYTES]))
    return places


def _make(
    retention: Retention,
    space: Namespace,
    place: _Place,
    runs: Sequence[Run],
    tails: Sequence[_Tails],
    *,
    above: Stop | None,
) -> Stop | None:
    """Makes one stop, if everything that it needs is there."""
    token_count, digest = place
    needed = list[Unit]()
    for own in tails:
        end = token_count // own.window.block_size
        found = own.units(digest, end, own.window.needed_at(token_count))
        if found is None:
            return None
        needed += found
    for number, state in retention.states:
        unit = state.checkpoint_at(cast(UnitScope, space.scopes[number]), token_count, digest)
        if unit is None:
            return None
        needed.append(unit)
    if not needed and not runs:
        return None
    stop = retention.put(space, place, needed, runs, parent=above)
    for full, run in zip(retention.full, runs, strict=True):
        stop.is_parting |= full.end_of(run) == token_count and len(run.children) > 1
    retention.end_old(stop)
    return stop


def _follow(retention: Retention, sequence: SequenceState, tails: Sequence[_Tails]) -> None:
    """Returns what a live sequence remembers: the deepest stop of its path, and the needs of its last edge."""
    if retention.full:
        run: Run | None = cast(RunPart, sequence.parts[0]).run
        while run is not None and not run.stops:
            run = run.parent
        sequence.last_stop = run.stops[-1] if run is not None else None
    edge = sequence.committed_token_count // retention.edge_tokens * retention.edge_tokens
    for own, (number, window) in zip(tails, retention.windows, strict=True):
        part = cast(WindowPart, sequence.parts[number])
        part.needed = tuple(own.fallen(part, window.needed_at(edge)))
        for unit in part.needed:
            unit.needed_count += 1
