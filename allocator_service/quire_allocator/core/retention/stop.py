"""Defines stops, the runs that contain them, and the units that they need.

Full attention serves a prefix up to any of its block ends. A windowed group serves it only where the blocks of the
window before are still there, a state only after a checkpoint. A *stop* is a token count of a prefix at which a hit may
end, because every group can serve it there. Blocks that no stop needs are evicted first (`worth.py`).

Lifecycle of a stop:

    1. made        a commit, a hit, a fork or the end of a sequence has reached it, and every group can serve it
    2. continued   a deeper stop was made after it: only edited prompts still end here. If two paths
                   *part* at a stop, the stop stays as valuable as it was
    3. gone        a block that it needs was evicted, or it is too far before the end of its path

Lifecycle of a unit, which is one position of all groups of one windowed or state specification: `width` blocks that are
granted, shared, published and evicted together, because a hit needs all of them:

    1. private     granted to one sequence; forks of it share it (`live` counts the tables)
    2. published   a commit gave it a key, (position, digest), in the namespace's index; it never changes again
    3. cached      in no table, hittable, a candidate for eviction
    4. gone        evicted, or dropped before it was published: its blocks are empty

Lifecycle of a run, which is a stretch of published blocks of full attention and a node of a radix tree. A prompt of
thousands of blocks is one run, so sharing, forking and freeing it costs as little as for a short prompt:

    1. published   a commit made it; sequences end in it (`live` counts them, and children with holders of their own)
    2. extended    while only one sequence holds it, no run is below it and no other sequence has shared it
    3. split       where a prompt leaves it in the middle: the deep part stays the same object, so that sequences that
                   end in it need no change; a sequence ends only where a run ends
    4. cached      `live` is 0: hittable; a candidate for eviction once nothing hangs below it
    5. trimmed     eviction takes blocks from the deep end, until nothing is left

Radix trees of token sequences: SGLang (https://arxiv.org/abs/2312.07104).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from quire_allocator.core.eviction.queue import RANKED
from quire_allocator.core.scopes import Scope, Scoped
from quire_allocator.core.stretches import Stretch

UnitKey = tuple[int, bytes]  # position, digest
StopKey = tuple[str, int, bytes]  # namespace, number of tokens before the stop, digest of these tokens


class Unit(Scoped):
    """The blocks of one position.

    Attributes:
        first_position, first_digest: its key; the digest is empty while it is private.
        is_published: whether prompts can hit it. A flag, because reading `first_digest` misses the CPU cache.
        was_hit: whether a new sequence has begun with it.
        stops: the stops that need it; None if there never was one.
        needed_count: stops that need it, and live sequences that may make such a stop.
        aside_count: stops with `is_aside` that need it.
    """

    __slots__ = ("_digest", "_position", "aside_count", "blocks", "is_published", "needed_count", "stops", "was_hit")

    def __init__(self, scope: Scope, blocks: array[int]) -> None:  # runs for each block: `super()` costs too much
        self.scope = scope
        self.live = 1
        self.hits = self.released = self.ticket = self.keep_until_ms = 0
        self.kind = None
        self.worth = RANKED
        self.blocks = blocks
        self._position, self._digest = 0, b""
        self.is_published = self.was_hit = False
        self.stops: list[Stop] | None = None
        self.needed_count = self.aside_count = 0

    @property
    def block_count(self) -> int:
        return len(self.blocks)

    @property
    def first_position(self) -> int:
        return self._position

    @property
    def first_digest(self) -> bytes:
        """Returns its digest; empty while it is private."""
        return self._digest

    @property
    def key(self) -> UnitKey | None:
        """Returns the position and digest of a published unit; None while it is private."""
        return (self._position, self._digest) if self._digest else None

    def key_at(self, offset: int) -> bytes:
        return b"" if offset else self._digest

    def is_needed(self) -> bool:
        """Tells whether a stop, a live sequence that would make one, or a caller that asked to keep it needs it."""
        return self.needed_count > 0 or self.aside_count > 0 or self.keep_until_ms > 0

    def now_published(self, position: int, digest: bytes) -> None:
        """Sets the key under which the unit is published; without a digest it is private."""
        self._position = position
        self._digest = digest
        self.is_published = digest != b""


class Run(Stretch):
    """A stretch of published blocks that is a node of the tree. The root of a namespace has no blocks and no parent.

    Attributes:
        children: the runs below it, by first digest.
        stops: the stops in it or at its end, the deepest last.
    """

    __slots__ = ("children", "parent", "stops")

    def __init__(
        self, scope: Scope, parent: Run | None, first_position: int, digests: bytes | bytearray, blocks: array[int]
    ) -> None:
        super().__init__(scope, first_position, digests, blocks)
        self.parent = parent
        self.children = _NO_CHILDREN
        self.stops = _NO_STOPS

    def token_count(self) -> int:
        """Counts the tokens up to its end."""
        return self.end_position * self.scope.manager.block_size

    def token_count_before_stop(self) -> int:
        """Returns the token count of the last stop on its path before its deepest one, or 0."""
        if len(self.stops) > 1:
            return self.stops[-2].token_count
        above = self.parent
        while above is not None and not above.stops:
            above = above.parent
        return above.stops[-1].token_count if above is not None else 0


class Stop:
    """One token count where hits can end.

    Attributes:
        key: the key under which it is filed.
        needed: published positions of windows and checkpoints that a hit up to here needs; none is missing.
        runs: for each tree of full attention, the run that contains it, at its end or inside.
        parent: the stop before it on its path, when it was made; that stop may have ended since.
        way_count: live stops that were made right after it.
        is_parting: whether two stops followed it directly at the same time, or another path branches off there.
        answer_token_count: its distance from the end of the prompt, if the answer made it; else 0.
        is_early: whether it is the early stop of a prompt; another prompt may diverge before the next stop.
        is_aside: whether it is continued; its blocks are evicted before blocks that the policy ranks.
        is_gone: whether it has ended; sequences and stops that passed it may still refer to it.
    """

    __slots__ = (
        *("answer_token_count", "is_aside", "is_early", "is_gone", "is_parting", "key", "needed", "parent", "runs"),
        "way_count",
    )

    def __init__(self, key: StopKey, needed: Sequence[Unit], runs: Sequence[Run], *, parent: Stop | None) -> None:
        self.key = key
        self.needed = list(needed)
        self.runs = list(runs)
        self.parent = parent
        self.way_count = 0
        self.is_parting = False
        self.is_aside = False
        self.answer_token_count = 0
        self.is_early = False
        self.is_gone = False

    @property
    def token_count(self) -> int:
        """Counts the tokens before it."""
        return self.key[1]

    @property
    def is_continued(self) -> bool:
        """Tells whether only edited prompts would still end at this stop."""
        return self.way_count > 0 and not self.is_parting

    def stops_after(self) -> list[Stop]:
        """Returns the stops of all paths that continue from this one."""
        found, pending = list[Stop](), [self.runs[0]]
        while pending:
            run = pending.pop()
            found += [other for other in run.stops if other.token_count > self.token_count]
            pending += run.children.values()
        return found


# Most runs have neither children nor stops, and share these empty collections until their first child or stop.
_NO_CHILDREN: Final[dict[bytes, Run]] = {}
_NO_STOPS: Final[list[Stop]] = []


def living(stop: Stop | None) -> Stop | None:
    """Returns the stop, or the next one before it that is not gone."""
    while stop is not None and stop.is_gone:
        stop = stop.parent
    return stop
