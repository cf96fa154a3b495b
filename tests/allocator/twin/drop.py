"""Drops of the twin of a pool: every cached slot that the drop names, the deepest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.allocator.twin.state import Slot

if TYPE_CHECKING:
    from tests.allocator.twin.pool_twin import TwinPool


def drop(pool: TwinPool, namespace: str | None = None, digests: Sequence[bytes] = (), kept: int = 0) -> int:
    """Empties the cached slots of all, of a namespace, or behind the first `kept` digests. Returns how many blocks."""
    before, leaving, pool.leaving = pool.cached_count(), pool.leaving, None
    meant = [slot for slot in pool.cached(namespace) if not digests or _is_behind(pool, slot, digests, kept)]
    for slot in sorted(meant, key=lambda slot: -slot.key[2] if slot.key else 0):
        if slot.key is not None:  # an earlier drop may have removed it already
            pool._drop(slot)
    if leaving is not None:
        leaving.clear()
        pool.leaving = leaving
    return before - pool.cached_count()


def _is_behind(pool: TwinPool, slot: Slot, digests: Sequence[bytes], kept: int) -> bool:
    """Returns whether a slot is behind the kept digests: anywhere below them for full attention, on the path for
    others."""
    assert slot.key is not None
    kind = pool.kinds[slot.kind]
    _, _, position, path = slot.key
    if kind.name == "state":
        return kept < position <= len(digests) and digests[position - 1] == path[-1]
    stride = kind.block_size // pool.digest_tokens
    own, first = list(digests[stride - 1 :: stride]), kept // stride
    if kind.name == "full_attention":
        return first < len(own) and list(path[: first + 1]) == own[: first + 1]
    return first <= position < len(own) and own[position] == path[-1]
