"""Asks the allocators what the pools of workers have cached, and has the allocators drop cached blocks.

Each pool is asked for at each allocator, because the gateway does not know which one has it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import grpc
from quire import AsyncAllocator
from quire.errors import NotFoundError, QuireError
from quire.hashing import block_digests, prompt_digests
from quire.types import GroupKind, WorkerStatus
from quire.views import CacheDropped

from quire_gateway.backend import Backend
from quire_gateway.failures import ApiError, invalid, of_quire, unavailable
from quire_gateway.fleet import Fleet
from quire_gateway.prepared_call import Call

DROP_DIGESTS_MAX: Final = 1_024  # digests that an allocator accepts for drops between two steps of a worker


class Prefix(NamedTuple):
    """A prefix that is to be forgotten in one pool."""

    digests: tuple[bytes, ...] = ()
    kept_digest_count: int = 0


async def matched(fleet: Fleet, call: Call) -> dict[Backend, int]:
    """Returns how many leading tokens of a prompt each worker of its model has cached.

    Raises:
        ApiError: an allocator does not answer, or refuses.
    """
    backends = [backend for backend in fleet.backends if backend.serves(call.model)]
    found = dict.fromkeys(backends, 0)
    alike: dict[tuple[bytes, int], list[Backend]] = {}  # (root of the digests, block size) -> workers
    for backend in backends:
        alike.setdefault((_root(backend, call), _status(backend).block_size), []).append(backend)
    for (root, block_size), same in alike.items():
        digests = prompt_digests(root, call.tokens[0], block_size)
        for allocator in fleet.allocators:
            try:
                matches = await allocator.match_prefix(digests, call.namespace)
            except QuireError as error:
                raise _failure(error) from None
            counts = {match.pool: match.matched_token_count for match in matches}
            for backend in same:
                found[backend] = max(found[backend], counts.get(_status(backend).pool, 0))
    return found


def whole_blocks(backend: Backend, token_count: int) -> int:
    """Returns a token count, rounded down to whole blocks of a worker."""
    return token_count // _status(backend).block_size * _status(backend).block_size


async def dropped(
    fleet: Fleet, namespace: str, model: str | None, call: Call | None, keep_tokens: int, *, is_dry: bool
) -> CacheDropped | None:
    """Forgets a prompt's prefix, or all of a namespace, and returns the number of blocks.

    Args:
        fleet: the workers.
        namespace: the caller's namespace.
        model: without a prompt, only the pools of this model's workers; None for all.
        call: the prompt; None for the whole namespace.
        keep_tokens: leading tokens of the prompt that stay cached, rounded down to whole blocks.
        is_dry: only counts the blocks of a namespace. The result is None if an allocator does not list them.

    Raises:
        ApiError: an allocator does not answer, or refuses; or the prompt is too long to be dropped.
    """
    named = call.model if call is not None else None if model is None else fleet.model(model)
    backends = [each for each in fleet.backends if each.status is not None and (named is None or each.serves(named))]
    drops = {_status(each).pool: Prefix() if call is None else _prefix(each, call, keep_tokens) for each in backends}
    if call is not None:  # A prompt below one block has no digests. A drop without digests drops the whole namespace.
        drops = {pool: drop for pool, drop in drops.items() if drop.digests}
    blocks, held = 0, 0
    for allocator in fleet.allocators:
        for pool, drop in drops.items():
            try:
                if is_dry:
                    done = await _counted(allocator, pool, namespace)
                else:
                    cut = await fitting(allocator, pool, drop)
                    done = await allocator.drop_cache(pool, namespace, cut.digests or None, cut.kept_digest_count)
            except NotFoundError:
                continue
            except QuireError as error:
                raise _failure(error) from None
            if done is None:
                return None
            blocks, held = blocks + done.dropped_block_count, held + done.held_block_count
    return CacheDropped(blocks, held)


def _prefix(backend: Backend, call: Call, keep_tokens: int) -> Prefix:
    block_size = _status(backend).block_size
    digests = tuple(block_digests(_root(backend, call), call.tokens[0], block_size))
    return Prefix(digests, min(keep_tokens // block_size, len(digests)))


async def fitting(allocator: AsyncAllocator, pool: str, drop: Prefix) -> Prefix:
    """Returns a drop with as many digests as fit. With full attention, the blocks behind them are dropped, too.

    Raises:
        ApiError: too many digests, which cannot be cut: no group has full attention, or too many blocks are kept.
        QuireError: the allocator does not know the pool, or does not answer.
    """
    if len(drop.digests) <= DROP_DIGESTS_MAX:
        return drop
    groups = (await allocator.get_pool(pool)).spec.groups
    has_full = any(group.kind is GroupKind.FULL_ATTENTION for group in groups)
    if drop.kept_digest_count >= DROP_DIGESTS_MAX or not has_full:
        what = f"at most {DROP_DIGESTS_MAX:,} blocks of a prompt can be dropped or kept at this model"
        raise invalid("prompt", f"{what}, not {len(drop.digests):,}: drop the namespace, or a shorter prefix")
    return drop._replace(digests=drop.digests[:DROP_DIGESTS_MAX])


async def _counted(allocator: AsyncAllocator, pool: str, namespace: str) -> CacheDropped | None:
    """Returns what a drop of a namespace would do now; None if the allocator lists only larger namespaces."""
    usage = await allocator.get_pool_usage(pool)
    for each in usage.namespaces:
        if each.namespace == namespace:
            return CacheDropped(each.cached_block_count, each.held_block_count)
    return CacheDropped(0, 0) if usage.namespace_count == len(usage.namespaces) else None


def _failure(error: QuireError) -> ApiError:
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return unavailable("no allocator answers: try again")
    return of_quire(error, {})


def _root(backend: Backend, call: Call) -> bytes:
    return backend.root(call.namespace, call.model.adapter, call.ask.cache_salt)


def _status(backend: Backend) -> WorkerStatus:
    assert backend.status is not None, "only workers that have answered are chosen"
    return backend.status
