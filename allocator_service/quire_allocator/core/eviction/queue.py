"""Candidates for eviction: entries, their rank by the policy, and the queue in eviction order.

Lifecycle of an entry (a run of the prefix tree, or one position of a windowed or state group):

    1. held       `live >= 1`: sequences end in it or below it; never evicted
    2. cached     `live == 0`: `policy.cached(entry)` has noted when; hittable
    3. candidate  cached and without children: `queue.push(entry)`; its ticket is not 0
    4. gone       its last block was evicted

A hit brings 2 and 3 back to 1 (`policy.hit`, `queue.discard`). Candidates leave in the order of the policy, block by
block from the deep end, so that descendants leave before their ancestors. The policy ranks only some candidates. Blocks
that no hit can need (`SPARE`) are evicted first, then blocks that few hits need (`ASIDE`). Blocks that leave with
another entry (`LED`) are last. Each of these three classes is evicted in the order of release.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any, Final

SPARE: Final = 0  # worth of blocks that a hit needs only by chance
ASIDE: Final = 1  # worth of blocks that a hit needs only if a prompt was edited, which is rare
RANKED: Final = 2  # worth of blocks that the policy ranks
LED: Final = 3  # worth of blocks that are useful only while another entry exists; the policy ranks that entry
BURDEN_MAX: Final = 4
_NEAR: Final = 2  # number of lanes that are compared between two full comparisons
_NOTHING: Final = -math.inf
SWEEP_AFTER: Final = 128  # additions until a sweep, besides one addition for each item that the last sweep left


class Entry(ABC):
    """One stretch of blocks with one history, as eviction sees it. If an entry is split, both parts keep that history.

    Attributes:
        live: number of holders; 0 means cached.
        hits: sequences that have shared it since it was stored.
        released: the policy's stamp when `live` last fell to 0. Lanes are in the order of this stamp.
        ticket: the ticket that the queue gave it; 0 if it is no candidate.
        left_behind: blocks at its deep end that prompts usually leave behind. They are evicted first, and alone.
        kind: the policy's kind of this entry; None until its first release.
        gap: how long it waited for its last hit.
        origin: the kind of its parent when it was stored.
        is_whole: whether it was never shared, split or trimmed.
        is_successor: whether it replaced an entry of the same turn, so caching it does not advance the policy's clock.
        keep_until_ms: until this time a RANKED entry leaves after all other RANKED ones; 0 unless a caller asked.
        worth: SPARE, ASIDE, RANKED or LED, while it is cached.
        burden: log2((own + led) / own) in blocks since the previous stop, rounded down, at most `BURDEN_MAX`.
    """

    __slots__ = (
        *("burden", "gap", "hits", "is_successor", "is_whole", "kind", "live", "origin", "released", "left_behind"),
        *("keep_until_ms", "ticket", "worth"),
    )

    kind: int | None

    def __init__(self) -> None:
        self.live = self.hits = self.released = self.ticket = self.keep_until_ms = 0
        self.kind = None
        self.worth = RANKED

    def start_history(self, origin: int, time: int) -> None:
        """Begins the history of an entry that was stored just now."""
        self.origin = origin
        self.released = time
        self.kind = None
        self.gap = self.left_behind = self.burden = 0
        self.is_whole = True
        self.is_successor = False

    def copy_history(self, other: Entry) -> None:
        """Copies the history of `other`, because this entry was cut off from `other`."""
        self.worth = other.worth
        self.keep_until_ms = other.keep_until_ms
        self.hits = other.hits
        self.released = other.released
        self.kind = other.kind
        self.gap = other.gap
        self.left_behind = self.burden = 0
        self.origin = other.origin
        self.is_whole = other.is_whole
        self.is_successor = other.is_successor

    @property
    @abstractmethod
    def block_count(self) -> int:
        """Counts the blocks that leave when the entry is evicted."""

    @property
    @abstractmethod
    def first_position(self) -> int:
        """Counts the positions of its prefix before this entry."""

    @abstractmethod
    def key_at(self, offset: int) -> bytes:
        """Returns a key of the content from block `offset` on, independent of its location; empty if none."""


class EvictionPolicy(ABC):
    """Ranks candidates. Callers report each event in order, and set `now_ms` before."""

    now_ms = 0
    lane_count = 1
    patience = 1  # the ends of all lanes are compared again after this many evicted blocks
    evicted_count = 0
    trims = True  # whether the rest of a trimmed entry can still be hit

    @abstractmethod
    def stored(self, entry: Entry, parent: Entry | None) -> None:
        """Notes that `entry` was published below `parent`. An entry may grow until its first release."""

    @abstractmethod
    def hit(self, entry: Entry) -> None:
        """Notes that a new sequence shares `entry` and will hold it next."""

    def split(self, upper: Entry, lower: Entry) -> bool:
        """Notes that `lower` was cut off `upper`, with its history. Returns whether the rank of `lower` changed."""
        return False

    def cut(self, upper: Entry, lower: Entry) -> None:  # noqa: B027 - optional: both parts keep the history by default
        """Splits the history, because the prompt that hit `upper` continues along `lower`."""

    def cached(self, entry: Entry, block_count: int) -> None:
        """Notes that `entry` of `block_count` blocks has lost its last holder. Descendants come before ancestors."""
        if entry.worth == RANKED:
            self.released(entry)
        else:
            self.put_aside(entry, block_count)

    def revalued(self, entry: Entry) -> None:  # noqa: B027 - optional: by default the stamp stays
        """Notes that the worth of a cached entry changed."""

    @abstractmethod
    def released(self, entry: Entry) -> None:
        """Stamps a RANKED entry: notes the time in `released`."""

    def put_aside(self, entry: Entry, block_count: int) -> None:
        """Stamps an entry of `block_count` blocks that is not RANKED, and learns nothing from it."""
        self.released(entry)

    def lane(self, entry: Entry) -> int:
        """Returns the lane of a candidate. Candidates of one lane are in the order of their stamps."""
        return 0

    @abstractmethod
    def value(self, entry: Entry) -> float:
        """Returns the value of a candidate. Among the ends of all lanes, the smallest value is evicted first."""

    def evicted(self, entry: Entry, block_count: int) -> bool:
        """Notes that `block_count` blocks leave `entry`, which still counts them. Returns whether its rank changed."""
        self.evicted_count += block_count
        return False


class _Lane:
    """Candidates of one lane: a heap gives the first, a stack the last one pushed. Outdated items stay in both."""

    __slots__ = ("heap", "is_near", "stack")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Entry]] = []
        self.stack: list[tuple[int, int, Entry]] = []
        self.is_near = False

    def first(self) -> Entry | None:
        """Returns the candidate with the smallest stamp, or None."""
        heap = self.heap
        while heap and heap[0][1] != heap[0][2].ticket:
            heappop(heap)
        return heap[0][2] if heap else None

    def last(self) -> Entry | None:
        """Returns the candidate that was pushed last, or None."""
        stack = self.stack
        while stack and stack[-1][1] != stack[-1][2].ticket:
            stack.pop()
        return stack[-1][2] if stack else None

    def sweep(self) -> int:
        """Drops outdated items; returns how many remain."""
        if not self.heap:  # Most lanes have an empty heap. All items of their stacks are then outdated.
            self.stack.clear()
            return 0
        self.heap = [item for item in self.heap if item[1] == item[2].ticket]
        self.stack = [item for item in self.stack if item[1] == item[2].ticket]
        heapify(self.heap)
        return len(self.heap)


class _Line:
    """Candidates that are evicted in the order of their stamps, under any policy.

    Most candidates arrive in that order: in decoding, a block falls out of its window at every edge. Two lists hold
    these; a heap holds the others. Each addition drops at most one outdated entry from the front of the lists.
    """

    __slots__ = ("_begin", "_entries", "_heap", "_last", "_tickets")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._tickets: list[int] = []
        self._begin = 0  # index of the first entry in both lists; items before it are gone
        self._last = 0  # the stamp of the last entry in the lists
        self._heap: list[tuple[int, int, Entry]] = []

    def push(self, entry: Entry) -> None:
        """Adds an entry that has a new ticket."""
        if entry.released < self._last:
            heappush(self._heap, (entry.released, entry.ticket, entry))
            return
        entries, tickets, begin = self._entries, self._tickets, self._begin
        self._last = entry.released
        entries.append(entry)
        tickets.append(entry.ticket)
        if tickets[begin] != entries[begin].ticket:
            self._begin = begin = begin + 1
            if begin > SWEEP_AFTER and 2 * begin > len(entries):
                del entries[:begin], tickets[:begin]
                self._begin = 0

    def __len__(self) -> int:
        """Counts all entries, outdated ones included."""
        return len(self._entries) - self._begin + len(self._heap)

    def first(self) -> Entry | None:
        """Returns the candidate with the smallest stamp, the first one pushed among equals; None if there is none."""
        entries, tickets, begin, heap = self._entries, self._tickets, self._begin, self._heap
        while begin < len(entries) and tickets[begin] != entries[begin].ticket:
            begin += 1
        self._begin = begin
        while heap and heap[0][1] != heap[0][2].ticket:
            heappop(heap)
        if begin == len(entries):
            if begin:
                self._begin = self._last = 0
                entries.clear()
                tickets.clear()
            return heap[0][2] if heap else None
        entry = entries[begin]
        if heap and (heap[0][0], heap[0][1]) < (entry.released, entry.ticket):
            return heap[0][2]
        return entry

    def items(self) -> list[tuple[int, int, Entry]]:
        """Returns stamp, ticket and entry of all candidates, outdated ones included."""
        listed = [(entry.released, ticket, entry) for entry, ticket in zip(self._entries, self._tickets)]
        return [*listed[self._begin :], *self._heap]

    def sweep(self) -> int:
        """Drops outdated items; returns how many remain."""
        rows = zip(self._entries[self._begin :], self._tickets[self._begin :])
        self._entries = [entry for entry, ticket in rows if ticket == entry.ticket]
        self._tickets = [entry.ticket for entry in self._entries]
        self._begin = 0
        self._heap = [item for item in self._heap if item[1] == item[2].ticket]
        heapify(self._heap)
        return len(self._entries) + len(self._heap)


class Candidates:
    """Entries in eviction order, by the tickets of an `EvictionQueue`.

    Comparing both ends of all lanes takes long. Between two full comparisons, only the two lanes that were best are
    looked at. An entry that is added to another lane with a smaller value than `_bound` forces a full comparison.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._lanes = [_Lane() for _ in range(policy.lane_count)]
        self._lines = [_Line() for _ in range(RANKED + 2)]  # one line for each worth; the line of RANKED stays empty
        self._kept: list[tuple[int, int, int, Entry]] = []  # a heap of `keep_until_ms`, stamp, ticket and entry
        self._near: list[_Lane] = []
        self._bound = _NOTHING  # lowest value at the ends of the lanes outside `_near`
        self._compare_at = 0
        self._sweep_in = SWEEP_AFTER

    def add(self, entry: Entry) -> None:
        """Adds an entry that has a new ticket."""
        policy = self._policy
        worth = entry.worth
        if worth != RANKED:
            self._lines[worth].push(entry)
        elif entry.keep_until_ms > policy.now_ms:
            heappush(self._kept, (entry.keep_until_ms, entry.released, entry.ticket, entry))
        else:
            lane = self._lanes[policy.lane(entry)]
            item: Any = (entry.released, entry.ticket, entry)  # with an exact type, mypyc would make two tuples
            heappush(lane.heap, item)
            if len(self._lanes) > 1:
                lane.stack.append(item)
                if not lane.is_near and self._bound > _NOTHING and policy.value(entry) < self._bound:
                    self._bound = _NOTHING
        self._sweep_in -= 1
        if not self._sweep_in:
            self._sweep_in = SWEEP_AFTER + self._sweep()

    def peek(self) -> Entry | None:
        """Returns the entry that leaves first, or None. An entry stays a candidate until it is discarded."""
        if (early := self._lines[0].first() or self._lines[1].first()) is not None:
            return early
        while self._kept:
            until, _, ticket, entry = self._kept[0]
            if ticket == entry.ticket and until > self._policy.now_ms:
                return self._peek_ranked() or entry
            heappop(self._kept)
            if ticket == entry.ticket:
                self.add(entry)
        return self._peek_ranked() or self._lines[-1].first()

    def _peek_ranked(self) -> Entry | None:
        """Returns the entry that the policy evicts first."""
        if len(self._lanes) == 1:
            return self._lanes[0].first()
        if self._policy.evicted_count < self._compare_at:
            best, value = self._least(self._near)
            if value <= self._bound and best is not None:
                return best
        self._compare_at = self._policy.evicted_count + self._policy.patience
        return self._compare()

    def items(self) -> list[tuple[int, int, Entry]]:
        """Returns stamp, ticket and entry of all candidates, outdated ones included, in no order."""
        ranked = [item for lane in self._lanes for item in lane.heap]
        return [*ranked, *[item[1:] for item in self._kept], *(item for line in self._lines for item in line.items())]

    def _item_count(self) -> int:
        """Counts all items, outdated ones included."""
        count = len(self._kept) + sum([len(line) for line in self._lines])
        return count + sum([max(len(lane.heap), len(lane.stack)) for lane in self._lanes])

    def _sweep(self) -> int:
        """Drops outdated items everywhere; returns how many remain."""
        self._kept = [item for item in self._kept if item[2] == item[3].ticket]
        heapify(self._kept)
        left = sum([line.sweep() for line in self._lines]) + sum([lane.sweep() for lane in self._lanes])
        return left + len(self._kept)

    def _least(self, lanes: Iterable[_Lane]) -> tuple[Entry | None, float]:
        """Returns the least valuable end of some lanes, and its value."""
        value_of = self._policy.value
        best, least = None, math.inf
        for lane in lanes:
            first, last = lane.first(), lane.last()
            if first is None or last is None:
                continue
            value = value_of(first)
            if value < least:
                best, least = first, value
            if last is not first:
                value = value_of(last)
                if value < least:
                    best, least = last, value
        return best, least

    def _compare(self) -> Entry | None:
        """Compares both ends of all lanes, and returns the entry that leaves first."""
        for lane in self._near:
            lane.is_near = False
        ranked = [(self._least((lane,))[1], number) for number, lane in enumerate(self._lanes) if lane.heap]
        ranked.sort()
        self._near = [self._lanes[number] for _, number in ranked[:_NEAR]]
        for lane in self._near:
            lane.is_near = True
        self._bound = ranked[_NEAR][0] if len(ranked) > _NEAR else math.inf
        return self._least(self._near)[0]


class EvictionQueue(Candidates):
    """Queues all candidates of a pool."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self._last_ticket = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def _sweep(self) -> int:
        """Sweeps only if more than half of the items are outdated: looking at an item costs more than adding it."""
        count = self._item_count()
        return super()._sweep() if count > 2 * self._count else count

    def push(self, entry: Entry) -> None:
        """Makes a cached entry without children a candidate, or moves a candidate to its new place in the queue."""
        if not entry.ticket:
            self._count += 1
        self._last_ticket += 1
        entry.ticket = self._last_ticket
        self.add(entry)

    def discard(self, entry: Entry) -> None:
        """Withdraws an entry; does nothing if it is no candidate."""
        if entry.ticket:
            entry.ticket = 0
            self._count -= 1
