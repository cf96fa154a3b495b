"""The workers behind the gateway: whether they are ready, their models, their load, and their cached prefixes.

    1. unknown   the worker has not answered yet
    2. ready     the worker answered the last poll, at most a second ago
    3. away      the worker did not answer: it gets no requests, and is polled again

A pool is watched only if several workers serve its model: with a single worker, prefixes decide nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Final, NamedTuple

import structlog
from quire import AsyncAllocator, AsyncClient
from quire.errors import DeadlineExceededError, QuireError
from quire.hashing import prompt_digests, root_digest, salted_root
from quire.mirror import PrefixMirror
from quire.streams import AsyncChunkStream
from quire.types import WorkerStatus

from quire_gateway import routing
from quire_gateway.calls.plans import Notation
from quire_gateway.calls.recognition import Named, recognize
from quire_gateway.failures import MODEL_NOT_FOUND, ApiError, unavailable

log = structlog.get_logger()

POLL_S: Final = 1.0
POLL_TIMEOUT_S: Final = 5.0
SILENT_S: Final = 15.0  # seconds that a worker may be silent before its running answers are given up
WATCH_AGAIN_S: Final = 1.0
FINGERPRINT_SHOWN: Final = 10  # hexadecimal digits, as in OpenAI's fingerprints
NAME_SHOWN: Final = 128  # characters of an unknown model's name that an error shows


class Model(NamedTuple):
    """A model that at least one worker serves: a checkpoint, or an adapter on one."""

    name: str  # the name in answers; requests may use aliases of it
    created_s: int  # when the gateway first saw it
    sequence_tokens_max: int  # the largest limit among its workers
    base: str  # name of the checkpoint; equals `name` without an adapter
    adapter: str  # name of the adapter, or empty
    fingerprint: str = ""  # changes with the weights of the checkpoint and with the worker's version


class Backend:
    """One worker.

    Attributes:
        status: its latest status; None before the first poll.
        is_ready: whether it answered the last poll.
        fingerprint: identifies its version and weights for callers; empty before the first status.
        adapters: digests of its loaded adapters, by name.
        sampling_defaults: the checkpoint's proposed parameters, by name; None for each that it does not propose.
        in_flight: number of this gateway's requests that it is answering.
        chosen_count: number of requests ever sent to it.
        mirror: a copy of its pool's prefix index; None while the pool is not watched.
        answers: its running answers. An answer that was given up is removed.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.status: WorkerStatus | None = None
        self.is_ready = False
        self.fingerprint = ""
        self.adapters: dict[str, bytes] = {}
        self.sampling_defaults: Mapping[str, float | int | None] = {}
        self.in_flight = 0
        self.chosen_count = 0
        self.mirror: PrefixMirror | None = None
        self.answers: set[AsyncChunkStream] = set()
        self._load_of_others = 0
        self._silent_since_s: float | None = None
        self._is_missed = False  # whether the log already says that it is away

    @property
    def is_connected(self) -> bool:
        """Returns whether the worker has a session with its allocator, so that it starts requests at once."""
        return self.is_ready and self.status is not None and self.status.allocator_connected

    @property
    def load(self) -> int:
        """Returns how many requests the worker has: this gateway's as of now, others' as of its last status."""
        return self.in_flight + self._load_of_others

    def heard(self, status: WorkerStatus) -> None:
        """Stores a new status of the worker."""
        if not self.is_ready:
            log.info("worker answers", address=self.client.address, model=status.model)
            of_both = hashlib.sha256(status.version.encode() + b"\0" + status.model_fingerprint)
            self.fingerprint = f"fp_{of_both.hexdigest()[:FINGERPRINT_SHOWN]}"
        self.status, self.is_ready, self._is_missed, self._silent_since_s = status, True, False, None
        self.sampling_defaults = asdict(status.sampling_defaults)
        self._load_of_others = max(0, status.running_count + status.waiting_count - self.in_flight)

    def lost(self, error: QuireError) -> None:
        """Notes that the worker did not answer."""
        if not self._is_missed:
            log.warning("worker does not answer", address=self.client.address, error=str(error))
        self.is_ready, self._is_missed = False, True

    async def miss(self, error: QuireError, asked_s: float) -> None:
        """Notes that the worker did not answer a poll that began at `asked_s`.

        Gives up the answers of a worker that has been silent for `SILENT_S`: a proxy may keep the connections of a dead
        worker open, and answer their pings.
        """
        self.lost(error)
        if not isinstance(error, DeadlineExceededError):
            self._silent_since_s = None
            return
        self._silent_since_s = self._silent_since_s or asked_s
        if time.monotonic() - self._silent_since_s >= SILENT_S:
            answers, self.answers = self.answers, set()
            for answer in answers:
                await answer.aclose()

    def serves(self, model: Model) -> bool:
        """Tells whether the worker is ready, and has the checkpoint and the adapter."""
        return (
            self.is_ready
            and self.status is not None
            and self.status.model == model.base
            and (not model.adapter or model.adapter in self.adapters)
        )

    def root(self, namespace: str, adapter: str, cache_salt: str = "") -> bytes:
        """Returns the root of the digests of prompts; the worker has answered."""
        assert self.status is not None, "its status has the fingerprint of its model"
        fingerprint, layout = self.status.model_fingerprint, self.status.cache_layout
        digest = self.adapters.get(adapter, b"")
        root = root_digest(fingerprint=fingerprint, layout=layout, adapter=digest, namespace=namespace)
        return salted_root(root, cache_salt)

    def matched_token_count(self, tokens: Sequence[int], namespace: str, adapter: str, cache_salt: str = "") -> int:
        """Returns how many tokens of a prompt the worker's pool has cached; 0 while that is unknown."""
        mirror, status = self.mirror, self.status
        if mirror is None or status is None or not mirror.is_exact:
            return 0
        root = self.root(namespace, adapter, cache_salt)
        return mirror.matched_token_count(prompt_digests(root, tokens, status.block_size), namespace)


class Fleet:
    """All workers behind the gateway. Lifecycle: construct inside the event loop, `open`, `close`.

    Args:
        workers: one client for each worker.
        allocators: clients of the allocators that have the workers' pools.
        written: returns the formats that options name for a model's calls and reasoning.
        applies_defaults: whether requests get the sampling parameters that checkpoints propose.

    Attributes:
        allocators: clients of the allocators.
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
    ) -> None:
        self.backends = [Backend(client) for client in workers]
        self.allocators, self._written = allocators, written
        self._applies_defaults = applies_defaults
        self._told_defaults: set[str] = set()  # models with logged defaults
        self._notations: dict[str, asyncio.Task[Notation]] = {}  # by the name of the checkpoint
        self._tasks: list[asyncio.Task[None]] = []
        self._created_s: dict[str, int] = {}
        self._seen: list[tuple[bool, WorkerStatus | None, dict[str, bytes]]] = []  # by backend, for `_served`
        self._served: dict[str, Model] = {}
        self.spelled: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        self.settled: dict[str, bool] = {}
        self.turn = asyncio.Lock()

    async def open(self) -> None:
        """Asks each worker for its status once, then keeps polling in the background."""
        await asyncio.gather(*map(self._ask, self.backends))
        self._tasks = [asyncio.create_task(self._poll(backend)) for backend in self.backends]
        if len(self.backends) > 1 and self.allocators:
            self._tasks += [asyncio.create_task(self._watch(backend)) for backend in self.backends]

    async def close(self) -> None:
        """Ends every call and every connection."""
        tasks = [*self._tasks, *self._notations.values()]
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
        # Polls replace these objects, so between polls the comparison is one of identities.
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
        candidates = [backend for backend in self.backends if backend.serves(model) and backend not in without]
        candidates = [backend for backend in candidates if backend.is_connected] or candidates
        if len(candidates) < 2:
            return next(iter(candidates), None)
        standings = [
            routing.Standing(
                backend.load,
                backend.matched_token_count(tokens, namespace, model.adapter, cache_salt),
                routing.preference_of(cache_key, namespace, backend.client.address),
            )
            for backend in candidates
        ]
        return candidates[routing.best(standings)]

    def block_size(self, model: Model) -> int:
        """Returns the largest number of tokens in a block among the workers of a model."""
        statuses = [backend.status for backend in self.backends if backend.serves(model)]
        return max((status.block_size for status in statuses if status is not None), default=0)

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
        with contextlib.suppress(QuireError):  # If this fails, the known adapters stay.
            found = await backend.client.list_adapters(timeout_s=POLL_TIMEOUT_S)
            backend.adapters = {adapter.name: adapter.digest for adapter in found}
        backend.heard(status)
        proposed = {name: value for name, value in backend.sampling_defaults.items() if value is not None}
        if proposed and self._applies_defaults and status.model not in self._told_defaults:
            self._told_defaults.add(status.model)
            log.info("requests get the checkpoint's sampling defaults", model=status.model, **proposed)
        self.served()  # records when each model was first seen

    async def _watch(self, backend: Backend) -> None:
        """Mirrors the worker's pool until it is cancelled. While that fails, the worker's load alone decides."""
        while True:
            if backend.status is not None:
                for allocator in self.allocators:
                    with contextlib.suppress(QuireError):
                        await self._follow(backend, allocator, backend.status.pool)
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
                if event.session_id != session:  # A new session may have other groups.
                    return
                mirror.apply(event)
                backend.mirror = mirror
