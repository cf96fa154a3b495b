"""Restores the stops, where hits can end (`core/retention`). A report names only blocks.

A stop is made wherever a stretch of windowed blocks ends, a checkpoint exists, or a path ends or branches, if every
group can serve a hit there. The lost stops may have been elsewhere. If the blocks of several stops overlap, only
the last stop is found. Every checkpoint becomes a stop, and the last few on each path stay. Without full attention, the
rebuild cannot know which stops are on one path. Blocks that no restored stop needs are spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.groups.states import StateManager
from quire_allocator.core.groups.units import UnitScope
from quire_allocator.core.groups.window_parts import WindowPart
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.pool import Pool
from quire_allocator.core.retention.stop import Run, Stop, Unit, UnitKey
from quire_allocator.core.scopes import Namespace
from quire_allocator.core.sequence import SequenceState

Links = dict[str, dict[UnitKey, bytes]]  # namespace -> published position -> digest of the previous position
_Place = tuple[int, bytes]  # tokens before a stop, and the digest of these tokens


def restore(pool: Pool, links: dict[int, Links]) -> None:
    """Makes the stops of a pool after all its blocks and sequences are filed. `links` uses the managers' numbers."""
    if pool.coordinator.retention.is_even:
        return
    for space in pool.blocks.namespaces.values():
        restorer = _Restorer(pool, space, links)
        if restorer.full:
            restorer.restore_paths()
        else:
            for place in sorted(restorer.ends()):
                restorer.make(place, [], above=None)
        for sequence in pool.sequences.values():
            if sequence.namespace is space:
                restorer.follow(sequence)


class _Positions:
    """The published positions of a windowed manager in one namespace, and the predecessor of each."""

    def __init__(self, window: WindowManager, scope: UnitScope, before: dict[UnitKey, bytes]) -> None:
        self.window = window
        self._scope = scope
        self._before = before
        going_on = {(position - 1, before) for (position, _), before in before.items()}
        self.last = [unit.key for unit in scope.units() if unit.key is not None and unit.key not in going_on]

    def units(self, digest: bytes, end: int, positions: range) -> list[Unit] | None:
        """Returns the units of `positions` on the path with this digest before `end`; None if one is missing."""
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
        """Returns the units of `positions` that fell out of a sequence's table; None unless all of them are known."""
        key = part.units[0].key if part.units else None
        if key is None:
            return []
        before = self._before.get(key, b"")
        return self.units(before, part.first, range(positions.start, min(positions.stop, part.first))) or []


class _Restorer:
    """Makes the stops of one namespace.

    Attributes:
        full: the managers of full attention, which come first in the pool.
    """

    def __init__(self, pool: Pool, space: Namespace, links: dict[int, Links]) -> None:
        self._retention = pool.coordinator.retention
        self._edge = pool.spec.edge_tokens
        self._space = space
        numbered = list(enumerate(pool.managers))
        self.full = [manager for _, manager in numbered if isinstance(manager, FullAttentionManager)]
        self._roots = [cast(RunScope, scope).root for scope in space.scopes[: len(self.full)]]
        self._windows = [
            (number, _Positions(manager, cast(UnitScope, space.scopes[number]), links[number].get(space.name, {})))
            for number, manager in numbered
            if isinstance(manager, WindowManager)
        ]
        self._states = [
            (manager, cast(UnitScope, space.scopes[number]))
            for number, manager in numbered
            if isinstance(manager, StateManager)
        ]

    def ends(self) -> set[_Place]:
        """Returns the edges where stretches of windowed blocks end or checkpoints exist."""
        ends = set()
        for _, own in self._windows:
            size = own.window.block_size
            ends |= {((position + 1) * size, digest) for position, digest in own.last}
        for state, scope in self._states:
            ends |= set(state.checkpoints(scope))
        return {(token_count, digest) for token_count, digest in ends if token_count % self._edge == 0}

    def restore_paths(self) -> None:
        """Makes stops path by path from the root down."""
        ends = self.ends()
        counts = {token_count for token_count, _ in ends}
        others = [
            {place: run for run in full.tree.runs(root) for place in self._places(run, counts)}
            for full, root in zip(self.full, self._roots, strict=True)
        ]
        pending: list[tuple[Run, Stop | None]] = [(self._roots[0], None)]
        while pending:
            run, above = pending.pop()
            for place in self._places(run, counts):
                is_end = place[0] == run.token_count() and len(run.children) != 1
                runs = [places.get(place) for places in others]
                if (is_end or place in ends) and None not in runs:
                    own = [other for other in runs if other is not None]
                    above = self.make(place, own, above=above) or above
            pending += [(child, above) for child in run.children.values()]

    def _places(self, run: Run, counts: set[int]) -> list[_Place]:
        """Returns the edges of a run that may be stops, rising: its end, and the edges at the given token counts."""
        size, end = run.scope.manager.block_size, run.token_count()
        first = run.first_position * size // self._edge * self._edge + self._edge
        return [
            (token_count, run.digest_at(token_count // size - 1))
            for token_count in range(first, end + 1, self._edge)
            if token_count in counts or token_count == end
        ]

    def make(self, place: _Place, runs: Sequence[Run], *, above: Stop | None) -> Stop | None:
        """Makes one stop, if everything that it needs exists."""
        token_count, digest = place
        needed = list[Unit]()
        for _, own in self._windows:
            end = token_count // own.window.block_size
            found = own.units(digest, end, own.window.needed_at(token_count))
            if found is None:
                return None
            needed += found
        for state, scope in self._states:
            unit = state.checkpoint_at(scope, token_count, digest)
            if unit is None:
                return None
            needed.append(unit)
        if not needed and not runs:
            return None
        stop = self._retention.put((self._space.name, token_count, digest), needed, runs, parent=above)
        for run in runs:
            stop.is_parting |= run.token_count() == token_count and len(run.children) > 1
        self._retention.end_old(stop)
        return stop

    def follow(self, sequence: SequenceState) -> None:
        """Notes the deepest stop of a live sequence's path, and the units that its last edge needs."""
        if self.full:
            run: Run | None = cast(RunPart, sequence.parts[0]).run
            while run is not None and not run.stops:
                run = run.parent
            sequence.turn.last = run.stops[-1] if run is not None else None
        for number, own in self._windows:
            part = cast(WindowPart, sequence.parts[number])
            edge = own.window.last_end(part, sequence.committed_token_count)
            part.needed = tuple(own.fallen(part, own.window.needed_at(edge)))
            self._retention.need(part.needed, ())
