"""The workers behind the gateway: polls them, watches their pools, and chooses one for a request.

Workers are listed by hand, or come and go as the allocators know them. An allocator that knows the workers of a model
routes the model's prompts (`discovery.py`). While it is away, mirrors of the pools and the load decide. A mirror
without news is used for `backend.MIRROR_S`. With a single worker nothing is watched or asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import structlog
from quire import AsyncAllocator, AsyncClient
from quire.errors import NotFoundError, QuireError
from quire.mirror import PrefixMirror
from quire.types import WorkerStatus

from quire_gateway import fallback
from quire_gateway.backend import Backend, ChosenWorker, Model
from quire_gateway.calls.plans import Notation
from quire_gateway.calls.recognition import Named, recognize
from quire_gateway.discovery import Discovery
from quire_gateway.failures import MODEL_NOT_FOUND, ApiError, unavailable

log = structlog.get_logger()

POLL_S: Final = 1.0
POLL_TIMEOUT_S: Final = 5.0
WATCH_AGAIN_S: Final = 1.0
CONTINUED, DIVERGED = RESUMES = ("continued", "diverged")  # what another worker did with a broken answer
BY_ALLOCATOR, BY_MIRROR, ALONE = BASES = ("allocator", "mirror", "alone")  # how a prompt's worker was chosen
NAME_SHOWN: Final = 128  # characters of an unknown model's name that an error shows


class Fleet:
    """All workers behind the gateway. Lifecycle: construct inside the event loop, `open`, `close`.

    Args:
        workers: one client for each worker that is listed by hand.
        allocators: clients of the allocators that have the workers' pools.
        written: returns the formats that options name for a model's calls and reasoning.
        applies_defaults: whether requests get the sampling parameters that checkpoints propose.
        connect: returns a client for an address. With it, the workers that the allocators know are added.

    Attributes:
        allocators: clients of the allocators.
        discovery: the workers that the allocators know.
        routes: number of prompts by how their worker was chosen, one of `BASES`.
        resumes: number of broken answers by what another worker did with them, one of `RESUMES`.
        lost_reservation_count: reservations whose worker refused the prompt, or ended before its first token.
        spelled: the bytes of each model's tokens, filled on demand; at most the whole vocabulary.
        settled: whether a model's tokens have the same bytes at every place in a text, for the models asked so far.
        turn: a lock. After a large chunk, one answer at a time holds it before it reads its next chunk.
    """

    def __init__(
        self,
        workers: Sequence[AsyncClient],
        allocators: Sequence[AsyncAllocator],
        written: Callable[[str], Named] = lambda _: Named(),
        *,
        applies_defaults: bool = True,
        connect: Callable[[str], AsyncClient] | None = None,
    ) -> None:
        self.backends = [Backend(client) for client in workers]
        self.allocators, self._written = allocators, written
        self.discovery = Discovery(allocators)
        self.routes = Counter(dict.fromkeys(BASES, 0))
        self.resumes = Counter(dict.fromkeys(RESUMES, 0))
        self.lost_reservation_count = 0
        self._connect = connect
        self._found_at: dict[str, Backend] = {}  # workers that the allocators know, by registered address
        self._applies_defaults = applies_defaults
        self._told_defaults: set[str] = set()  # models whose sampling defaults were logged
        self._notations: dict[str, asyncio.Task[Notation]] = {}  # notations by the name of the checkpoint
        self._tasks: list[asyncio.Task[None]] = []
        self._tasks_of: dict[Backend, list[asyncio.Task[None]]] = {}
        self._created_s: dict[str, int] = {}
        self._seen: list[tuple[bool, WorkerStatus | None, dict[str, bytes]]] = []  # states that `_served` stems from
        self._served: dict[str, Model] = {}
        self.spelled: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        self.settled: dict[str, bool] = {}
        self.turn = asyncio.Lock()

    async def open(self) -> None:
        """Asks each worker for its status once, then keeps polling in the background."""
        if self._connect is not None:
            await self.discovery.look()
            self._add_found()
        await asyncio.gather(*map(self._ask, self.backends))
        for backend in self.backends:
            self._attend(backend)
        if self._connect is not None or (len(self.backends) > 1 and self.allocators):
            self._tasks = [asyncio.create_task(self._keep_looking())]

    async def close(self) -> None:
        """Ends every call and every connection."""
        tasks = [*self._tasks, *self._notations.values(), *(each for one in self._tasks_of.values() for each in one)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (*(backend.client for backend in self.backends), *self.allocators):
            await client.close()

    def served(self) -> dict[str, Model]:
        """Returns the models of the ready workers by name.

        Checkpoints come first, then adapters, then aliases of checkpoints, each group sorted. If several models have
        one name, requests get the first.
        """
        # Only polls replace these objects. Between polls, the comparison is fast, because the objects are identical.
        seen = [(backend.is_ready, backend.status, backend.adapters) for backend in self.backends]
        if seen != self._seen:
            self._seen, self._served = seen, self._found()
        return self._served

    def _found(self) -> dict[str, Model]:
        longest: dict[tuple[bool, str, str], int] = {}
        fingerprints: dict[str, str] = {}
        aliases: dict[str, str] = {}
        for backend in self.backends:
            if backend.is_ready and backend.status is not None:
                base, tokens = backend.status.model, backend.status.sequence_tokens_max
                fingerprints.setdefault(base, backend.fingerprint)
                for alias in backend.status.model_aliases:
                    aliases[alias] = min(base, aliases.get(alias, base))
                for adapter in ("", *backend.adapters):
                    key = (adapter != "", adapter, base)
                    longest[key] = max(tokens, longest.get(key, 0))
        found: dict[str, Model] = {}
        for key in sorted(longest):
            _, adapter, base = key
            name = adapter or base
            created_s = self._created_s.setdefault(name, int(time.time()))
            found.setdefault(name, Model(name, created_s, longest[key], base, adapter, fingerprints[base]))
        for alias in sorted(aliases):
            found.setdefault(alias, found[aliases[alias]])
        return found

    def model(self, name: str | None) -> Model:
        """Returns the model that a request names; the first one if it names none.

        Raises:
            ApiError: no worker serves this model, or no worker is ready.
        """
        models = self.served()
        if not models:
            raise unavailable("no worker answers")
        found = next(iter(models.values())) if name is None else models.get(name)
        if found is None:
            shown = repr((name or "")[:NAME_SHOWN])
            raise ApiError(404, f"The model {shown} does not exist.", param="model", code=MODEL_NOT_FOUND)
        return found

    def is_called(self, model: Model, name: str) -> bool:
        """Tells whether requests with this name get that model."""
        named = self.served().get(name)
        return named is not None and named.name == model.name

    def sampling_defaults(self, model: Model) -> Mapping[str, float | int | None]:
        """Returns the sampling parameters that a model's checkpoint proposes; empty if they are not applied."""
        if not self._applies_defaults:
            return {}
        for backend in self.backends:
            if backend.serves(model):
                return backend.sampling_defaults
        return {}

    async def notation(self, model: Model) -> Notation:
        """Returns a model's formats of calls and reasoning. Each format is recognized once.

        Raises:
            ApiError: no worker of the model answers.
        """
        found = self._notations.get(model.base)
        if found is not None and found.done():
            if not found.cancelled() and found.exception() is None:
                return found.result()
            found = None
        if found is None:
            found = self._notations[model.base] = asyncio.create_task(self._recognized(model))
        try:
            return await asyncio.shield(found)
        except QuireError:
            raise unavailable("no worker answers with the chat template of its model") from None

    async def _recognized(self, model: Model) -> Notation:
        backend = self.backend(model)
        if backend is None:
            raise unavailable("no worker answers")
        found = await recognize(backend.client, self._written(model.base), timeout_s=POLL_TIMEOUT_S)
        log.info(
            "recognized how a model writes calls and reasoning",
            model=model.base,
            calls=found.calls,
            reasoning=found.reasoning,
        )
        return found.notation

    def check_ready(self) -> None:
        """Checks that at least one worker would start a request at once.

        Raises:
            ApiError: no worker answers, or no worker that answers has a session with its allocator.
        """
        self.model(None)
        if not any(backend.is_connected for backend in self.backends):
            raise unavailable("no worker is ready: the workers that answer have no session with their allocator")

    def backend(
        self,
        model: Model,
        tokens: Sequence[int] = (),
        namespace: str = "",
        without: Collection[Backend] = (),
        cache_salt: str = "",
        *,
        cache_key: str = "",
    ) -> Backend | None:
        """Returns the best worker for a prompt; None if no candidate is left.

        Workers without an allocator come last: they finish their requests, but admit none.

        Args:
            model: the model that the worker must serve.
            tokens: the tokens of the prompt.
            namespace: the namespace of the request.
            without: workers that are not candidates, because they were already asked.
            cache_salt: the salt of the request.
            cache_key: the caller's `prompt_cache_key`.
        """
        prompt = fallback.RoutedPrompt(model, tokens, namespace, cache_salt, cache_key)
        found = fallback.choose(self._candidates(model, without), prompt, self.discovery.rate)
        return None if found is None else found.backend

    async def choose(
        self,
        model: Model,
        tokens: Sequence[int],
        namespace: str,
        without: Collection[Backend],
        cache_salt: str,
        *,
        cache_key: str = "",
        reads_cache: bool = True,
    ) -> ChosenWorker | None:
        """Returns the worker that an allocator names for a prompt, or else what `backend` returns.

        An allocator ignores the cache key. `reads_cache` tells whether the worker will look for the prompt in its
        cache; see `backend` for the other arguments.
        """
        candidates = self._candidates(model, without)
        if len(candidates) > 1:
            read = tokens if reads_cache else ()
            found = await self.discovery.route(model, candidates, (tokens, read), namespace, cache_salt)
            if found is not None:
                self.routes[BY_ALLOCATOR] += 1
                return found
        prompt = fallback.RoutedPrompt(model, tokens, namespace, cache_salt, cache_key)
        candidates = self._candidates(model, without)  # Waiting for an allocator may have taken seconds.
        found = fallback.choose(candidates, prompt, self.discovery.rate)
        if found is not None:
            self.routes[BY_MIRROR if len(candidates) > 1 else ALONE] += 1
        return found

    def _candidates(self, model: Model, without: Collection[Backend]) -> list[Backend]:
        candidates = [backend for backend in self.backends if backend.serves(model) and backend not in without]
        return [backend for backend in candidates if backend.is_connected] or candidates

    def block_size(self, model: Model) -> int:
        """Returns the largest number of tokens in a block among the workers of a model."""
        statuses = [backend.status for backend in self.backends if backend.serves(model)]
        return max((status.block_size for status in statuses if status is not None), default=0)

    def _attend(self, backend: Backend) -> None:
        """Starts the tasks that keep the facts about a worker up to date."""
        tasks = [asyncio.create_task(self._poll(backend))]
        if self.allocators and (self._connect is not None or len(self.backends) > 1):
            tasks.append(asyncio.create_task(self._watch(backend)))
        self._tasks_of[backend] = tasks

    async def _keep_looking(self) -> None:
        """Learns again and again which workers the allocators know."""
        while True:
            await self.discovery.look()
            if self._connect is not None:
                for backend in self._add_found():
                    await self._ask(backend)
                    self._attend(backend)
                await self._remove_gone()
            await asyncio.sleep(POLL_S)

    def _add_found(self) -> list[Backend]:
        """Adds the workers that the allocators know, and returns the new ones."""
        assert self._connect is not None
        added = []
        for address in sorted(self.discovery.addresses() - self._found_at.keys()):
            try:
                client = self._connect(address)
            except (QuireError, ValueError) as error:
                log.warning("a registered worker's address cannot be used", address=address, error=str(error))
                continue
            self._found_at[address] = backend = Backend(client)
            added.append(backend)
        self.backends += added
        return added

    async def _remove_gone(self) -> None:
        """Removes workers that no allocator knows any more and that do not answer."""
        known = self.discovery.addresses()
        for address, backend in list(self._found_at.items()):
            if address in known or backend.is_ready or backend.in_flight:
                continue
            log.info("worker is gone", address=address)
            del self._found_at[address]
            self.backends.remove(backend)
            for task in self._tasks_of.pop(backend, ()):
                task.cancel()
            await backend.client.close()

    async def _poll(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._ask(backend)

    async def _ask(self, backend: Backend) -> None:
        asked_s = time.monotonic()
        try:
            status = await backend.client.status(timeout_s=POLL_TIMEOUT_S)
        except QuireError as error:
            await backend.miss(error, asked_s)
            return
        with contextlib.suppress(QuireError):  # Without an answer, the known adapters stay.
            found = await backend.client.list_adapters(timeout_s=POLL_TIMEOUT_S)
            backend.adapters = {adapter.name: adapter.digest for adapter in found}
        backend.heard(status)
        proposed = {name: value for name, value in backend.sampling_defaults.items() if value is not None}
        if proposed and self._applies_defaults and status.model not in self._told_defaults:
            self._told_defaults.add(status.model)
            log.info("requests get the checkpoint's sampling defaults", model=status.model, **proposed)
        self.served()  # records when each model was first seen

    async def _watch(self, backend: Backend) -> None:
        """Mirrors the worker's pool until it is cancelled. Without a mirror, the worker's load alone decides."""
        while True:
            if backend.status is not None and len(self.backends) > 1:
                pool, missing_count = backend.status.pool, 0
                for allocator in self.allocators:
                    try:
                        await self._follow(backend, allocator, pool)
                    except NotFoundError:
                        missing_count += 1
                    except QuireError:
                        pass
                if missing_count == len(self.allocators):
                    backend.mirror = None
            await asyncio.sleep(WATCH_AGAIN_S)

    async def _follow(self, backend: Backend, allocator: AsyncAllocator, pool: str) -> None:
        """Applies the events of a pool until its session changes.

        Raises:
            QuireError: this allocator does not have the pool, or does not answer.
        """
        mirror = PrefixMirror((await allocator.get_pool(pool)).spec)
        session = b""
        async with allocator.watch_events(pool) as events:
            async for event in events:
                session = session or event.session_id
                if event.session_id != session:  # A new session may have other groups, so it needs a new mirror.
                    return
                mirror.apply(event)
                if mirror.is_exact or backend.mirror is None:
                    backend.mirror, backend.events = mirror, events
