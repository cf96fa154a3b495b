"""The workers behind the gateway: their readiness, their models, their load, and the prefixes in their pools.

    1. unknown   it has not answered yet
    2. ready     it answered the last poll, at most a second ago
    3. away      it did not: it gets no requests, and is polled again

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
SILENT_S: Final = 15.0  # of a worker, after which its answers are given up
WATCH_AGAIN_S: Final = 1.0
FINGERPRINT_SHOWN: Final = 10  # digits, as in OpenAI's
NAME_SHOWN: Final = 128  # characters of a name that somebody made up


class Model(NamedTuple):
    """A model that some of the workers serve: a checkpoint, or an adapter on one."""

    name: str  # in answers; requests may say others that mean the same
    created_s: int  # when the gateway first saw it
    sequence_tokens_max: int  # the largest limit among its workers
    base: str  # name of the checkpoint; equals `name` without an adapter
    adapter: str  # name of the adapter, or empty
    fingerprint: str = ""  # changes with the weights of the checkpoint and with the worker's version


class Backend:
    """One worker.

    Attributes:
        status: its latest status; None before the first.
        is_ready: whether it answered the last poll.
        fingerprint: of its version and weights, for callers; empty before the first status.
        adapters: digests of its loaded adapters, by name.
        sampling_defaults: parameters that its checkpoint proposes, by name; None where it says nothing.
        in_flight: requests of this gateway that it is answering.
        chosen_count: requests ever sent to it.
        mirror: copy of its pool's prefix index; None while the pool is not watched.
        answers: in progress; an answer that was given up is removed.
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
        self._is_missed = False  # the log says once that it is away

    @property
    def is_connected(self) -> bool:
        """Tells whether it has a session with its allocator, so that what it gets is begun at once."""
        return self.is_ready and self.status is not None and self.status.allocator_connected

    @property
    def load(self) -> int:
        """Returns how many requests it has: this gateway's as of now, those of others as of its last answer."""
        return self.in_flight + self._load_of_others

    def heard(self, status: WorkerStatus) -> None:
        """Stores its new status."""
        if not self.is_ready:
            log.info("worker is there", address=self.client.address, model=status.model)
            of_both = hashlib.sha256(status.version.encode() + b"\0" + status.model_fingerprint)
            self.fingerprint = f"fp_{of_both.hexdigest()[:FINGERPRINT_SHOWN]}"
        self.status, self.is_ready, self._is_missed, self._silent_since_s = status, True, False, None
        self.sampling_defaults = asdict(status.sampling_defaults)
        self._load_of_others = max(0, status.running_count + status.waiting_count - self.in_flight)

    def lost(self, error: QuireError) -> None:
        """Notes that it did not answer."""
        if not self._is_missed:
            log.warning("worker is away", address=self.client.address, error=str(error))
        self.is_ready, self._is_missed = False, True

    async def miss(self, error: QuireError, asked_s: float) -> None:
        """Notes that it did not answer a poll of that time. Gives up the answers of a silent worker: a proxy may keep
        the connections of a dead worker open, and answer their pings."""
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
        """Tells whether it answers, and has the checkpoint and the adapter."""
        return (
            self.is_ready
            and self.status is not None
            and self.status.model == model.base
            and (not model.adapter or model.adapter in self.adapters)
        )

    def matched_token_count(self, tokens: Sequence[int], namespace: str, adapter: str, cache_salt: str = "") -> int:
        """Counts the tokens of a prompt that its pool has; 0 while that is not known."""
        mirror, status = self.mirror, self.status
        if mirror is None or status is None or not mirror.is_exact:
            return 0
        root = root_digest(
            fingerprint=status.model_fingerprint,
            layout=status.cache_layout,
            adapter=self.adapters.get(adapter, b""),
            namespace=namespace,
        )
        root = salted_root(root, cache_salt)
        return mirror.matched_token_count(prompt_digests(root, tokens, status.block_size), namespace)


class Fleet:
    """Lifecycle: construct inside the event loop, `open`, `close`.

    Args:
        workers: one client each.
        allocators: clients of the allocators whose pools are watched.
        written: returns the formats of calls and reasoning that options give for a model, by its name.
        applies_defaults: whether requests get the sampling parameters that checkpoints propose.

    Attributes:
        spelled: bytes of the tokens of each model, as far as requested; at most the whole vocabulary.
        turn: held by the one answer that reads its next chunk after a large one.
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
        self._allocators, self._written = allocators, written
        self._applies_defaults = applies_defaults
        self._told_defaults: set[str] = set()  # models whose defaults the log has
        self._notations: dict[str, asyncio.Task[Notation]] = {}  # by the name of the checkpoint
        self._tasks: list[asyncio.Task[None]] = []
        self._created_s: dict[str, int] = {}
        self.spelled: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        self.turn = asyncio.Lock()

    async def open(self) -> None:
        """Asks each worker once, then goes on asking in the background."""
        await asyncio.gather(*map(self._ask, self.backends))
        self._tasks = [asyncio.create_task(self._poll(backend)) for backend in self.backends]
        if len(self.backends) > 1 and self._allocators:
            self._tasks += [asyncio.create_task(self._watch(backend)) for backend in self.backends]

    async def close(self) -> None:
        """Ends every call and every connection."""
        tasks = [*self._tasks, *self._notations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (*(backend.client for backend in self.backends), *self._allocators):
            await client.close()

    def served(self) -> dict[str, Model]:
        """Returns what the ready workers serve under each name: checkpoints, then adapters, then further names of
        checkpoints, each sorted. Of several with one name, requests get the first."""
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
        """Returns the model that a request names; the first one where it names none.

        Raises:
            ApiError: nobody serves it, or nobody serves anything.
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
        """Tells whether requests that say this name get that model."""
        named = self.served().get(name)
        return named is not None and named.name == model.name

    def sampling_defaults(self, model: Model) -> Mapping[str, float | int | None]:
        """Returns the sampling parameters that a model's checkpoint proposes, by name; none if they are not used."""
        if not self._applies_defaults:
            return {}
        for backend in self.backends:
            if backend.serves(model):
                return backend.sampling_defaults
        return {}

    async def notation(self, model: Model) -> Notation:
        """Returns the formats of a model for calls and reasoning. They are recognized once.

        Raises:
            ApiError: no worker of it answers.
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
            raise unavailable("no worker says how its model writes") from None

    async def _recognized(self, model: Model) -> Notation:
        backend = self.backend(model)
        if backend is None:
            raise unavailable("no worker answers")
        found = await recognize(backend.client, self._written(model.base), timeout_s=POLL_TIMEOUT_S)
        log.info("this is how a model writes", model=model.base, calls=found.calls, reasoning=found.reasoning)
        return found.notation

    def check_ready(self) -> None:
        """Checks that some worker would start a request at once.

        Raises:
            ApiError: no worker answers, or none of those that answer has a session with its allocator.
        """
        self.model(None)
        if not any(backend.is_connected for backend in self.backends):
            raise unavailable("no worker that answers has a session with its allocator")

    def backend(
        self,
        model: Model,
        tokens: Sequence[int] = (),
        namespace: str = "",
        without: Collection[Backend] = (),
        cache_salt: str = "",
    ) -> Backend | None:
        """Returns the worker to ask; None if none is left. Workers without an allocator come last: they finish their
        requests, and admit none.

        Args:
            model: the model that the worker must serve.
            tokens: of the prompt.
            namespace: of the request.
            without: workers that were asked already.
            cache_salt: of the request.
        """
        candidates = [backend for backend in self.backends if backend.serves(model) and backend not in without]
        candidates = [backend for backend in candidates if backend.is_connected] or candidates
        if len(candidates) < 2:
            return next(iter(candidates), None)
        standings = [
            routing.Standing(backend.load, backend.matched_token_count(tokens, namespace, model.adapter, cache_salt))
            for backend in candidates
        ]
        return candidates[routing.best(standings)]

    def block_size(self, model: Model) -> int:
        """Returns how many tokens a block has: of the workers of a model, the largest."""
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
        with contextlib.suppress(QuireError):  # without the list, none of its adapters can be chosen
            found = await backend.client.list_adapters(timeout_s=POLL_TIMEOUT_S)
            backend.adapters = {adapter.name: adapter.digest for adapter in found}
        backend.heard(status)
        proposed = {name: value for name, value in backend.sampling_defaults.items() if value is not None}
        if proposed and self._applies_defaults and status.model not in self._told_defaults:
            self._told_defaults.add(status.model)
            log.info("requests get the checkpoint's sampling defaults", model=status.model, **proposed)
        self.served()  # records when each model was first seen

    async def _watch(self, backend: Backend) -> None:
        """Mirrors the worker's pool, for ever; while that fails, the worker is chosen by its load alone."""
        while True:
            if backend.status is not None:
                for allocator in self._allocators:
                    with contextlib.suppress(QuireError):
                        await self._follow(backend, allocator, backend.status.pool)
                    backend.mirror = None
            await asyncio.sleep(WATCH_AGAIN_S)

    async def _follow(self, backend: Backend, allocator: AsyncAllocator, pool: str) -> None:
        """Applies the pool's events until its session is another one.

        Raises:
            QuireError: this allocator does not have the pool, or is away.
        """
        mirror = PrefixMirror((await allocator.get_pool(pool)).spec)
        session = b""
        async with allocator.watch_events(pool) as events:
            async for event in events:
                session = session or event.session_id
                if event.session_id != session:  # perhaps of other groups
                    return
                mirror.apply(event)
                backend.mirror = mirror
