"""Finds the longest prefix of a prompt whose window is published; searches from the right.

The search moves backward from one published position to the previous one. It looks at the first position of each window
first: if that is missing, no window with it is complete. A prompt of 62,500 blocks without a hit thus costs one look
at each position where stretches begin. With 64 blocks in a window, it also costs at most 62,500 / 64 looks at units.
"""

from __future__ import annotations

from quire_allocator.core.groups.fallen import Path, WindowScope
from quire_allocator.core.groups.units import UnitHit
from quire_allocator.core.groups.window_rules import WindowRule
from quire_allocator.core.retention.stop import Unit
from quire_allocator.core.stretches import Stretch


class WindowHit(UnitHit):
    """Published positions that serve a prefix.

    Attributes:
        first: the first position of the window.
        units: the units in the window.
        places: each stretch of the hit, with the positions [first, end) that the hit takes.
    """

    __slots__ = ("first", "places")

    def __init__(self, token_count: int, first: int, units: list[Unit], places: list[tuple[Stretch, int, int]]) -> None:
        super().__init__(token_count, 0, units)
        self.first = first
        self.places = places

    def count_blocks(self, width: int) -> None:
        """Sets the block counts, with `width` blocks for each position."""
        fallen = sum([end - first for _, first, end in self.places])
        self.block_count = width * (len(self.units) + fallen)
        self.cached_block_count = width * (sum([not unit.live for unit in self.units]) + fallen)


class WindowSearch:
    """Searches one namespace for one prompt, at positions before `end`."""

    __slots__ = ("_end", "_path", "_places", "_scope", "_stretches")

    def __init__(self, scope: WindowScope, path: Path, end: int) -> None:
        self._scope = scope
        self._path = path
        self._end = end
        self._stretches = scope.stretches_on(path, 0, end) if scope.stretches else []
        self._places: list[tuple[Stretch, int, int]] = []

    def find(self, rule: WindowRule, block_size: int, reset_positions: int) -> WindowHit:
        """Returns the longest hit. At multiples of `reset_positions`, unless 0, no token needs an earlier position."""
        scope, path = self._scope, self._path
        while self._end > 0:
            end = self._end = self._last_end(reset_positions)
            first = rule.first_needed(end * block_size) // block_size
            units, self._places = list[Unit](), []
            for position in range(first, end):
                unit = scope.find(position, path.at(position))
                if unit is not None:
                    units.append(unit)
                elif not self._stands(position):
                    self._end = position
                    break
            else:
                if end:
                    return WindowHit(end * block_size, first, units, self._places)
        return WindowHit(0, 0, [], [])

    def _stands(self, position: int) -> bool:
        """Adds the stretch with this position to the places; returns whether such a stretch exists."""
        places = self._places
        for begin, end, stretch in reversed(self._stretches):
            if begin <= position:
                if position >= end or stretch.digest_at(position) != self._path.at(position):
                    return False
                if places and places[-1][0] is stretch and places[-1][2] == position:
                    places[-1] = stretch, places[-1][1], position + 1
                else:
                    places.append((stretch, position, position + 1))
                return True
        return False

    def _last_end(self, reset_positions: int) -> int:
        """Returns the last position that follows a published position, or that needs no earlier position."""
        end, depths, stretches = self._end, self._scope.depths, self._stretches
        count = depths.count_before(end)
        last = depths.positions[count - 1] + 1 if count else 0
        while stretches and stretches[-1][0] >= end:
            stretches.pop()
        if stretches:
            last = max(last, min(stretches[-1][1], end))
        if reset_positions:
            last = max(last, end // reset_positions * reset_positions)
        return last
