"""Cached stretches: published blocks that fell out of the tables of windowed groups, held by no sequence.

A prompt of a million tokens leaves 62,500 blocks of 16 tokens behind a window, and perhaps no request ever needs them.
Blocks that fall out of a table together, and that no expected hit needs, are therefore one object.

Lifecycle of a stretch here:

    1. fallen      published by the commit that lets it fall out, or made of units that fell out together; cached
    2. cut         a prompt hits or computes some of its positions: these become units again; the part behind them
                   stays the same object
    3. trimmed     eviction takes blocks from the deep end of the stretch, until nothing is left

A stretch is found by its first position and digest. A digest stands for a whole prefix. A prompt with that digest
therefore agrees with the stretch up to some point, and a binary search finds this point.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.depths import Depths
from quire_allocator.core.groups.units import UnitScope
from quire_allocator.core.retention.retention import Retention
from quire_allocator.core.retention.stop import Unit, UnitKey
from quire_allocator.core.scopes import Evictor, Namespace, Scoped
from quire_allocator.core.spec import DIGEST_BYTES
from quire_allocator.core.stretches import Stretch


class Path:
    """The digests of consecutive blocks of one prefix.

    Attributes:
        digests: `step` bytes for each block; the last `DIGEST_BYTES` of them are the block's digest.
        begin: position of the first block.
    """

    __slots__ = ("begin", "digests", "step")

    def __init__(self, digests: bytes, step: int, begin: int) -> None:
        self.digests = digests
        self.step = step
        self.begin = begin

    def at(self, position: int) -> bytes:
        """Returns the digest of one block."""
        end = (position + 1 - self.begin) * self.step
        return self.digests[end - DIGEST_BYTES : end]

    def between(self, first: int, end: int) -> bytes:
        """Returns the digests of the blocks [first, end)."""
        return self.digests[(first - self.begin) * self.step : (end - self.begin) * self.step]

    def agreed(self, stretch: Stretch, end: int) -> int:
        """Returns the position, at most `end`, where a stretch and the path diverge. Their first digests are equal."""
        low, high = stretch.first_position + 1, min(end, stretch.end_position)
        while low < high:
            middle = (low + high + 1) // 2
            if stretch.digest_at(middle - 1) == self.at(middle - 1):
                low = middle
            else:
                high = middle - 1
        return low


def spans_between(positions: range, apart: list[range]) -> list[range]:
    """Returns the parts of `positions` that are in none of the ranges `apart`, rising."""
    spans, position = list[range](), positions.start
    for other in sorted(apart, key=lambda each: each.start):
        if len(other) and other.stop > position:
            if position < min(other.start, positions.stop):
                spans.append(range(position, min(other.start, positions.stop)))
            position = other.stop
    if position < positions.stop:
        spans.append(range(position, positions.stop))
    return spans


class WindowScope(UnitScope):
    """The units and stretches of a namespace in a manager of windows.

    Attributes:
        stretches: the cached stretches, by their first positions and digests.
        starts: first positions of the stretches.
    """

    __slots__ = ("starts", "stretches")

    def __init__(self, namespace: Namespace, manager: Evictor) -> None:
        super().__init__(namespace, manager)
        self.stretches: dict[UnitKey, Stretch] = {}
        self.starts = Depths()

    def file(self, stretch: Stretch) -> bool:
        """Makes a stretch findable, and returns True. Returns False if another stretch begins with the same digest:
        an owner must have made it up."""
        key = stretch.first_position, stretch.first_digest
        if key in self.stretches:
            return False
        self.stretches[key] = stretch
        self.starts.add(key[0])
        return True

    def unfile(self, stretch: Stretch) -> None:
        """Forgets where a stretch begins."""
        del self.stretches[(stretch.first_position, stretch.first_digest)]
        self.starts.remove(stretch.first_position)

    def stretches_on(self, path: Path, first: int, end: int) -> list[tuple[int, int, Stretch]]:
        """Returns the stretches that begin on a path at `first` or later. Each has its first position, and the
        position, at most `end`, where the stretch and the path diverge."""
        found = []
        for start in self.starts.between(first, end):
            stretch = self.stretches.get((start, path.at(start)))
            if stretch is not None:
                found.append((start, path.agreed(stretch, end), stretch))
        return found

    def through(self, position: int, digest: bytes) -> Stretch | None:
        """Returns the stretch that contains this position behind its first one. Examines every stretch."""
        for stretch in self.stretches.values():
            is_inside = stretch.first_position < position < stretch.end_position
            if is_inside and stretch.digest_at(position) == digest:
                return stretch
        return None


class Fallen:
    """All cached stretches of one manager: makes, cuts and evicts them."""

    def __init__(self, width: int, log: EventLog, retention: Retention) -> None:
        self._width = width
        self._log = log
        self._retention = retention
        self._blocks = retention.blocks

    def stretch(self, scope: WindowScope, fallen: Sequence[Scoped]) -> Stretch:
        """Makes a stretch of units that follow one another and are idle."""
        digests, blocks = list[bytes](), array("I")
        first = fallen[0].first_position
        for unit in fallen:
            assert isinstance(unit, Unit)
            digests.append(unit.first_digest)
            blocks.extend(unit.blocks)
            unit.live -= 1
            scope.remove(unit)
        return Stretch(scope, first, b"".join(digests), blocks)

    def cache(self, scope: WindowScope, stretch: Stretch) -> None:
        """Caches a published stretch that has lost its last holder."""
        if not scope.file(stretch):
            self._log.removed(scope, stretch.first_position, stretch.digests, 0, stretch.size)
            scope.held -= stretch.block_count
            self._blocks.give_back(stretch.blocks)
            return
        self._blocks.policy.stored(stretch, None)
        self._retention.cached_stretch(stretch)

    def evict(self, scope: WindowScope, stretch: Stretch, wanted: int) -> int:
        """Evicts positions from the deep end of a cached stretch: at least `wanted` blocks, or all that it has. Returns
        how many blocks became empty."""
        size = stretch.size
        positions = min(size // DIGEST_BYTES, -(-wanted // self._width))
        self._blocks.policy.evicted(stretch, positions * self._width)
        kept = size - positions * DIGEST_BYTES
        if not kept:
            self._blocks.queue.discard(stretch)
            scope.unfile(stretch)
        source, blocks = stretch.trim(kept)
        self._log.removed(scope, stretch.first_position + kept // DIGEST_BYTES, source, kept, size)
        self._blocks.give_back(blocks)
        self._retention.shrunk(stretch, len(blocks))
        return len(blocks)

    def cut(self, scope: WindowScope, stretch: Stretch, first: int, end: int) -> list[Unit]:
        """Turns the positions [first, end) of a cached stretch into units; the caller is about to hold them. The rest
        of the stretch keeps its place among the candidates for eviction."""
        begin, width = stretch.first_position, self._width
        above, size = (first - begin) * DIGEST_BYTES, (end - begin) * DIGEST_BYTES
        digests, blocks = bytes(stretch.digests[:size]), stretch.blocks[: (end - begin) * width]
        units = list[Unit]()
        for offset in range(first - begin, end - begin):
            own, place = blocks[offset * width : (offset + 1) * width], offset * DIGEST_BYTES
            key = begin + offset, digests[place : place + DIGEST_BYTES]
            if scope.find(key[0], key[1]) is not None:  # true only if the owner invented digests
                self._lose(stretch, key[0], key[1], own)
                continue
            unit = Unit(scope, own)
            unit.copy_history(stretch)
            unit.live = 0
            scope.add(unit, key)
            units.append(unit)
        scope.unfile(stretch)
        if size < stretch.size:
            stretch.drop_head(size)
        elif above:
            stretch.trim(above)
            above = 0
        else:
            self._blocks.queue.discard(stretch)
            stretch.trim(0)
            return units
        self._file_again(scope, stretch)
        if above:
            upper = Stretch(scope, begin, digests[:above], blocks[: (first - begin) * width])
            upper.copy_history(stretch)
            self._blocks.push(upper)
            self._file_again(scope, upper)
        return units

    def _file_again(self, scope: WindowScope, stretch: Stretch) -> None:
        """Files the rest of a cached stretch; drops it if another stretch begins with the same digest."""
        if not scope.file(stretch):
            self._blocks.queue.discard(stretch)
            self._lose(stretch, stretch.first_position, stretch.digests, stretch.blocks)

    def _lose(self, stretch: Stretch, position: int, digests: bytes | bytearray, blocks: array[int]) -> None:
        """Empties blocks of a cached stretch whose digests also name other blocks."""
        scope = stretch.scope
        self._log.removed(scope, position, digests, 0, len(digests))
        self._blocks.give_back(blocks)
        self._retention.shrunk(stretch, len(blocks))
        self._blocks.dropped(scope, len(blocks))

    def take_out(self, scope: WindowScope, path: Path, first: int, end: int, *, is_linked: bool) -> list[Unit]:
        """Turns all positions [first, end) of a path that are in stretches into units.

        If the sequence has the block before `first` (`is_linked`), a stretch with `first` cannot begin before it.
        """
        if first >= end or not scope.stretches:
            return []
        units = list[Unit]()
        through = scope.through(first, path.at(first)) if first and not is_linked else None
        if through is not None:
            units += self.cut(scope, through, first, first + 1)
        for begin, part_end, stretch in scope.stretches_on(path, first, end):
            units += self.cut(scope, stretch, begin, part_end)
        return units


def is_idle(entry: Scoped) -> bool:
    """Returns whether an entry is a published unit with one holder that nothing needs and no prompt has hit."""
    return isinstance(entry, Unit) and entry.live == 1 and entry.is_published and not (entry.is_needed() or entry.hits)
