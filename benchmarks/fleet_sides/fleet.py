"""A simulated fleet on a virtual clock: gateways with a rule each, workers, and the allocator's core and router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from quire._serving.routing_rule import UNCACHED_WEIGHT
from quire_allocator.core.events import Event
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.core.pending import PendingPrefixes
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result
from quire_allocator.routing.router import PromptResult, Router, Worker

from fleet_sides.clock import Clock
from fleet_sides.rules import (
    GUESS_S,
    MODEL,
    RESERVATION_S,
    Allocator,
    EventIndex,
    Guesses,
    LeastLoaded,
    LlmD,
    Mirrored,
    Quire,
    RoundRobin,
    Rule,
    pool_name,
)
from fleet_sides.workers import PREFILL_TOKENS_PER_S, SimulatedWorker
from fleet_sides.workloads import BLOCK_TOKENS, Request

QUIRE: Final = "quire"
WEIGHTS: Final = {QUIRE: UNCACHED_WEIGHT, "quire, weight 1": 1.0, "quire, weight 3": 3.0}
UNRESERVED: Final = "quire, no reservation"
MIRRORS: Final = "quire, mirrors alone"
PEERS: Final = ("round robin", "least loaded", "llm-d, own choices", "llm-d, events", "llm-d, events, one gateway")
RULES: Final = (*PEERS, MIRRORS, UNRESERVED, QUIRE)
LEASE_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet.

    Attributes:
        hop_s: seconds from a gateway's choice to the worker's scheduler.
        event_s: seconds from a turn's end to the event index of the gateways.
        worker_restart: when worker 0 is killed, and for how many seconds it is down.
        route_outage: when Route stops to answer, and for how many seconds; workers still reach the allocator.
        allocator_outage: like `route_outage`, but for all calls; then a new allocator gets the workers' reports.
    """

    rule: str
    gateways: int = 8
    workers: int = 8
    cache_tokens: int = 300_000
    hop_s: float = 0.010
    event_s: float = 0.05
    reservation_s: float = RESERVATION_S
    worker_restart: tuple[float, float] | None = None
    route_outage: tuple[float, float] | None = None
    allocator_outage: tuple[float, float] | None = None


@dataclass(slots=True)
class Outcome:
    """Measurements of a run. Prompt tokens count once for each time that a worker admitted them."""

    first_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    promised_tokens: int = 0
    kept_tokens: int = 0  # promised tokens that were in the cache at the request's admission
    lost_promises: int = 0  # promised tokens of requests whose worker died before their admission
    end_s: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)  # how Quire's reservations ended -> their number


class Fleet:
    """Runs requests through one fleet. Used once."""

    def __init__(self, setting: Setting) -> None:
        self.outcome = Outcome()
        self._setting, self._clock = setting, Clock()
        self._spec = PoolSpec(
            setting.cache_tokens // BLOCK_TOKENS, (GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS),)
        )
        self._allocator = Allocator(
            Directory(lease_s=LEASE_S, pools_max=setting.workers), Router(WEIGHTS.get(setting.rule, UNCACHED_WEIGHT))
        )
        self._workers = [
            SimulatedWorker(number, self._clock, self, self._open(number)) for number in range(setting.workers)
        ]
        self._events = EventIndex(setting.workers)
        self._cursors = [0] * setting.workers
        self._untold: list[tuple[int, list[Event]]] = []  # events that gateways get when they reach the allocator again
        self._reads_events = "events" in setting.rule or setting.rule == MIRRORS
        self._reads_events |= bool(setting.route_outage or setting.allocator_outage)
        self._gateways = 1 if "one gateway" in setting.rule else setting.gateways
        self._rules = [self._rule(gateway) for gateway in range(self._gateways)]

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Serves all requests, and writes the results into them."""
        for number, request in enumerate(requests):
            request.gateway = number % self._gateways
            self._clock.at(request.arrival_s, partial(self._arrive, request))
        if self._setting.worker_restart is not None:
            start, seconds = self._setting.worker_restart
            self._clock.at(start, partial(self._kill, 0))
            self._clock.at(start + seconds, partial(self._restart, 0))
        for outage, is_whole in ((self._setting.route_outage, False), (self._setting.allocator_outage, True)):
            if outage is not None:
                start, seconds = outage
                self._clock.at(start, partial(self._go_away, is_whole=is_whole))
                self._clock.at(start + seconds, partial(self._come_back, is_whole=is_whole))
        self._clock.run()
        self.outcome.end_s = self._clock.now
        self._count_ends()
        return self.outcome

    # -- calls from workers --------------------------------------------------------------------------------------------

    def admitted(self, worker: int, request: Request, matched: int) -> None:
        router, name = self._allocator.router, pool_name(worker)
        if router.expects(name):
            router.admitted(name, [PromptResult("", request.matchable, matched, Result.OK)], self._clock.now)
        if not request.is_measured:
            return
        outcome = self.outcome
        outcome.prompt_tokens += request.prompt_tokens
        outcome.hit_tokens += matched
        outcome.promised_tokens += request.promised_tokens
        outcome.kept_tokens += min(matched, request.promised_tokens)

    def first_token(self, worker: int, request: Request) -> None:
        self._rules[request.gateway].first_token(request, worker)
        if request.first_token_s is None:
            request.first_token_s = self._clock.now - request.arrival_s
            if request.is_measured:
                self.outcome.first_token_s.append(request.first_token_s)

    def ended(self, worker: int, request: Request) -> None:
        self._rules[request.gateway].ended(request, worker)
        following = request.next_turn
        if following is not None:
            following.gateway = request.gateway
            following.arrival_s = self._clock.now + request.think_s
            self._clock.at(following.arrival_s, partial(self._arrive, following))

    def changed(self, worker: int) -> None:
        pool = self._workers[worker].pool
        assert pool is not None
        if not self._reads_events:
            pool.log.discard()
            return
        if pool.log.publish(0):
            events = [event for _, event in pool.log.after(self._cursors[worker], 1 << 30)]
            self._cursors[worker] = pool.log.last_cursor
            self._clock.after(self._setting.event_s, partial(self._told, worker, events))

    def _told(self, worker: int, events: list[Event]) -> None:
        if self._allocator.is_away:
            self._untold.append((worker, events))
        else:
            self._events.apply(worker, events)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        workers = [number for number in range(len(self._workers)) if number not in request.excluded]
        choice = self._rules[request.gateway].choose(request, workers, self._clock.now)
        request.promised_tokens = choice.promised_tokens
        self._clock.after(self._setting.hop_s, partial(self._submit, request, choice.worker))

    def _submit(self, request: Request, worker: int) -> None:
        if self._workers[worker].pool is None:
            self._fail(request, worker)
        else:
            self._workers[worker].submit(request)

    def _fail(self, request: Request, worker: int) -> None:
        self._rules[request.gateway].ended(request, worker)
        request.excluded = {worker}
        self._arrive(request)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _open(self, worker: int) -> Pool:
        name = pool_name(worker)
        opened = self._allocator.directory.open_unary(
            name=name, spec=self._spec, request_id=name, session_id=name.encode().ljust(16), now=self._clock.now
        )
        self._register(worker)
        return opened.pool

    def _register(self, worker: int) -> None:
        about = Worker(str(worker), MODEL, frozenset(), PREFILL_TOKENS_PER_S, is_draining=False)
        self._allocator.router.register(pool_name(worker), about)

    def _kill(self, worker: int) -> None:
        lost = self._workers[worker].die()
        directory = self._allocator.directory
        directory.remove(directory.pool(pool_name(worker)))
        self._allocator.router.forget(pool_name(worker))
        for request in lost:
            self._fail(request, worker)

    def _restart(self, worker: int) -> None:
        """Starts a worker with an empty pool. Gateways' indexes keep its old digests, as after a lost event."""
        self._cursors[worker] = 0
        self._workers[worker].restart(self._open(worker))

    def _go_away(self, *, is_whole: bool) -> None:
        self._allocator.is_away = True
        for worker in self._workers if is_whole else ():
            worker.lose_allocator()

    def _come_back(self, *, is_whole: bool) -> None:
        self._allocator.is_away = False
        for number, events in self._untold:
            self._events.apply(number, events)
        self._untold.clear()
        if not is_whole:
            return
        self._count_ends(lost=self._allocator.router.reservation_count)
        self._allocator.router = Router(WEIGHTS.get(self._setting.rule, UNCACHED_WEIGHT))
        for worker in self._workers:
            assert worker.pool is not None
            for sequence in worker.pool.sequences.values():
                sequence.announcement = None
            worker.pool.pending = PendingPrefixes()
            self._register(worker.number)
            worker.find_allocator()

    def _count_ends(self, lost: int = 0) -> None:
        for kind, count in {**self._allocator.router.counts.ends, "lost with the allocator": lost}.items():
            self.outcome.ends[kind] = self.outcome.ends.get(kind, 0) + count

    def _request_counts(self) -> list[int]:
        return [len(worker.waiting) + len(worker.running) for worker in self._workers]

    def _rule(self, gateway: int) -> Rule:
        count = self._setting.workers
        match self._setting.rule:
            case "round robin":
                return RoundRobin(gateway)
            case "least loaded":
                return LeastLoaded(gateway, count)
            case "llm-d, own choices":
                return LlmD(count, Guesses(count, block_count=self._spec.block_count), None)
            case "llm-d, events" | "llm-d, events, one gateway":
                return LlmD(count, Guesses(count, seconds=GUESS_S), self._events)
            case rule if rule in WEIGHTS or rule == UNRESERVED:
                seconds = 0.0 if rule == UNRESERVED else self._setting.reservation_s
                return Quire(self._allocator, seconds, Mirrored(self._events, self._request_counts))
            case rule if rule == MIRRORS:
                return Mirrored(self._events, self._request_counts)
            case rule:
                raise ValueError(f"no rule is named {rule!r}: use one of {', '.join(RULES)}")
