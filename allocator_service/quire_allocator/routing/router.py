"""Routes prompts over the pools of one allocator.

Lifecycle of a pool here:

    1. registered   its owner has said what routers may know of its worker, and may change these facts
    2. routed to    `route` chooses the pool and adds a reservation; `admitted` ends the reservation
    3. forgotten    the pool is gone; its reservations are lost

Published prefixes, and prefixes that live sequences compute, are read from the pool itself, so they are exact. After a
restart of the allocator the owners register and report again. Reservations and prefixes under computation are unknown
until the next prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from quire._serving.caller_shares import CallerShares
from quire._serving.routing_rule import SEQUENCE_TOKENS, UNCACHED_WEIGHT, Basis, Candidate, choose, usual_rate

from quire_allocator import limits
from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import DIGEST_BYTES, Result
from quire_allocator.routing.reservations import Reservations, RouteReservation

# How reservations end, in this order: the worker admitted the prompt; it can never admit the prompt; the time ended;
# the pool was dropped; or no reservation was made, because the caller has too many.
END_KINDS: Final = ("taken", "refused", "expired", "lost", "unmade")
_FOR_NOW: Final = (Result.PENDING, Result.NO_SPACE, Result.QUOTA)  # results after which a worker asks again


@dataclass(frozen=True, slots=True)
class Worker:
    """Facts about a pool's worker that routers may know. A rate of 0 means that it was not measured yet."""

    address: str
    model: str
    adapters: frozenset[str]
    prefill_tokens_per_s: int
    is_draining: bool

    def serves(self, model: str, adapter: str) -> bool:
        """Returns whether it has the model and the adapter, and accepts requests."""
        return self.model == model and (not adapter or adapter in self.adapters) and not self.is_draining


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to route. Without `reservation_s`, no reservation is made."""

    namespace: str
    digests: bytes
    token_count: int
    model: str
    adapter: str = ""
    excluded_pools: frozenset[str] = frozenset()
    reservation_s: float = 0.0
    caller: Hashable = None


class RoutedTo(NamedTuple):
    """The worker that Route chose for a prompt, and the numbers behind the choice."""

    pool: str
    address: str
    candidate: Candidate
    is_reserved: bool


class PromptResult(NamedTuple):
    """A worker's request for the blocks of a new sequence, and its result."""

    namespace: str
    digests: bytes
    matched_token_count: int
    result: Result


class RouteCounts:
    """Counts of one allocator's routes since its start.

    Attributes:
        routes: routed prompts, by basis.
        ends: reservations, by one of `END_KINDS`.
        promised_token_count: tokens that admitted prompts had been promised.
        hit_token_count: tokens that admitted prompts found published.
        missed_token_count: promised tokens that admitted prompts did not hit.
    """

    def __init__(self) -> None:
        self.routes: Counter[Basis] = Counter()
        self.ends: Counter[str] = Counter()
        self.promised_token_count = 0
        self.hit_token_count = 0
        self.missed_token_count = 0


class Router:
    """Chooses workers, and keeps the reservations of all pools."""

    def __init__(self, uncached_weight: float = UNCACHED_WEIGHT, sequence_tokens: int = SEQUENCE_TOKENS) -> None:
        self._uncached_weight, self._sequence_tokens = uncached_weight, sequence_tokens
        self.counts = RouteCounts()
        self._workers: dict[str, Worker] = {}
        self._reservations: dict[str, Reservations] = {}
        self._bytes = CallerShares(limits.RESERVED_BYTES_MAX)

    @property
    def reservation_count(self) -> int:
        """Returns the number of reservations in all pools."""
        return sum([len(book) for book in list(self._reservations.values())])

    def worker(self, pool: str) -> Worker | None:
        """Returns what the owner of a pool has registered."""
        return self._workers.get(pool)

    def register(self, pool: str, worker: Worker | None) -> None:
        """Replaces the registered worker of a pool; None stops routing to it."""
        if worker is None:
            self._workers.pop(pool, None)
        else:
            self._workers[pool] = worker

    def forget(self, pool: str) -> None:
        """Forgets a pool that is gone, and counts its reservations as lost."""
        self._workers.pop(pool, None)
        book = self._reservations.pop(pool, None)
        if book is not None:
            for reservation in book.unordered():
                self._end(book, reservation, "lost")

    def expire(self, now: float) -> None:
        """Ends the reservations whose time has ended at `now`."""
        for book in self._reservations.values():
            for reservation in book.expire(now):
                self._count_end(reservation, "expired")

    def route(self, owners: Iterable[Ownership], prompt: Prompt, now: float) -> RoutedTo:
        """Chooses one of these pools for a prompt.

        Pools with a broken owner stream come last: their workers may be gone.

        Raises:
            Refusal: MODEL_UNKNOWN if none of their workers serves the model.
        """
        served = [owner for owner in owners if self._serves(owner, prompt)]
        served = [owner for owner in served if owner.unary or owner.stream is not None] or served
        if not served:
            raise Refusal(
                "MODEL_UNKNOWN",
                "no attached worker that accepts requests serves this model: retry once one has attached",
            )
        self.expire(now)
        rate = usual_rate([self._workers[owner.name].prefill_tokens_per_s for owner in served])
        candidates = [self._candidate(owner, prompt, rate) for owner in served]
        place, basis = choose(candidates, self._uncached_weight, self._sequence_tokens)
        self.counts.routes[basis] += 1
        name, candidate = served[place].name, candidates[place]
        is_reserved = prompt.reservation_s > 0 and self._reserve(served[place], prompt, candidate, now)
        return RoutedTo(name, self._workers[name].address, candidate, is_reserved)

    def expects(self, pool: str) -> bool:
        """Returns whether a pool has reservations."""
        return bool(self._reservations.get(pool))

    def admitted(self, pool: str, admissions: Iterable[PromptResult], now: float) -> None:
        """Ends or renews the reservations of prompts whose blocks a worker asked for."""
        book = self._reservations[pool]
        for admission in admissions:
            reservation = book.find(admission.namespace, admission.digests)
            if reservation is None:
                continue
            if admission.result is Result.OK:
                self.counts.promised_token_count += reservation.shared_token_count
                self.counts.hit_token_count += admission.matched_token_count
                missed = reservation.shared_token_count - admission.matched_token_count
                self.counts.missed_token_count += max(0, missed)
                self._end(book, reservation, "taken")
            elif admission.result in _FOR_NOW:
                book.renew(reservation, now)
            else:
                self._end(book, reservation, "refused")

    def check_invariants(self) -> None:
        """Checks that the bytes and sums of all reservations agree.

        Raises:
            AssertionError: with the broken invariant in its message.
        """
        for book in self._reservations.values():
            book.check_invariants()
        held = sum([each.byte_count for book in self._reservations.values() for each in book.unordered()])
        assert held == self._bytes.count, f"{self._bytes.count} bytes are counted, reservations have {held}"

    def _serves(self, owner: Ownership, prompt: Prompt) -> bool:
        worker = self._workers.get(owner.name)
        return (
            worker is not None
            and worker.serves(prompt.model, prompt.adapter)
            and owner.name not in prompt.excluded_pools
        )

    def _candidate(self, owner: Ownership, prompt: Prompt, usual_rate: float) -> Candidate:
        pool, size = owner.pool, owner.pool.digest_tokens
        limit = min((prompt.token_count - 1) // size, len(prompt.digests) // DIGEST_BYTES)
        hit = pool.match(prompt.namespace, prompt.digests[: limit * DIGEST_BYTES])
        place, promised, backlog = hit // size, 0, pool.pending.left_count * size
        if len(pool.pending):
            promised = pool.pending.pending_count(prompt.namespace, prompt.digests, place, limit)
        book = self._reservations.get(owner.name)
        if book is not None:
            backlog += book.uncached_token_count
            promised = max(promised, book.pending.pending_count(prompt.namespace, prompt.digests, place, limit))
        promised *= size
        uncached = prompt.token_count - hit - promised
        rate = self._workers[owner.name].prefill_tokens_per_s or usual_rate
        sequence_count = len(pool.sequences) + (0 if book is None else len(book))
        needed = sum([manager.width * -(-uncached // manager.block_size) for manager in pool.managers])
        return Candidate(
            hit, promised, uncached, backlog, rate, sequence_count, has_room=pool.blocks.empty_count >= needed
        )

    def _reserve(self, owner: Ownership, prompt: Prompt, candidate: Candidate, now: float) -> bool:
        size = owner.pool.digest_tokens
        limit = min((prompt.token_count - 1) // size, len(prompt.digests) // DIGEST_BYTES)
        # Workers send no digest for the block of a prompt's last token, so the reservation leaves out this digest, too.
        digests = prompt.digests[: limit * DIGEST_BYTES]
        made = RouteReservation(prompt.namespace, digests, caller=prompt.caller, length_s=prompt.reservation_s)
        made.shared_token_count = candidate.shared_token_count
        made.uncached_token_count = candidate.uncached_token_count
        if not self._bytes.take(made.caller, made.byte_count):
            self.counts.ends["unmade"] += 1
            return False
        book = self._reservations.setdefault(owner.name, Reservations())
        book.add(made, candidate.hit_token_count // size, limit, now)
        return True

    def _end(self, book: Reservations, reservation: RouteReservation, how: str) -> None:
        self._bytes.leave(reservation.caller, reservation.byte_count)
        book.remove(reservation)
        self.counts.ends[how] += 1

    def _count_end(self, reservation: RouteReservation, how: str) -> None:
        self._bytes.leave(reservation.caller, reservation.byte_count)
        self.counts.ends[how] += 1
