"""The eviction policies, which rank cached blocks. `queue.py` has the entries and the queue."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Final

from quire_allocator.core.eviction.queue import BURDEN_MAX, LED, RANKED, Entry, EvictionPolicy
from quire_allocator.core.eviction.reuse_model import Family, Ghost, Ghosts, ReuseModel


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the entry that was released longest ago."""

    def __init__(self, block_count: int) -> None:
        self._time = 0

    def stored(self, entry: Entry, parent: Entry | None) -> None:
        entry.start_history(0, 0)

    def hit(self, entry: Entry) -> None:
        entry.hits += 1

    def released(self, entry: Entry) -> None:
        self._time += 1
        entry.released = self._time

    def value(self, entry: Entry) -> float:
        return entry.released


# An entry that was never shared has one of four families, by its parent: 0 no parent (a position of a window or state),
# 1 a run that was not shared, 2 a run shared 1 to 3 times, 3 a run shared `_POPULAR_HITS` times or more. A family has
# four kinds, by the length of the prompt: up to 0.5, 1 or 2 times the mean length, or longer.
_NEW_FAMILIES: Final = 4
_POPULAR_HITS: Final = 4
_LENGTH_EDGES = (0.5, 1.0, 2.0)  # not Final, because the compiler treats a Final tuple of floats as unset
_LENGTH_MEMORY: Final = 256  # the mean length covers about this many of the latest new entries
_LENGTHS: Final = len(_LENGTH_EDGES) + 1
# A shared entry has one of four families, by its number of hits: 1, 2, 3 to 7, or more. Each family has four kinds, by
# the last wait: below a quarter of the pool's blocks, below one pool, below four pools, or longer.
_LEVELS = (1, 2, 7)
_GAPS: Final = 4
_SHARED: Final = _NEW_FAMILIES * _LENGTHS
_LEFT: Final = _SHARED + (len(_LEVELS) + 1) * _GAPS  # the kind of deep ends that prompts leave behind
_KINDS: Final = _LEFT + 1
GHOSTS_MAX: Final = 65_536  # most evicted stretches that one pool remembers: 12 MiB
# Each family's prior: the share of its blocks that returns while the age doubles. Observations soon outweigh priors.
_BELIEFS = (0.05, 0.05, 0.03, 0.03, 0.2, 0.3, 0.4, 0.5, 0.01)
_FAMILIES = (
    *(Family(range(first, first + _LENGTHS), _BELIEFS[first // _LENGTHS]) for first in range(0, _SHARED, _LENGTHS)),
    *(
        Family(range(first, first + _GAPS), belief, range(_SHARED, _LEFT))
        for first, belief in zip(range(_SHARED, _LEFT, _GAPS), _BELIEFS[4:8], strict=True)
    ),
    Family(range(_LEFT, _LEFT + 1), _BELIEFS[8]),
)
_LEFT_FAMILY: Final = len(_FAMILIES) - 1


class ReuseValue(EvictionPolicy):
    """The default policy evicts first the entry that is least likely to be used again soon, for its size.

    Every cached entry has a kind. A shared entry's kind is its number of hits and its last wait; a new entry's kind is
    its parent and the length of its prompt. `reuse_model.py` learns when kinds return. Each kind has a lane in the
    order of release. The oldest and the newest entry of each lane are compared, and the least valuable is evicted.

    Deep ends are a separate kind. After a prompt diverges inside an entry, the rest of that entry is a deep end. In a
    new entry, the deep end has as many blocks as prompts usually leave behind: a half-filled block of a chat, a whole
    question about a document.
    """

    lane_count = _KINDS * (BURDEN_MAX + 1)

    def __init__(self, block_count: int) -> None:
        self.patience = block_count // 16
        self._time = 0  # the policy's clock: number of blocks that sequences asked for
        self._unlearned_time = 0  # the part of `_time` due to LED entries, which the model does not learn from
        self._model = ReuseModel(_FAMILIES, block_count)
        self._ghosts = Ghosts(self._model, 4 * block_count, min(1024 + block_count // 4, GHOSTS_MAX))
        self._gaps = (block_count / 4, block_count, block_count * 4)
        self._length_mean = 0.0
        self._medians = [0.0] * _NEW_FAMILIES  # median number of blocks that prompts leave behind, by origin
        self._left_behind = [0] * _NEW_FAMILIES  # the medians, rounded
        self._trimmed: tuple[Entry, bytes] | None = None  # the entry trimmed last, with the key of its first lost block

    def stored(self, entry: Entry, parent: Entry | None) -> None:
        """Records when the entry was stored, and its parent."""
        if parent is None:
            entry.start_history(0, self._time)
            entry.is_whole = False
        else:
            hits = parent.hits
            entry.start_history(1 if not hits else 2 if hits < _POPULAR_HITS else 3, self._time)

    def hit(self, entry: Entry) -> None:
        """Learns how long the entry waited for this hit."""
        self._time += entry.block_count
        if entry.worth == LED:
            self._unlearned_time += entry.block_count
        if not entry.live and entry.kind is not None:
            age = self._time - entry.released
            entry.gap = (3 * entry.gap + age) // 4 if entry.hits else age
            self._end(entry, returned=True)
            if entry.is_whole:
                self._learn_left_behind(entry.origin, 0)
        entry.is_whole = False
        entry.hits += 1

    def split(self, upper: Entry, lower: Entry) -> bool:
        """Learns how many blocks a prompt left behind when it diverged inside the entry, and gives the lower part the
        kind of deep ends."""
        count = lower.block_count
        if lower.is_whole:
            self._learn_left_behind(lower.origin, count)
            lower.is_whole = False
        self.cut(upper, lower)
        if lower.live or lower.hits or lower.kind is None:
            return False
        self._end(lower, returned=False)
        lower.released = self._time
        lower.kind = _LEFT
        self._model.start(_LEFT_FAMILY, _LEFT, count)
        return True

    def cut(self, upper: Entry, lower: Entry) -> None:
        """Divides the deep end between both parts. Later hits of the lower part show how many blocks prompts leave."""
        count = lower.block_count
        upper.is_whole = False
        upper.left_behind = max(0, lower.left_behind - count)
        lower.left_behind = min(lower.left_behind, count)

    def released(self, entry: Entry) -> None:
        """Stamps the entry and finds its kind."""
        count, kind = entry.block_count, entry.kind
        if kind is None:
            if self.evicted_count:
                self._recall(entry, count)
            self._time += count
        entry.released = self._time
        if entry.hits:
            level = bisect_left(_LEVELS, entry.hits)
            entry.kind = kind = _SHARED + level * _GAPS + bisect_right(self._gaps, entry.gap)
            self._model.start(_NEW_FAMILIES + level, kind, count)
            return
        family = entry.origin
        if kind is None:
            end = float(entry.first_position + count)
            mean = self._length_mean or end
            self._length_mean = mean + (end - mean) / _LENGTH_MEMORY
            entry.kind = kind = family * _LENGTHS + bisect_left(_LENGTH_EDGES, end / mean)
        left = self._left_behind[family]
        if left and left < count and entry.is_whole and self.trims:
            entry.left_behind = left
            count -= left
            self._model.start(_LEFT_FAMILY, _LEFT, left)
        self._model.start(family, kind, count)

    def put_aside(self, entry: Entry, block_count: int) -> None:
        is_counted = bool(entry.hits) or entry.is_successor
        if entry.worth == LED and not is_counted:  # LED blocks occupy the pool, so they advance the clock, too.
            self._time += block_count
            self._unlearned_time += block_count
        entry.released = self._time
        entry.kind = None

    def revalued(self, entry: Entry) -> None:
        """Stamps a RANKED entry, unless it was ranked when it was cached."""
        if entry.worth == RANKED and entry.kind is None:
            self.released(entry)

    def lane(self, entry: Entry) -> int:
        """Returns the lane of the entry's burden and kind. An entry with a deep end has the kind of deep ends."""
        assert entry.kind is not None, "never released"
        return entry.burden * _KINDS + (_LEFT if entry.left_behind else entry.kind)

    def value(self, entry: Entry) -> float:
        """Returns the expected gain of keeping the entry, for all the blocks that its hits take."""
        age = (self._time - entry.released) // self._model.unit
        kind = _LEFT if entry.left_behind else entry.kind
        assert kind is not None, "never released"
        return self._model.values[kind][age.bit_length()] / (1 << entry.burden)

    def evicted(self, entry: Entry, block_count: int) -> bool:
        """Remembers the blocks for a while, in case they return."""
        self.evicted_count += block_count
        self._model.learn(self._time, self._unlearned_time)
        entry.is_whole = False
        if entry.kind is None:
            return False
        kind, count = _LEFT if entry.left_behind else entry.kind, block_count
        if self._trimmed is not None and self._trimmed[0] is entry:
            behind = self._ghosts.take(self._trimmed[1])
            if behind is not None and behind.released == entry.released and behind.kind == kind:
                count += behind.block_count  # The entry's end was evicted just before: both become one `Ghost`.
            elif behind is not None:
                self._ghosts.add(self._trimmed[1], behind, self._time)
        key = entry.key_at(entry.block_count - block_count)
        self._trimmed = entry, key
        if key:
            self._ghosts.add(key, Ghost(kind, entry.hits, entry.released, count), self._time)
        if not entry.left_behind:
            return False
        entry.left_behind = max(0, entry.left_behind - block_count)
        return not entry.left_behind

    def _end(self, entry: Entry, *, returned: bool) -> None:
        """Tells the model that a cached entry has stopped waiting."""
        assert entry.kind is not None, "never released"
        age = self._time - entry.released
        if entry.left_behind:
            self._model.end(_LEFT, age, entry.left_behind, returned=returned)
        self._model.end(entry.kind, age, entry.block_count - entry.left_behind, returned=returned)
        entry.left_behind = 0

    def _recall(self, entry: Entry, count: int) -> None:
        """Finds the evicted stretches that begin like this new entry, and counts them as returned."""
        offset = 0
        while offset < count:
            key = entry.key_at(offset)
            ghost = self._ghosts.take(key) if key else None
            if ghost is None:
                return
            age = entry.released - ghost.released
            if not offset:
                entry.hits += ghost.hits + 1
                entry.gap = age
            back = min(ghost.block_count, count - offset)
            self._model.end(ghost.kind, age, back, returned=True)
            offset += back

    def _learn_left_behind(self, origin: int, count: int) -> None:
        """Moves the median of an origin toward `count` by a fifth of the median, at least by a fifth of a block."""
        median = self._medians[origin]
        step = 0.2 * max(1.0, median)
        if count > median:
            self._medians[origin] = median + step
        elif count < median:
            self._medians[origin] = max(0.0, median - step)
        self._left_behind[origin] = round(self._medians[origin])


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"reuse": ReuseValue, "lru": LeastRecentlyUsed}
DEFAULT_POLICY: Final = "reuse"
