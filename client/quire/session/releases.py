"""Records releases of a stretch's blocks as ranges: all blocks that one free released are one entry.

A range [first, end) has indices of blocks in the stretch. Ranges rise and do not overlap. Each range belongs to the
operation that released its blocks last. Blocks outside all ranges were never released. A later release removes its
range from the earlier ones:

    [0, 9) of step 4, then [0, 6) of step 7      ->    [0, 6) of step 7, [6, 9) of step 4

Pure: no call, clock or lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple


class Release(NamedTuple):
    """Blocks [first, end) of a stretch that one operation released, deepest first.

    Attributes:
        rank: the deepest block's rank within the operation. The rank of each block before it is higher by `stride`.
    """

    first: int
    end: int
    step: int
    operation: int
    rank: int
    stride: int

    def within(self, first: int, end: int) -> Release:
        """Returns the part of the release in [first, end), which must not be empty."""
        first, end = max(first, self.first), min(end, self.end)
        return self._replace(first=first, end=end, rank=self.rank + (self.end - end) * self.stride)

    def moved(self, offset: int) -> Release:
        """Returns the release for a stretch that begins `offset` blocks later."""
        return self._replace(first=self.first - offset, end=self.end - offset)

    def rank_at(self, index: int) -> int:
        """Returns the rank of the block at `index`."""
        return self.rank + (self.end - 1 - index) * self.stride


def overlapping(releases: list[Release], first: int, end: int) -> slice:
    """Returns the slice of releases that overlap [first, end)."""
    return slice(bisect_right(releases, first, key=_end), bisect_left(releases, end, key=_first))


def note(releases: list[Release], new: Release) -> None:
    """Adds a release that is later than all others."""
    if not releases or releases[-1].end <= new.first:
        releases.append(new)
        return
    if new.first <= releases[0].first and releases[-1].end <= new.end:
        releases[:] = [new]
        return
    place = overlapping(releases, new.first, new.end)
    old, kept = releases[place], [new]
    if old and old[0].first < new.first:
        kept.insert(0, old[0].within(0, new.first))
    if old and old[-1].end > new.end:
        kept.append(old[-1].within(new.end, old[-1].end))
    releases[place] = kept


def part(releases: list[Release], first: int, end: int) -> list[Release]:
    """Returns the releases for blocks [first, end) as a separate stretch."""
    return [each.within(first, end).moved(first) for each in releases[overlapping(releases, first, end)]]


def _first(release: Release) -> int:
    return release.first


def _end(release: Release) -> int:
    return release.end
