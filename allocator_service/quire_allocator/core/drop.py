"""Emptying cached blocks that nobody is to hit any more: weights have changed, a tenant is gone, a load has failed."""

from __future__ import annotations

from typing import NamedTuple

from quire_allocator.core.pool import Pool


class CacheDrop(NamedTuple):
    """What to forget; fields as the arguments of `drop_cached`."""

    namespace: str | None = None
    digests: bytes = b""
    kept_digest_count: int = 0


def drop_cached(pool: Pool, namespace: str | None = None, digests: bytes = b"", kept_digest_count: int = 0) -> int:
    """Empties cached blocks; what sequences hold stays as it is, and can be hit. Returns how many blocks.

    Args:
        pool: whose.
        namespace: only what is cached in it; None for all.
        digests: only what stands on this path, from the root; of full attention everything behind it, too.
        kept_digest_count: leading digests of the path whose blocks stay.
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
