"""Empties cached blocks that must no longer be hit, after new weights, a departed tenant or a failed load."""

from __future__ import annotations

from typing import NamedTuple

from quire_allocator.core.pool import Pool


class CacheDrop(NamedTuple):
    """A part of the cache to drop: in one namespace (None: in all), all blocks after the kept digests of a prefix."""

    namespace: str | None
    digests: bytes
    kept_digest_count: int


def drop_cached(pool: Pool, namespace: str | None = None, digests: bytes = b"", kept_digest_count: int = 0) -> int:
    """Empties cached blocks, and returns how many. Blocks held by sequences stay, and can still be hit.

    Args:
        pool: the pool that has the blocks.
        namespace: drops only the cache of this namespace; None for all.
        digests: drops only blocks on this path from the root, and for full attention also all blocks below its end.
        kept_digest_count: leading digests of the path that keep their blocks.
    """
    space = None if namespace is None else pool.blocks.namespaces.get(namespace)
    if namespace is not None and space is None:
        return 0
    pool.admission.note_change()
    if space is None or not digests:
        return pool.blocks.drop(space)
    cached, evicted = pool.blocks.cached_count, pool.blocks.evicted_count
    for manager, scope in zip(pool.managers, space.scopes):
        manager.drop_path(scope, digests, kept_digest_count)
    return pool.blocks.note_dropped(cached, evicted)
