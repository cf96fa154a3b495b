"""Bounds the memory that the pools of one caller take, by estimates from counts.

An honest pool has long prefixes, about 44 bytes a block. A hostile owner publishes each block alone, or makes
sequences, stops and namespaces that share nothing: then a block takes twenty times as much. If a caller's pools take
too much, the pool that grows evicts cached blocks. If eviction is not enough, its step is refused. A caller that may do
everything is trusted, as every caller without a certificate is.

Pure: no clock, no wire.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from quire.protocol.permissions import EVERYTHING

from quire_allocator.core.events import DIGEST_BYTES_KEPT_MAX, EVENTS_KEPT_MAX
from quire_allocator.core.eviction.policies import GHOSTS_MAX
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.pool import Pool
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.scopes import Scoped
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, PoolSpec
from quire_allocator.wire.step_columns import StepColumns

# Estimated bytes of one pool, block, run and so on: Python's objects, and the overhead of Python's allocator.
# `tests/allocator/session/test_caller_memory.py` holds them above what pools of each shape take.
POOL_BYTES: Final = 32 << 10
BLOCK_BYTES: Final = 48  # a used block: its id, its digest, its entry in a table
RUN_BYTES: Final = 720  # a run: a published stretch of full attention
UNIT_BYTES: Final = 800  # a used position of windows or states
SCOPE_BYTES: Final = 900  # a namespace in one manager
PART_BYTES: Final = 420  # a sequence in one manager
SEQUENCE_BYTES: Final = 560  # a sequence, without its parts
STOP_BYTES: Final = 900  # a stop, without the units that it needs
NEED_BYTES: Final = 16  # a unit that a stop needs
PENDING_BYTES: Final = 64  # a digest that a sequence announces
GHOST_BYTES: Final = 190  # an evicted entry that the policy remembers
HISTORY_BYTES: Final = 200  # a digest of an earlier prompt
TRUSTED_BYTES: Final = 1 << 60  # allowed bytes of a trusted caller's pool; no pool gets so large
SLACK_BYTES: Final = 256 << 10  # bytes by which a pool may grow before all pools of its caller are summed again


def pool_bytes(pool: Pool) -> int:
    """Estimates the memory of a pool, without its event log: at least as much as the pool takes."""
    blocks, history, managers = pool.blocks, pool.coordinator.history, pool.managers
    taken = POOL_BYTES + 4 * blocks.block_count + BLOCK_BYTES * blocks.used_count + RUN_BYTES * blocks.run_count
    taken += SCOPE_BYTES * len(managers) * len(blocks.namespaces) + PENDING_BYTES * pool.pending.left_count
    taken += (SEQUENCE_BYTES + PART_BYTES * len(managers)) * len(pool.sequences)
    taken += GHOST_BYTES * min(blocks.policy.evicted_count, blocks.block_count // 4 + 1024, GHOSTS_MAX)
    of_units = [manager for manager in managers if manager.spec.kind is not GroupKind.FULL_ATTENTION]
    if of_units:
        needed = sum([manager.spec.window // manager.block_size + 2 for manager in of_units])
        taken += (STOP_BYTES + NEED_BYTES * needed) * len(pool.coordinator.retention.stops)
        taken += UNIT_BYTES * blocks.used_count // min([manager.width for manager in of_units])
    return taken if history is None else taken + HISTORY_BYTES * len(history)


def added_bytes(pool: Pool, columns: StepColumns) -> int:
    """Estimates the most memory that a step adds to a pool."""
    added = (RUN_BYTES + BLOCK_BYTES) * len(columns.commit_digest_data) // DIGEST_BYTES
    if columns.has_new:
        of_sequence = SEQUENCE_BYTES + (PART_BYTES + SCOPE_BYTES) * len(pool.managers) + RUN_BYTES
        added += of_sequence * (len(columns.grow_sequences) + len(columns.children))
        added += PENDING_BYTES * len(columns.grow_digest_data) // DIGEST_BYTES
    return added


def report_bytes(spec: PoolSpec, prefix_count: int, block_count: int, sequence_count: int) -> int:
    """Estimates the memory of a pool that is made of a report."""
    kinds = set(spec.groups)
    taken = POOL_BYTES + 4 * spec.block_count + BLOCK_BYTES * block_count + RUN_BYTES * (prefix_count + sequence_count)
    taken += SCOPE_BYTES * len(kinds) * min(prefix_count, block_count)
    return taken + (SEQUENCE_BYTES + PART_BYTES * len(kinds)) * sequence_count


class CallerMemory:
    """Bounds the memory of each caller's pools to `bytes_max`."""

    def __init__(self, directory: Directory, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._directory = directory
        self._staged: dict[str, tuple[Hashable, int]] = {}  # caller and bytes of each staged report, by pool

    def left_bytes(self, owner: Ownership, needed: int) -> int:
        """Returns the bytes that the caller's other pools leave to the pool of `owner`. If the allowances of the other
        pools leave less than `needed`, these allowances end: each of these pools asks again before it grows."""
        others = [each for each in self._pools(owner.caller) if each is not owner]
        staged = [
            size for name, (caller, size) in self._staged.items() if caller == owner.caller and name != owner.name
        ]
        left = self.bytes_max - sum(staged)
        allowed = sum([max(pool_bytes(each.pool), each.allowed_bytes) for each in others])
        if left - allowed >= needed:
            return left - allowed
        for each in others:
            each.allowed_bytes = 0
        return left - sum([pool_bytes(each.pool) for each in others])

    def _pools(self, caller: Hashable) -> list[Ownership]:
        return [owner for owner in self._directory.open_pools() if owner.caller == caller]

    def evict(self, owner: Ownership, added: int) -> None:
        """Evicts cached blocks of a pool until it may grow by `added` bytes, or none are left."""
        if owner.caller == EVERYTHING:
            return
        pool = owner.pool
        blocks, cached = pool.blocks, pool.blocks.cached_count
        goal = self.left_bytes(owner, pool_bytes(pool) + added) - added
        if pool_bytes(pool) > goal:
            goal -= self.bytes_max // 64  # evicts more than is needed, so that evictions are rare
        while pool_bytes(pool) > goal and blocks.cached_count:
            entry = blocks.queue.peek()
            assert isinstance(entry, Scoped), "the eviction queue is empty although blocks are cached"
            blocks.evict_whole(entry)
        blocks.note_dropped(cached, blocks.evicted_count)

    def allow(self, owner: Ownership, added: int) -> None:
        """Lets a pool grow by `added` bytes.

        Raises:
            Refusal: LIMIT, the caller's pools would take too much.
        """
        if owner.caller == EVERYTHING:
            owner.allowed_bytes = TRUSTED_BYTES
            return
        needed = pool_bytes(owner.pool) + added
        left = self.left_bytes(owner, needed + SLACK_BYTES)
        if needed > left:
            text = f"the pools of one caller may take {self.bytes_max:,} bytes, and this pool needs {needed:,}"
            raise Refusal("LIMIT", f"{text} of {left:,} that others leave: free sequences, or raise the limit")
        owner.allowed_bytes = min(left, needed + SLACK_BYTES)

    def allow_report(self, owner: Ownership, size: int) -> None:
        """Lets a pool be made of a report of `size` bytes, beside the pool that it will replace.

        Raises:
            Refusal: LIMIT, as above.
        """
        self.allow(owner, size)
        self._staged[owner.name] = owner.caller, size

    def end_report(self, owner: Ownership) -> None:
        """Notes that a report became a pool, or was given up."""
        self._staged.pop(owner.name, None)

    def share_event_logs(self, caller: Hashable) -> None:
        """Gives each pool of one caller its share of the events that are kept for a caller."""
        owners = self._pools(caller) if caller != EVERYTHING else []
        for owner in owners:
            log = owner.pool.log
            log.event_count_max = EVENTS_KEPT_MAX // len(owners)
            log.digest_bytes_max = DIGEST_BYTES_KEPT_MAX // len(owners)
            log.forget()
