"""Rules that choose a worker for a prompt: Quire's `Route`, and those of other routers in a few lines each.

Each gateway runs the other routers' rules alone: it knows the requests that it sent, but not those of other gateways.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from quire._serving.routing_rule import Candidate
from quire_allocator.core.events import Change, Event
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.routing.router import Prompt, Router
from quire_gateway.routing import Standing, Underway, best

from fleet_sides.workers import PREFILL_TOKENS_PER_S
from fleet_sides.workloads import BLOCK_TOKENS, DIGEST_BYTES, Request

MODEL: Final = "m"
RESERVATION_S: Final = 5.0  # lifetime of a reservation; the client's default
POLL_S: Final = 1.0  # seconds between a gateway's polls of the workers
GUESS_S: Final = 2.0  # seconds for which llm-d assumes that a worker has a prompt sent to it


class Choice(NamedTuple):
    """A worker's number, and the tokens that are expected to be reused there."""

    worker: int
    promised_tokens: int


class Rule(Protocol):
    """Chooses workers for one gateway."""

    def choose(self, request: Request, workers: Sequence[int], now: float) -> Choice:
        """Returns one of these workers."""

    def first_token(self, request: Request, worker: int) -> None:
        """Notes that this gateway passed on a request's first token."""

    def ended(self, request: Request, worker: int) -> None:
        """Notes that a request of this gateway ended, or failed."""


class RoundRobin:
    """Takes the workers in turn."""

    def __init__(self, gateway: int) -> None:
        self._last = gateway

    def choose(self, request: Request, workers: Sequence[int], now: float) -> Choice:
        self._last += 1
        return Choice(workers[self._last % len(workers)], 0)

    def first_token(self, request: Request, worker: int) -> None: ...

    def ended(self, request: Request, worker: int) -> None: ...


class LeastLoaded:
    """Takes the worker with the fewest requests of this gateway."""

    def __init__(self, gateway: int, worker_count: int) -> None:
        self._gateway = gateway
        self._counts = [0] * worker_count

    def choose(self, request: Request, workers: Sequence[int], now: float) -> Choice:
        found = min(workers, key=lambda worker: (self._counts[worker], (worker - self._gateway) % len(self._counts)))
        self._counts[found] += 1
        return Choice(found, 0)

    def first_token(self, request: Request, worker: int) -> None: ...

    def ended(self, request: Request, worker: int) -> None:
        self._counts[worker] -= 1


class EventIndex:
    """The digests that each worker has published, as its events say. The loss of an event goes unnoticed."""

    def __init__(self, worker_count: int) -> None:
        self.stored = [set[bytes]() for _ in range(worker_count)]

    def apply(self, worker: int, events: Sequence[Event]) -> None:
        """Applies a worker's next events."""
        stored = self.stored[worker]
        for event in events:
            digests = event.digests
            parts = [digests[place : place + DIGEST_BYTES] for place in range(0, len(digests), DIGEST_BYTES)]
            if event.change is Change.STORED:
                stored.update(parts)
            else:
                stored.difference_update(parts)


class Guesses:
    """The digests that one gateway sent to each worker in the last `seconds`, or its last `block_count` digests."""

    def __init__(self, worker_count: int, *, seconds: float = float("inf"), block_count: int = 1 << 30) -> None:
        self._ends = [OrderedDict[bytes, float]() for _ in range(worker_count)]
        self._seconds, self._block_count = seconds, block_count

    def add(self, worker: int, digests: bytes, now: float) -> None:
        """Notes that the gateway sent a prompt to this worker."""
        ends = self._ends[worker]
        for place in range(len(digests) - DIGEST_BYTES, -1, -DIGEST_BYTES):  # The deepest block is evicted first.
            digest = digests[place : place + DIGEST_BYTES]
            ends[digest] = now + self._seconds
            ends.move_to_end(digest)
        while ends and (len(ends) > self._block_count or next(iter(ends.values())) <= now):
            ends.popitem(last=False)

    def has(self, worker: int, digest: bytes, now: float) -> bool:
        """Returns whether the gateway believes that a worker has a digest."""
        return self._ends[worker].get(digest, 0.0) > now


class LlmD:
    """llm-d's rule: the longest prefix, or, if its worker is saturated, the least to compute.

    Prefixes are estimated from events (precise) or from this gateway's own choices (approximate). The load is the
    uncached tokens of this gateway's requests without a first token.
    """

    def __init__(self, worker_count: int, guesses: Guesses, events: EventIndex | None, delay_s: float = 1.0) -> None:
        self._events, self._guesses = events, guesses
        self._load = [0] * worker_count
        self._uncached: dict[Request, int] = {}
        self._saturated = delay_s * PREFILL_TOKENS_PER_S

    def choose(self, request: Request, workers: Sequence[int], now: float) -> Choice:
        hits = {worker: self._hit(worker, request.matchable, now) for worker in workers}
        found = max(workers, key=lambda worker: (hits[worker], -self._load[worker]))
        if not hits[found] or self._load[found] > self._saturated:
            found = min(workers, key=lambda worker: self._load[worker] + request.prompt_tokens - hits[worker])
        self._uncached[request] = request.prompt_tokens - hits[found]
        self._load[found] += self._uncached[request]
        self._guesses.add(found, request.matchable, now)
        return Choice(found, hits[found])

    def first_token(self, request: Request, worker: int) -> None:
        self._load[worker] -= self._uncached.pop(request, 0)

    def ended(self, request: Request, worker: int) -> None:
        self.first_token(request, worker)

    def _hit(self, worker: int, digests: bytes, now: float) -> int:
        stored = self._events.stored[worker] if self._events else frozenset[bytes]()
        return longest(digests, lambda digest: digest in stored or self._guesses.has(worker, digest, now))


class Allocator:
    """The allocator, as gateways reach it: its directory and its router.

    `is_away` is true while Route does not answer.
    """

    def __init__(self, directory: Directory, router: Router) -> None:
        self.directory, self.router = directory, router
        self.is_away = False


class Mirrored:
    """The gateway's rule without Route: mirrors of the pools tell the prefixes, its own prompts tell the load.

    A gateway knows its own current requests, and the number of other gateways' requests as of a poll each second.
    """

    def __init__(self, events: EventIndex, request_counts: Callable[[], list[int]]) -> None:
        self._events, self._request_counts = events, request_counts
        self._own = [0] * len(events.stored)
        self._others = [0] * len(events.stored)
        self._polled_s = -1.0
        self._underway = [Underway() for _ in events.stored]

    def choose(self, request: Request, workers: Sequence[int], now: float) -> Choice:
        if now >= self._polled_s + POLL_S:
            self._polled_s = now
            counts = zip(self._request_counts(), self._own, strict=True)
            self._others = [max(0, count - own) for count, own in counts]
        found = [self._candidate(request, worker) for worker in workers]
        place = best(list(map(Standing, found)))
        self.sent(request, workers[place], found[place].uncached_token_count, request.matchable)
        return Choice(workers[place], found[place].shared_token_count)

    def _candidate(self, request: Request, worker: int) -> Candidate:
        hit = longest(request.matchable, self._events.stored[worker].__contains__)
        shared = max(hit, self._underway[worker].shared_block_count(request.matchable) * BLOCK_TOKENS)
        count = self._own[worker] + self._others[worker]
        backlog = self._underway[worker].uncached_token_count
        return Candidate(hit, shared - hit, request.prompt_tokens - shared, backlog, PREFILL_TOKENS_PER_S, count)

    def sent(self, request: Request, worker: int, uncached_tokens: int, digests: bytes = b"") -> None:
        """Notes a request that this gateway sent to a worker."""
        self._own[worker] += 1
        self._underway[worker].add(request, uncached_tokens, digests)

    def first_token(self, request: Request, worker: int) -> None:
        self._underway[worker].remove(request)

    def ended(self, request: Request, worker: int) -> None:
        self._own[worker] -= 1
        self._underway[worker].remove(request)


class Quire:
    """Asks the allocator. While the allocator is away, the gateway's mirrors decide, and the mirrors get no events."""

    def __init__(self, allocator: Allocator, reservation_s: float, mirrors: Mirrored) -> None:
        self._allocator, self._reservation_s, self._mirrors = allocator, reservation_s, mirrors

    def choose(self, request: Request, workers: Sequence[int], now: float) -> Choice:
        if self._allocator.is_away:
            return self._mirrors.choose(request, workers, now)
        prompt = Prompt(
            "",
            request.matchable,
            request.prompt_tokens,
            MODEL,
            excluded_pools=frozenset(pool_name(worker) for worker in request.excluded),
            reservation_s=self._reservation_s,
            caller="gateways",
        )
        routed = self._allocator.router.route(self._allocator.directory.open_pools(), prompt, now)
        worker = int(routed.address)
        self._mirrors.sent(request, worker, routed.candidate.uncached_token_count)
        return Choice(worker, routed.candidate.shared_token_count)

    def first_token(self, request: Request, worker: int) -> None:
        self._mirrors.first_token(request, worker)

    def ended(self, request: Request, worker: int) -> None:
        self._mirrors.ended(request, worker)


def longest(digests: bytes, has: Callable[[bytes], bool]) -> int:
    """Returns the tokens of a prompt's longest prefix that an index has.

    If an index has a digest, it has all before it, because it forgets the deepest first. So bisection finds the end.
    """
    low, high = 0, len(digests) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if has(digests[(middle - 1) * DIGEST_BYTES : middle * DIGEST_BYTES]):
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_TOKENS


def pool_name(worker: int) -> str:
    """Returns the name of a worker's pool."""
    return f"pool-{worker}"
