"""The state that a refused request must not change."""

from __future__ import annotations

from typing import Any

from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.readers import index
from quire_allocator.core.readers.usage import block_states
from quire_allocator.session.steps import pool_digest


def seen_of(owner: Ownership) -> tuple[Any, ...]:
    """Returns the sequences, tables and counts of a pool. This is cheap enough for every message."""
    pool = owner.pool
    counts = (pool.blocks.free_count, pool.blocks.cached_count, pool.blocks.evicted_count, pool.granted_block_count)
    rest = (pool.admission.promised_block_count, pool.last_sequence_id, pool.log.last_cursor)
    return owner.session_id, owner.steps.next_step, pool_digest(pool), len(pool.log._recorded), counts, rest


def deeply_seen_of(owner: Ownership) -> tuple[Any, ...]:
    """Returns all published prefixes, and the state of every block."""
    return tuple(index.walk(owner.pool)), block_states(owner.pool).to_bytes()
