"""The model of the default eviction policy: when blocks of each kind are used again.

Kinds are numbers. Kinds of one *family* behave similarly. With few observations, a kind borrows its family's estimate.
The model estimates, for each age, the share of blocks of this age that return at it. Ages are powers of two. A
block counts at the age where its wait ended, so that unfinished waits do not bias the estimate (Kaplan and Meier, JASA
1958). Evicted entries are remembered for a while, so that the estimate does not depend on earlier evictions.

The *value* of a kind at an age is the gain of keeping the block until the best time to give up:

    value(age) = max over t > age of   P(it returns before t) / E[time until it returns or t is reached]

This is Gittins' index (JRSS B, 1979); LHD (Beckmann, Chen, Cidon: NSDI '18) ranks by nearly the same. A value may rise
with age: if blocks return late, the newest block has the least value.

Time is a number of blocks. Everything here may be lost: the model learns it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_AGE_BITS: Final = 64
AGES: Final = 14  # number of ages: [0, 1), [1, 2), [2, 4), ... [2048, 4096), and beyond, in 64ths of the pool
_FAMILY_POOLS: Final = 1.0  # in a kind's estimate, its family counts as much as this many pools of observed blocks
_BELIEF_POOLS: Final = 0.25  # in a family's estimate, its prior counts as much as this many pools of observed blocks
_FORGET_POOLS: Final = 64  # time after which an observation counts half, in pools of blocks
# A family's values are recomputed after 4 new waits at first. Every 8 recomputations raise this number of waits by one,
# up to 64.
_LEARN_FIRST: Final = 4
_LEARN_SLOWER: Final = 8
_LEARN_EVERY: Final = 64


class Family(NamedTuple):
    """Kinds that behave similarly, and share one prior.

    Attributes:
        kinds: consecutive numbers.
        belief: prior share of returns per doubling of the age, from an eighth of the pool to 16 pools.
        wider: all kinds, its own included, whose common estimate this family borrows from; empty for none. Used only
        in a pool with LED blocks: the model does not learn from LED blocks, so few blocks are left to learn from.
    """

    kinds: range
    belief: float
    wider: range = range(0)


class ReuseModel:
    """Estimates when blocks of every kind of every family return, in a pool of `block_count` blocks.

    Attributes:
        unit: the unit of age, in blocks.
        values: the value of each kind, by the bit length of its age in units.
    """

    def __init__(self, families: Sequence[Family], block_count: int) -> None:
        kinds = sum(len(family.kinds) for family in families)
        self._families = families
        self._pool = max(1, block_count)
        self.unit = max(1, block_count // 64)
        self._edges = [0, *(self.unit << age for age in range(AGES - 1))]
        self._started = [0.0] * kinds
        self._returned = [[0.0] * AGES for _ in range(kinds)]
        self._ended = [[0.0] * AGES for _ in range(kinds)]
        self.values = [[0.0] * _AGE_BITS for _ in range(kinds)]
        self._time = self._elapsed = 0
        self._share = 1.0
        self._looks = [0] * len(families)
        self._starts_left = [_LEARN_FIRST] * len(families)
        self._due: dict[int, None] = {}
        low, high = self._pool / 8, 16 * self._pool
        self._beliefs = [
            [family.belief if low <= edge <= high else 0.0 for edge in self._edges[1:]] for family in families
        ]
        self._middles = [(self._edges[age] + self._edges[age + 1]) / 2 for age in range(AGES - 1)]
        for family in range(len(families)):
            self._learn(family)

    def start(self, family: int, kind: int, count: int) -> None:
        """Counts blocks that begin to wait."""
        self._started[kind] += count
        self._starts_left[family] -= 1
        if not self._starts_left[family]:
            self._starts_left[family] = min(_LEARN_EVERY, _LEARN_FIRST + self._looks[family] // _LEARN_SLOWER)
            self._due[family] = None

    def end(self, kind: int, age: int, count: int, *, returned: bool) -> None:
        """Counts blocks that were hit, or forgotten, after waiting."""
        bucket = min((age // self.unit).bit_length(), AGES - 1)
        self._ended[kind][bucket] += count
        if returned:
            self._returned[kind][bucket] += count

    def learn(self, time: int, unlearned_time: int = 0) -> None:
        """Recomputes the values of one family, if any is due. A family takes some ten microseconds."""
        if not self._due:
            return
        self._elapsed += time - self._time
        self._time = time
        if self._elapsed > 2 * _FORGET_POOLS * self._pool:
            self._elapsed //= 2
            self._started = [count / 2 for count in self._started]
            self._returned = [[count / 2 for count in row] for row in self._returned]
            self._ended = [[count / 2 for count in row] for row in self._ended]
        self._share = 1 - unlearned_time / time if time > unlearned_time else 1.0
        family, _ = self._due.popitem()
        self._looks[family] += 1
        self._learn(family)

    def _learn(self, family: int) -> None:
        kinds, _, wider = self._families[family]
        expected, weight = self._beliefs[family], _BELIEF_POOLS * self._pool * self._share
        seen = self._seen()
        for alike in (wider if self._share < 1 else kinds[:0], kinds):
            if len(alike) > 1:
                first, end = alike.start, alike.stop
                started = sum(self._started[first:end])
                returned = [sum(column) for column in zip(*self._returned[first:end])]
                ended = [sum(column) for column in zip(*self._ended[first:end])]
                expected = _hazards(started, returned, ended, seen, expected=expected, weight=weight)
        if len(kinds) > 1:
            weight = _FAMILY_POOLS * self._pool * self._share
        for kind in kinds:
            hazards = _hazards(
                self._started[kind], self._returned[kind], self._ended[kind], seen, expected=expected, weight=weight
            )
            self.values[kind] = _values(hazards, self._edges)

    def _seen(self) -> list[float]:
        """Returns, for each age, the share of all waits that began early enough to have reached the middle of that
        age."""
        elapsed = self._elapsed
        if not elapsed:
            return [0.0] * (AGES - 1)
        return [max(0.0, 1 - middle / elapsed) for middle in self._middles]


def _hazards(
    started: float,
    returned: list[float],
    ended: list[float],
    seen: list[float],
    *,
    expected: list[float],
    weight: float,
) -> list[float]:
    """Returns, for each age, the share of blocks that return there, as if `weight` more blocks behaved as expected."""
    hazards, left = [], 1.0
    for back, gone, share, belief in zip(returned, ended, seen, expected, strict=False):
        old = started * share
        hazard = (back + weight * belief) / (old * left + weight)
        hazards.append(hazard if hazard < 1.0 else 1.0)
        if gone:
            left = left - gone / old if gone < left * old else 0.0
    return hazards


def _values(hazards: list[float], edges: list[int]) -> list[float]:
    """Returns each age's value, 0 beyond the last: the slope of the upper hull of (time, returns) after that age."""
    times, returns = [0.0], [0.0]
    time = back = 0.0
    alive, edge = 1.0, 0
    for hazard, next_edge in zip(hazards, edges[1:]):
        lost = alive * hazard
        back += lost
        time += (next_edge - edge) * (alive - lost / 2)
        alive -= lost
        edge = next_edge
        times.append(time)
        returns.append(back)
    values = [0.0] * _AGE_BITS
    hull = [(time, back, 0.0)]  # points from right to left: time, returns, slope to the previous point
    for age in range(len(hazards) - 1, -1, -1):
        time, back = times[age], returns[age]
        while True:
            right, up, slope = hull[-1]
            rise = (up - back) / (right - time) if right > time else 0.0
            if rise > slope or len(hull) == 1:
                break
            hull.pop()
        values[age] = rise
        hull.append((time, back, rise))
    return values


class Ghost(NamedTuple):
    """The history of a stretch of blocks when it was evicted."""

    kind: int
    hits: int
    released: int
    block_count: int


class Ghosts:
    """Remembers the last evicted stretches, by the key of their first block."""

    def __init__(self, model: ReuseModel, block_count_max: int, count_max: int) -> None:
        self._model = model
        self._block_count_max = block_count_max
        self._count_max = count_max
        self._ghosts: dict[bytes, Ghost] = {}  # by key, in the order of eviction
        self._block_count = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def take(self, key: bytes) -> Ghost | None:
        """Returns the ghost with this key and forgets it; None if there is none."""
        ghost = self._ghosts.pop(key, None)
        if ghost is not None:
            self._block_count -= ghost.block_count
        return ghost

    def add(self, key: bytes, ghost: Ghost, time: int) -> None:
        """Remembers a ghost; forgets the oldest ones beyond the limits."""
        self.take(key)
        self._ghosts[key] = ghost
        self._block_count += ghost.block_count
        while self._block_count > self._block_count_max or len(self._ghosts) > self._count_max:
            oldest = next(iter(self._ghosts))
            kind, _, released, count = self._ghosts.pop(oldest)
            self._block_count -= count
            self._model.end(kind, time - released, count, returned=False)
