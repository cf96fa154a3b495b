"""The free physical blocks of one pool, and the block counts of its namespaces.

Lifecycle of a block:

    1. empty free   no digest: on the stack `empty`
    2. held         in at least one table; `take` grants empty blocks, and evicts cached ones if too few are empty
    3. cached free  in no table, but published: hittable until evicted

Groups of equal specification share one *manager* (`full.py`, `windows.py`, `states.py`), which knows its held and
cached blocks. This module knows the empty blocks, the number of cached blocks, and the queue of eviction candidates.
Empty blocks are granted first, the last returned one first. Then cached blocks are evicted in the policy's order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from quire_allocator.core.eviction.policies import DEFAULT_POLICY, POLICIES
from quire_allocator.core.eviction.queue import Candidates, EvictionQueue
from quire_allocator.core.scopes import Namespace, Scope, Scoped

EMPTIED_TOLD_MAX: Final = 16_384  # the reply to one step names at most this many emptied blocks
KEPT_SHARE: Final = 0.25  # largest share of a pool that the callers of one namespace may keep cached
_COUNT_AFTER_MS: Final = 1_000  # shortest time between two counts of the kept blocks of a namespace


class Blocks:
    """The free blocks of a pool that has `block_count` blocks."""

    def __init__(self, block_count: int, policy: str = "", first_id: int = 0) -> None:
        self.block_count = block_count
        # Blocks from index `_top` on are empty. In a new pool, the lowest id is granted first.
        self._stack = array("I", range(first_id, first_id + block_count))
        self._top = 0
        self.cached_count = 0
        self.run_count = 0  # number of published runs of full attention
        self.evicted_count = self.dropped_count = 0
        # Blocks evicted because of a quota, and blocks evicted for another namespace. `foreign_evictions` counts the
        # latter by (victim, taker), until the metrics take these counts.
        self.quota_evicted_count = self.foreign_evicted_count = 0
        self.foreign_evictions: dict[tuple[str, str], int] = {}
        self.kept_block_count_max = int(KEPT_SHARE * block_count)  # most kept blocks of one namespace
        self.taker: Namespace | None = None  # the namespace that `take` grants blocks to
        self.policy = POLICIES[policy or DEFAULT_POLICY](block_count)
        self.queue = EvictionQueue(self.policy)
        self.namespaces: dict[str, Namespace] = {}

    @property
    def empty_count(self) -> int:
        """Counts the blocks in state 1 of the lifecycle."""
        return self.block_count - self._top

    @property
    def used_count(self) -> int:
        """Counts the blocks that are not empty."""
        return self._top

    def emptied(self, used_before: int) -> array[int]:
        """Returns the blocks that a step emptied, and perhaps some that were empty before. `used_before` bounds the
        number of blocks in use during the step: no block deeper in the stack was taken."""
        return self._stack[self._top : min(used_before, self._top + EMPTIED_TOLD_MAX)]

    @property
    def empty(self) -> array[int]:
        """Returns the blocks in state 1, the next to be granted first."""
        return self._stack[self._top :]

    @property
    def free_count(self) -> int:
        """Counts the blocks that can be granted: empty and cached."""
        return self.block_count - self._top + self.cached_count

    def take(self, count: int) -> array[int]:
        """Grants `count` blocks; the caller has checked `free_count`."""
        top = self._top
        short = count - (self.block_count - top)
        if short > 0:
            self._evict(short)
            top = self._top
        self._top = top + count
        return self._stack[top : top + count]

    def give_back(self, blocks: array[int]) -> None:
        """Puts blocks that no prompt can hit on the empty stack; the next `take` hands them out in this order."""
        top = self._top - len(blocks)
        self._stack[top : self._top] = blocks
        self._top = top

    # -- what managers report ------------------------------------------------------------------------------------------

    def now_held(self, entry: Scoped, count: int) -> None:
        """Counts `count` blocks of a cached entry as held again, and withdraws it from the queue."""
        scope = entry.scope
        scope.cached -= count
        scope.held += count
        self.cached_count -= count
        if entry.ticket:
            self.queue.discard(entry)

    def now_cached(self, entry: Scoped, count: int, *, is_candidate: bool) -> None:
        """Counts a published entry's blocks as cached, because its last holder left."""
        scope = entry.scope
        scope.held -= count
        scope.cached += count
        self.cached_count += count
        self.policy.cached(entry, count)
        if is_candidate:
            self.push(entry)

    def reranked(self, entry: Scoped) -> None:
        """Moves a candidate in the queue after the policy changed its value."""
        self.policy.revalued(entry)
        self.push(entry)

    def push(self, entry: Scoped) -> None:
        """Makes a cached entry a candidate, also in its namespace's own queue if it has one."""
        self.queue.push(entry)
        own = entry.scope.namespace.queue
        if own is not None:
            own.add(entry)

    def keep(self, space: Namespace, entries: Sequence[Scoped], keep_ms: int) -> None:
        """Evicts these entries late for `keep_ms` from now on, if they fit the share of the namespace."""
        now_ms = self.policy.now_ms
        new = [entry for entry in entries if entry.keep_until_ms <= now_ms]
        count = sum([entry.block_count for entry in new])
        is_due = now_ms >= space.kept_counted_ms + _COUNT_AFTER_MS
        if space.kept_block_count + count > self.kept_block_count_max and is_due:
            space.kept = list({e: 0 for e in space.kept if e.keep_until_ms > now_ms and e.block_count})  # no repeats
            space.kept_block_count = sum([entry.block_count for entry in space.kept])
            space.kept_counted_ms = now_ms
        if space.kept_block_count + count <= self.kept_block_count_max:
            for entry in entries:
                entry.keep_until_ms = max(entry.keep_until_ms, now_ms + keep_ms)
                if entry.ticket:
                    self.push(entry)
            space.kept += new
            space.kept_block_count += count

    def dropped(self, scope: Scope, count: int) -> None:
        """Subtracts evicted blocks from the cached ones, and forgets a namespace that has nothing left."""
        scope.cached -= count
        self.cached_count -= count
        if not scope.cached:
            self.forget_if_unused(scope.namespace)

    def forget_if_unused(self, namespace: Namespace) -> None:
        """Forgets a namespace without sequences and blocks: clients choose names, and unused ones must not pile up."""
        if namespace.sequence_count:
            return
        for scope in namespace.scopes:
            if scope.held or scope.cached:
                return
        self.namespaces.pop(namespace.name, None)

    def evict_from(self, namespace: Namespace, count: int) -> None:
        """Evicts at least `count` cached blocks of one namespace."""
        assert namespace.queue is not None, "only namespaces with a limit have their own queue"
        before = self.evicted_count
        self._evict(count, namespace.queue)
        self.quota_evicted_count += self.evicted_count - before

    def drop(self, namespace: Namespace | None) -> int:
        """Empties all cached blocks, of one namespace or (None) of all; returns how many."""
        before, evicted = self.cached_count, self.evicted_count
        if namespace is None:
            self._evict(self.cached_count, self.queue)
        elif namespace.queue is not None:
            self._evict(namespace.cached_count, namespace.queue)
        else:  # until the drop is done, the namespace gets a queue of its own
            namespace.queue = queue = Candidates(self.policy)
            for _, ticket, entry in self.queue.items():
                if isinstance(entry, Scoped) and entry.scope.namespace is namespace and ticket == entry.ticket:
                    queue.add(entry)
            self._evict(namespace.cached_count, queue)
            namespace.queue = None
        return self.note_dropped(before, evicted)

    def note_dropped(self, cached_before: int, evicted_before: int) -> int:
        """Counts the blocks that left the cache since `cached_before` as dropped, not as evicted; returns how many."""
        dropped = cached_before - self.cached_count
        self.dropped_count += dropped
        self.evicted_count = evicted_before
        return dropped

    def evict_whole(self, entry: Scoped) -> None:
        """Empties all blocks of a candidate."""
        while entry.ticket and entry.block_count:
            evicted = entry.scope.manager.evict(entry, entry.block_count)
            self.dropped(entry.scope, evicted)

    def _evict(self, count: int, queue: Candidates | None = None) -> None:
        """Evicts at least `count` blocks: from `queue`, or from the pool's queue for a grant to `taker`."""
        taker = self.taker if queue is None else None
        queue = queue or self.queue
        while count > 0:
            entry = queue.peek()
            assert isinstance(entry, Scoped), "the eviction queue is empty although blocks are cached"
            cached, victim = self.cached_count, entry.scope.namespace
            evicted = entry.scope.manager.evict(entry, count)
            self.dropped(entry.scope, evicted)
            self.evicted_count += evicted
            if taker is not None and taker is not victim:
                key = victim.name, taker.name
                self.foreign_evicted_count += evicted
                self.foreign_evictions[key] = self.foreign_evictions.get(key, 0) + evicted
            count -= cached - self.cached_count  # also counts blocks that were useful only together with `entry`

    def check_counts(self) -> None:
        """Raises AssertionError unless every block counts as exactly one of empty, cached and held. The cost does not
        depend on the number of blocks, because servers call this often."""
        held = cached = 0
        for space in self.namespaces.values():
            for scope in space.scopes:
                held += scope.held
                cached += scope.cached
        assert cached == self.cached_count, f"{self.cached_count} blocks count as cached, but namespaces have {cached}"
        used = self._top - cached
        assert held == used, f"{used} blocks count as held, but namespaces have {held}"

    def check_invariants(self) -> None:
        """Raises AssertionError if a block is twice among the empty ones."""
        assert len(set(self.empty)) == self.empty_count, "a block is in the empty stack twice"
