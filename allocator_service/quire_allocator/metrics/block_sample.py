"""Follows a sample of a pool's blocks by their digests, for metrics that plain counters cannot give.

Digests are hashes: those that begin with a small number are a random sample of all prefixes, the same in every pool and
on every day (SHARDS). The digests are filed in slices, by the time of their last use. If the newer slices have fewer
digests than a pool has room for, that pool would have hit the block under LRU eviction.

At first all digests are followed. Whenever there would be more than `_FOLLOWED_MIN`, half of them are dropped, down to
the pool's share. Otherwise the sample of a pool with few prefixes could be empty.

A slice is an eighth of the pool, and the model is no finer than that. An exactly ordered list for each size would cost
far more per use.

Lifecycle of a followed digest:

    1. asked      a prompt named it, and no commit has had it yet
    2. published  a commit had it
    3. gone       its block was evicted or dropped; a later commit brings the digest back to 2
    4. forgotten  since its last use, prompts named as many other digests as a pool of four times the size holds

Outcomes and lifetimes are those of the first group of full attention. Pools without full attention are not followed.
"""

from __future__ import annotations

from typing import Final

from quire._serving.metrics import Histogram
from quire.protocol.packing import entry_uint32
from quire.v1 import _packed_pb2 as packed

from quire_allocator.core.events import EventLog
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, PoolSpec
from quire_allocator.wire.step_columns import StepColumns

OUTCOMES: Final = ("hit", "group", "evicted", "computing", "new")
_HIT: Final = 0
_GROUP: Final = 1  # full attention had the block cached, but another group did not
_EVICTED: Final = 2  # the block was published earlier and has been evicted
_COMPUTING: Final = 3  # an earlier prompt asked for the block, and no commit has had it yet
_NEW: Final = 4

SIZES = (0.5, 1.0, 2.0, 4.0)  # sizes of modelled pools, in multiples of the real pool's size
AGE_SECONDS_BOUNDS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
_FOLLOWED_MIN: Final = 256  # a sample follows at least this many digests, if the pool holds so many
_BYTES: Final = 256  # number of values of a byte
_BEGINNINGS: Final = _BYTES * _BYTES  # number of values of a digest's first two bytes

_SLICES: Final = 8  # slices that together have as many digests as the real pool can hold
_SLICES_MAX: Final = 64

_ASKED: Final = 0
_PUBLISHED: Final = 1
_GONE: Final = 2
_UNKNOWN: Final = -1.0  # the block was published before the sample followed it


class _Slice:
    """Digests that were used one after the other, and how many of them were not used again since."""

    __slots__ = ("count", "digests")

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.count = 0


class _Followed:
    """A followed digest, with the times of its publication and last use, in seconds of the clock of `observe`."""

    __slots__ = ("published", "slice", "stage", "used")

    def __init__(self, now: float, newest: _Slice) -> None:
        self.published = _UNKNOWN
        self.used = now
        self.stage = _ASKED
        self.slice = newest


class BlockSample:
    """Follows a share of the blocks of one pool.

    Attributes:
        log: the pool's event log; a rebuilt pool has a new log, and needs a new sample.
        tokens: prompt tokens of a block; 0 if the pool is not followed.
        outcomes: blocks of new prompts, by `OUTCOMES`. A followed block also counts for the blocks that it represents.
        would_hit: blocks of new prompts that pools of `SIZES` would have hit.
        lifetimes: seconds from publication to eviction or drop.
        idles: seconds from the last use to eviction or drop.
        gaps: seconds from one use to the next.
    """

    def __init__(self, pool: Pool) -> None:
        self.log: EventLog = pool.log
        self._removed_count = 0
        self.outcomes = [0.0] * len(OUTCOMES)
        self.would_hit = [0.0] * len(SIZES)
        self.lifetimes = Histogram(AGE_SECONDS_BOUNDS)
        self.idles = Histogram(AGE_SECONDS_BOUNDS)
        self.gaps = Histogram(AGE_SECONDS_BOUNDS)
        self._digest_tokens = pool.digest_tokens
        self._room = room = _room(pool.spec)
        self._least = min(_BEGINNINGS, max(1, _FOLLOWED_MIN * _BEGINNINGS // room)) if room else _BEGINNINGS
        self.tokens = pool.digest_tokens if room else 0
        self._follow(_BEGINNINGS)
        self._slices = [_Slice()]  # in the order of use, the newest last
        self._followed: dict[bytes, _Followed] = {}  # digests that the largest modelled pool would have cached

    def _follow(self, beginning_count: int) -> None:
        """Follows digests whose first two bytes are a number below `beginning_count`."""
        room = self._room
        self._beginning_count = beginning_count
        self._weight = _BEGINNINGS / beginning_count
        # By the value of a digest's first byte: 0 if the sample may follow the digest, else 1.
        self._marks = bytes([byte * _BYTES >= beginning_count for byte in range(_BYTES)])
        self._rooms = [max(1, int(size * room * beginning_count / _BEGINNINGS)) for size in SIZES]
        self._slice_room = max(1, room * beginning_count // _BEGINNINGS // _SLICES)

    def observe(self, pool: Pool, step: StepColumns, reply: packed.StepReply, now: float) -> None:
        """Observes a step that was applied at `now`, in seconds of a monotonic clock."""
        if not self.tokens:
            return
        if step.commit_digest_data:
            followed = self._those_followed(step.commit_digest_data, 0, len(step.commit_digest_data))
            if followed:
                self._publish(step.commit_digest_data, followed, now)
        removed_count = self.log.removed_count - self._removed_count
        if removed_count:
            self._removed_count += removed_count
            self._remove(pool, removed_count, now)
        if step.grow_digest_data:
            self._ask_all(step, reply, now)

    def _publish(self, digests: bytes, offsets: list[int], now: float) -> None:
        for offset in offsets:
            digest = digests[offset : offset + DIGEST_BYTES]
            followed = self._followed.get(digest)
            if followed is None:  # no prompt asked for the block: it belongs to an answer
                followed = self._file(digest, None, now)
            if followed.stage != _PUBLISHED:
                followed.stage = _PUBLISHED
                followed.published = followed.used = now
        self._make_room()

    def _remove(self, pool: Pool, count: int, now: float) -> None:
        manager = pool.managers[0]
        for _, _, scope, _, _, source, start, end in self.log.latest_removed(count):
            if scope.manager is not manager:
                continue
            for offset in self._those_followed(source, start, end):
                followed = self._followed.get(bytes(source[offset : offset + DIGEST_BYTES]))
                if followed is None or followed.stage != _PUBLISHED:
                    continue
                followed.stage = _GONE
                self.idles.observe(now - followed.used)
                if followed.published != _UNKNOWN:
                    self.lifetimes.observe(now - followed.published)

    def _ask_all(self, step: StepColumns, reply: packed.StepReply, now: float) -> None:
        """Observes the prompts of new sequences. Grows of live sequences have no digests."""
        results = reply.grow_results if step.has_refused else ()
        for row, digests in enumerate(step.grow_digests):
            if not digests or (results and results[row]):
                continue
            if self._beginning_count > self._least:
                self._follow_fewer(len(digests) // DIGEST_BYTES)
            offsets = self._those_followed(digests, 0, len(digests))
            if not offsets:
                continue
            prompt = step.grow_token_counts[row]
            if step.prompt_token_counts:
                prompt = max(prompt, step.prompt_token_counts[row])
            limit = min((prompt - 1) // self._digest_tokens, len(digests) // DIGEST_BYTES) * DIGEST_BYTES
            hit_end = entry_uint32(reply.matched_token_counts, row) // self._digest_tokens * DIGEST_BYTES
            group_end = entry_uint32(reply.unmatched.attended_token_counts, row) // self._digest_tokens * DIGEST_BYTES
            is_return = bool(step.returns and step.returns[row])
            while offsets and offsets[-1] >= limit:
                offsets.pop()
            named = [digests[offset : offset + DIGEST_BYTES] for offset in offsets]
            found = [self._followed.get(digest) for digest in named]
            if not is_return:
                for offset, followed in zip(offsets, found):  # noqa: B905 - mypyc compiles zip without strict=
                    self._count(followed, _HIT if offset < hit_end else _GROUP if offset < group_end else _NEW, now)
            for offset, digest, followed in zip(offsets, named, found):  # noqa: B905
                filed = self._file(digest, followed, now)
                filed.used = now
                if offset < hit_end:
                    filed.stage = _PUBLISHED
            self._make_room()

    def _count(self, followed: _Followed | None, outcome: int, now: float) -> None:
        """Counts a block of a new prompt; the outcome is `_HIT`, `_GROUP`, or `_NEW` if it was not cached."""
        if followed is None:
            self.outcomes[outcome] += self._weight
            return
        if followed.stage != _ASKED:
            newer = 0
            for each in reversed(self._slices):
                if each is followed.slice:
                    newer += each.count // 2  # about half of the digests in its slice are newer
                    break
                newer += each.count
            for number, room in enumerate(self._rooms):
                if newer < room:
                    self.would_hit[number] += self._weight
            if outcome == _HIT and followed.stage == _PUBLISHED:
                self.gaps.observe(now - followed.used)
        if outcome == _NEW:
            outcome = _COMPUTING if followed.stage == _ASKED else _EVICTED
        self.outcomes[outcome] += self._weight

    def _file(self, digest: bytes, followed: _Followed | None, now: float) -> _Followed:
        """Files a digest in the newest slice, and returns it."""
        newest = self._slices[-1]
        if followed is None:
            self._followed[digest] = followed = _Followed(now, newest)
        elif followed.slice is newest:
            return followed
        else:
            followed.slice.count -= 1
            followed.slice = newest
        newest.digests.append(digest)
        newest.count += 1
        return followed

    def _make_room(self) -> None:
        """Begins a slice if the newest one is full, and forgets digests that no modelled pool would have. Called only
        after a whole prompt, because a pool cannot evict the prompt's hits meanwhile."""
        self._follow_fewer(0)
        if len(self._slices[-1].digests) < self._slice_room:
            return
        slices = self._slices
        while len(self._followed) > self._rooms[-1]:
            for digest in self._held(slices.pop(0)):
                del self._followed[digest]
        if len(slices) == _SLICES_MAX:  # the two neighboring slices with the fewest digests become one
            sizes = [slices[number].count + slices[number + 1].count for number in range(len(slices) - 1)]
            number = sizes.index(min(sizes))
            older, newer = slices[number], slices.pop(number + 1)
            older.digests = self._held(older) + self._held(newer)
            for digest in older.digests:
                self._followed[digest].slice = older
            older.count += newer.count
        slices.append(_Slice())

    def _follow_fewer(self, coming_count: int) -> None:
        """Halves the followed share until few digests are left (including new ones), or until it is the pool's own
        share."""
        while (
            self._beginning_count > self._least
            and len(self._followed) + coming_count * self._beginning_count // _BEGINNINGS > _FOLLOWED_MIN
        ):
            self._follow(max(self._beginning_count // 2, self._least))
            for digest in [digest for digest in self._followed if not self._is_followed(digest, 0)]:
                self._followed.pop(digest).slice.count -= 1

    def _held(self, of: _Slice) -> list[bytes]:
        """Returns the digests of a slice that were not used again since."""
        held = list[bytes]()
        for digest in of.digests:
            followed = self._followed.get(digest)
            if followed is not None and followed.slice is of:
                held.append(digest)
        return held

    def _those_followed(self, source: bytes | bytearray, start: int, end: int) -> list[int]:
        """Returns the offsets of followed digests among those in `source[start:end]`."""
        firsts, offsets = source[start:end:DIGEST_BYTES], list[int]()
        if self._beginning_count > _BYTES:
            firsts = firsts.translate(self._marks)
        place, is_exact = firsts.find(0), self._beginning_count % _BYTES == 0
        while place >= 0:
            offset = start + place * DIGEST_BYTES
            if is_exact or self._is_followed(source, offset):  # unless the cut is exact, the second byte decides, too
                offsets.append(offset)
            place = firsts.find(0, place + 1)
        return offsets

    def _is_followed(self, source: bytes | bytearray, offset: int) -> bool:
        return source[offset] * _BYTES + source[offset + 1] < self._beginning_count


def _room(spec: PoolSpec) -> int:
    """Returns how many digests a pool's blocks can hold if only its groups of full attention use them."""
    sizes = [group.block_size for group in spec.groups if group.kind is GroupKind.FULL_ATTENTION]
    blocks = sum([spec.block_size / size for size in sizes])  # blocks per digest
    return int(spec.block_count / blocks) if blocks else 0
