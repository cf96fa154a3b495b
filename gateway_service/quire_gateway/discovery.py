"""Asks the allocators which workers they know, and where a prompt goes.

Lifecycle of what is known of an allocator:

    1. unknown   it has not answered yet: no prompt is routed
    2. known     it answered the last listing, at most a second ago: it routes the prompts of the models that it knows
    3. away      a listing or a route failed: its last list stays, and no prompt is routed until a listing succeeds
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc
import structlog
from quire import AsyncAllocator
from quire.errors import QuireError
from quire.hashing import prompt_digests
from quire.types import RoutedWorker

from quire_gateway.backend import Backend, ChosenWorker, Model

log = structlog.get_logger()

LOOK_TIMEOUT_S: Final = 5.0
ROUTE_S: Final = 2.0  # seconds for a route; an allocator that takes longer counts as away
EXCLUDED_MAX: Final = 256  # the most pools that a request for a route may exclude
_REFUSALS: Final = {
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
}
_AWAY: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


class KnownAllocator:
    """One allocator, and the workers that it knows.

    Attributes:
        workers: the workers that it knows, by pool.
        is_ready: whether it answered last time.
        refuses: whether it refuses to route. Forgotten when the allocator does not answer a listing.
    """

    def __init__(self, allocator: AsyncAllocator) -> None:
        self.allocator = allocator
        self.workers: dict[str, RoutedWorker] = {}
        self.is_ready = False
        self.refuses = False

    def has(self, model: str) -> bool:
        """Tells whether the allocator knows a worker of a model."""
        return any(worker.model == model for worker in self.workers.values())

    async def look(self) -> None:
        """Asks the allocator for its workers. If no answer comes, the last list stays, and no prompt is routed."""
        try:
            pools = await self.allocator.list_pools(timeout_s=LOOK_TIMEOUT_S)
        except QuireError as error:
            self.lost(error)
            self.refuses = False
            return
        self.workers = {pool.pool: pool.worker for pool in pools if pool.worker is not None}
        self.is_ready = True

    def lost(self, error: Exception) -> None:
        """Notes that the allocator does not answer."""
        if self.is_ready:
            log.warning("allocator does not answer", address=self.allocator.address, error=str(error))
        self.is_ready = False


class Discovery:
    """The workers that allocators know, and the routes of prompts. `look` has to be called again and again."""

    def __init__(self, allocators: Sequence[AsyncAllocator]) -> None:
        self.known = [KnownAllocator(allocator) for allocator in allocators]

    async def look(self) -> None:
        """Lists the workers of all allocators."""
        await asyncio.gather(*(each.look() for each in self.known))

    def addresses(self) -> set[str]:
        """Returns the addresses of all workers."""
        return {worker.address for each in self.known for worker in each.workers.values()}

    def rate(self, backend: Backend) -> int:
        """Returns a worker's prompt tokens per second, as the worker last told an allocator; 0 if unknown."""
        pool = "" if backend.status is None else backend.status.pool
        rates = [each.workers[pool].prefill_tokens_per_s for each in self.known if pool in each.workers]
        return max(rates, default=0)

    async def route(
        self,
        model: Model,
        candidates: Sequence[Backend],
        tokens: tuple[Sequence[int], Sequence[int]],
        namespace: str,
        cache_salt: str,
    ) -> ChosenWorker | None:
        """Returns the candidate that an allocator names for a prompt.

        Returns None if no allocator routes the prompt: the allocator is away or refuses, several allocators know
        workers of the model, or the candidates' pools do not share digests.

        Args:
            model: the model of the prompt.
            candidates: workers that serve it, at least one.
            tokens: the tokens of the prompt, and the tokens that the worker will look for in its cache.
            namespace: the namespace of the request.
            cache_salt: the salt of the request.
        """
        knowing = [each for each in self.known if each.has(model.base)]
        pools = {backend.status.pool: backend for backend in candidates if backend.status is not None}
        if len(knowing) != 1 or not knowing[0].is_ready or knowing[0].refuses:
            return None
        (known,), first = knowing, candidates[0]
        root = first.root(namespace, model.adapter, cache_salt)
        sizes = {backend.status.block_size for backend in pools.values() if backend.status is not None}
        if len(sizes) > 1 or any(each.root(namespace, model.adapter, cache_salt) != root for each in candidates[1:]):
            return None
        others = [pool for pool, worker in known.workers.items() if worker.model == model.base and pool not in pools]
        if len(others) > EXCLUDED_MAX:
            return None
        prompt, read = tokens
        try:
            async with asyncio.timeout(ROUTE_S):
                route = await known.allocator.route(
                    model.base,
                    prompt_digests(root, read, sizes.pop()),
                    len(prompt),
                    namespace,
                    adapter=model.adapter,
                    excluded_pools=others,
                    timeout_s=ROUTE_S,
                )
        except (QuireError, TimeoutError) as error:
            if not isinstance(error, QuireError) or error.code in _AWAY:
                known.lost(error)
            elif error.code in _REFUSALS:
                known.refuses = True
                log.warning("allocator refuses to route", address=known.allocator.address, error=str(error))
            return None
        backend = pools.get(route.pool)
        return None if backend is None else ChosenWorker(backend, route.reserved, route.uncached_token_count)
