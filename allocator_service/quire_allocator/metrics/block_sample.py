"""Blocks of a pool that are followed by their digests, for metrics that counting alone cannot give.

Digests are hashes: those with a small first byte are a random sample of all prefixes, the same in every pool and on
every day (SHARDS). A pool of `4 * n` blocks is modelled by a list of `4 * n * share` of them, latest first, and so are
smaller ones: a block that such a list still has would have been a hit in a pool of that size that evicts the least
recently used one.

Lifecycle of a followed digest:

    1. asked      a prompt named it, and nobody has computed it yet
    2. published  a commit had it
    3. gone       it was evicted or dropped; a later commit brings it back to 2
    4. forgotten  as many others were named since as a pool of four times the size has room for

Stages and lifetimes are those of the first group of full attention. Pools without one are not followed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from quire._serving.metrics import Histogram
from quire.protocol.packing import unpack_uint32
from quire.v1 import _packed_pb2 as packed

from quire_allocator.core.events import EventLog
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, PoolSpec
from quire_allocator.wire.step_columns import StepColumns

OUTCOMES: Final = ("hit", "group", "evicted", "computing", "new")
_HIT: Final = 0
_GROUP: Final = 1  # full attention had it, another group not
_EVICTED: Final = 2  # it was published, and is no more
_COMPUTING: Final = 3  # a prompt before had named it
_NEW: Final = 4

SIZES = (0.5, 1.0, 2.0, 4.0)  # of modelled pools, in times the pool's own
AGE_SECONDS_BOUNDS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
_FOLLOWED_MIN: Final = 256  # blocks of the pool, where it has so many
_BYTES: Final = 256  # values of a digest's first byte
_FIRST_MIN: Final = 4  # of these are followed in large pools: one block in 64

_ASKED: Final = 0
_PUBLISHED: Final = 1
_GONE: Final = 2
_UNKNOWN: Final = -1.0  # published before it was followed


class _Followed:
    """A digest, in seconds of the clock of `observe`: when it was published, and when it was last of use."""

    __slots__ = ("published", "stage", "used")

    def __init__(self, now: float) -> None:
        self.published = _UNKNOWN
        self.used = now
        self.stage = _ASKED


class BlockSample:
    """Follows a share of the blocks of one pool.

    Attributes:
        log: the pool's; a pool that was rebuilt has another one, and needs another sample.
        tokens: prompt tokens that a followed block stands for; 0 where the pool is not followed.
        outcomes: followed blocks of new prompts, by `OUTCOMES`.
        would_hit: those of them that pools of `SIZES` would have hit.
        lifetimes: seconds from publication to eviction or drop.
        idles: seconds from the last use to eviction or drop.
        gaps: seconds from one use to the next.
    """

    def __init__(self, pool: Pool) -> None:
        self.log: EventLog = pool.log
        self._removed_count = 0
        self.outcomes = [0] * len(OUTCOMES)
        self.would_hit = [0] * len(SIZES)
        self.lifetimes = Histogram(AGE_SECONDS_BOUNDS)
        self.idles = Histogram(AGE_SECONDS_BOUNDS)
        self.gaps = Histogram(AGE_SECONDS_BOUNDS)
        self._digest_tokens = pool.digest_tokens
        room = _room(pool.spec)
        first_count = min(_BYTES, max(_FIRST_MIN, _FOLLOWED_MIN * _BYTES // room)) if room else 0
        self.tokens = pool.digest_tokens * _BYTES / first_count if room else 0.0
        self._marks = bytes([byte < first_count for byte in range(_BYTES)])
        self._rooms = [max(1, int(size * room * first_count / _BYTES)) for size in SIZES]
        self._smaller: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in SIZES[:-1]]
        self._followed: OrderedDict[bytes, _Followed] = OrderedDict()  # what the largest pool would have

    def observe(self, pool: Pool, step: StepColumns, reply: packed.StepReply, now: float) -> None:
        """Takes in a step that was applied at `now`, in seconds of a clock that never goes back."""
        if not self.tokens:
            return
        if step.commit_digest_data:
            self._publish(step.commit_digest_data, now)
        removed_count = self.log.removed_count - self._removed_count
        if removed_count:
            self._removed_count += removed_count
            self._remove(pool, removed_count, now)
        if step.grow_digest_data:
            self._ask_all(step, reply, now)

    def _publish(self, digests: bytes, now: float) -> None:
        for offset in self._places(digests[::DIGEST_BYTES]):
            digest = digests[offset * DIGEST_BYTES : (offset + 1) * DIGEST_BYTES]
            followed = self._followed.get(digest)
            if followed is None:  # computed by no prompt: an answer
                followed = self._name(digest, now, is_counted=False)
            if followed.stage != _PUBLISHED:
                followed.stage = _PUBLISHED
                followed.published = followed.used = now
        self._make_room()

    def _remove(self, pool: Pool, count: int, now: float) -> None:
        manager = pool.managers[0]
        for _, _, scope, _, _, source, start, end in self.log.latest_removed(count):
            if scope.manager is not manager:
                continue
            for offset in self._places(bytes(source[start:end:DIGEST_BYTES])):
                first = start + offset * DIGEST_BYTES
                followed = self._followed.get(bytes(source[first : first + DIGEST_BYTES]))
                if followed is None or followed.stage != _PUBLISHED:
                    continue
                followed.stage = _GONE
                self.idles.observe(now - followed.used)
                if followed.published != _UNKNOWN:
                    self.lifetimes.observe(now - followed.published)

    def _ask_all(self, step: StepColumns, reply: packed.StepReply, now: float) -> None:
        """Takes in the prompts of new sequences, which alone come with digests."""
        results = reply.grow_results if step.has_refused else ()
        matched = unpack_uint32(reply.matched_token_counts)
        attended = unpack_uint32(reply.unmatched.attended_token_counts)
        for row, digests in enumerate(step.grow_digests):
            if not digests or (results and results[row]):
                continue
            prompt = step.grow_token_counts[row]
            if step.prompt_token_counts:
                prompt = max(prompt, step.prompt_token_counts[row])
            limit = min((prompt - 1) // self._digest_tokens, len(digests) // DIGEST_BYTES)
            hit_end = matched[row] // self._digest_tokens if matched else 0
            group_end = attended[row] // self._digest_tokens if attended else 0
            is_return = bool(step.returns and step.returns[row])
            # Its end first: a pool, too, lets go of it first.
            for place in reversed(self._places(digests[: limit * DIGEST_BYTES : DIGEST_BYTES])):
                outcome = _HIT if place < hit_end else _GROUP if place < group_end else _NEW
                digest = digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
                self._ask(digest, outcome, now, is_counted=not is_return)
            self._make_room()

    def _ask(self, digest: bytes, outcome: int, now: float, *, is_counted: bool) -> None:
        followed = self._followed.get(digest)
        known, stage = followed is not None, _ASKED if followed is None else followed.stage
        followed = self._name(digest, now, is_counted=is_counted and stage != _ASKED)
        if outcome == _HIT:
            if stage == _PUBLISHED:
                self.gaps.observe(now - followed.used)
            followed.stage = _PUBLISHED
        elif outcome == _NEW and known:
            outcome = _COMPUTING if stage == _ASKED else _EVICTED
        followed.used = now
        if is_counted:
            self.outcomes[outcome] += 1

    def _name(self, digest: bytes, now: float, *, is_counted: bool) -> _Followed:
        """Makes a digest the latest of all modelled pools, and returns it."""
        for number, pool in enumerate(self._smaller):
            if digest in pool:
                pool.move_to_end(digest)
                self.would_hit[number] += is_counted
            else:
                pool[digest] = None
        followed = self._followed.get(digest)
        if followed is not None:
            self._followed.move_to_end(digest)
            self.would_hit[-1] += is_counted
            return followed
        self._followed[digest] = followed = _Followed(now)
        return followed

    def _make_room(self) -> None:
        """Lets go of what the modelled pools have no room for: after a whole prompt, because its hits are held."""
        for number, pool in enumerate(self._smaller):
            while len(pool) > self._rooms[number]:
                pool.popitem(last=False)
        while len(self._followed) > self._rooms[-1]:
            self._followed.popitem(last=False)

    def _places(self, first_bytes: bytes) -> Sequence[int]:
        """Returns the places of followed digests among those with these first bytes."""
        marks, places = first_bytes.translate(self._marks), list[int]()
        place = marks.find(1)
        while place >= 0:
            places.append(place)
            place = marks.find(1, place + 1)
        return places


def _room(spec: PoolSpec) -> int:
    """Returns how many digests a pool has blocks for, counted as if it had only its groups of full attention."""
    sizes = [group.block_size for group in spec.groups if group.kind is GroupKind.FULL_ATTENTION]
    blocks = sum([spec.block_size / size for size in sizes])  # of one digest
    return int(spec.block_count / blocks) if blocks else 0
