"""Simulated workers: the product's pools hold the blocks, a model of time replaces the forward passes.

A turn admits waiting prompts in order, computes at most `PASS_TOKENS` prompt tokens, oldest prompt first, and a token
for each other running request. As in the product's scheduler, a prompt waits while another one computes its next block:
it does not ask the allocator, and later prompts may pass it. No prompt passes one that got no blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import Result

from fleet_sides.clock import Clock
from fleet_sides.workloads import BLOCK_TOKENS, DIGEST_BYTES, Request

PREFILL_TOKENS_PER_S: Final = 12_000
PASS_TOKENS: Final = 2_048
TURN_S: Final = 0.010
DECODE_S: Final = 0.0002  # seconds of a turn for each request that decodes
RUNNING_MAX: Final = 256


class Observer(Protocol):
    """Receives what happens at workers."""

    def admitted(self, worker: int, request: Request, matched: int) -> None:
        """Called once a prompt has its blocks."""

    def first_token(self, worker: int, request: Request) -> None:
        """Called when a prompt is computed."""

    def ended(self, worker: int, request: Request) -> None:
        """Called after the last token."""

    def changed(self, worker: int) -> None:
        """Called when a turn has changed what the pool has published."""


@dataclass(slots=True, eq=False)
class Run:
    """A running request.

    Attributes:
        done: tokens that are computed.
        due: prompt tokens of the present turn.
    """

    request: Request
    sequence: int
    done: int
    left: int
    due: int = 0


class SimulatedWorker:
    """One worker. `pool` is None while the worker is down."""

    def __init__(self, number: int, clock: Clock, fleet: Observer, pool: Pool) -> None:
        self.number = number
        self.pool: Pool | None = pool
        self.waiting: list[Request] = []
        self.running: list[Run] = []
        self._clock, self._fleet = clock, fleet
        self._is_busy = False
        self._is_cut_off = False
        self._unsaid: list[Callable[[], object]] = []  # calls that tell the allocator of changes during its outage

    def submit(self, request: Request) -> None:
        """Takes a request; the worker is up."""
        self.waiting.append(request)
        self._begin()

    def lose_allocator(self) -> None:
        """Admits nothing until `find_allocator` is called; requests with blocks are still computed."""
        self._is_cut_off = True

    def find_allocator(self) -> None:
        """Tells the allocator what happened meanwhile."""
        self._is_cut_off = False
        for change in self._unsaid:
            change()
        self._unsaid.clear()
        self._begin()

    def die(self) -> list[Request]:
        """Loses its pool and returns its requests."""
        lost = [*self.waiting, *(run.request for run in self.running)]
        self.pool, self.waiting, self.running = None, [], []
        return lost

    def restart(self, pool: Pool) -> None:
        """Starts with an empty pool."""
        self.pool, self._is_busy = pool, False

    def _begin(self) -> None:
        if not self._is_busy and self.pool is not None:
            self._is_busy = True
            self._clock.after(0, self._turn)

    def _turn(self) -> None:
        pool = self.pool
        if pool is None:
            return
        if not self._is_cut_off:
            self._admit(pool)
        if not self.running:
            self._is_busy = False
            return
        room, decoding = PASS_TOKENS, 0
        for run in self.running:
            missing = run.request.prompt_tokens - run.done
            run.due = min(room, missing) if missing > 0 else 0
            room -= run.due
            decoding += missing <= 0
        seconds = TURN_S + (PASS_TOKENS - room) / PREFILL_TOKENS_PER_S + decoding * DECODE_S
        self._clock.after(seconds, lambda: self._end_turn(pool))

    def _admit(self, pool: Pool) -> None:
        waiting, self.waiting = self.waiting, []
        for number, request in enumerate(waiting):
            if len(self.running) == RUNNING_MAX:
                self.waiting += waiting[number:]
                return
            sequence, digests = pool.last_sequence_id + 1, request.matchable
            total = request.prompt_tokens + request.output_tokens
            made = pool.allocate(sequence, total, digests, defer_token_count=1)
            if made.result is Result.PENDING:
                self.waiting.append(request)
            elif made.result is Result.OK:
                self.running.append(Run(request, sequence, made.matched_token_count, request.output_tokens))
                self._fleet.admitted(self.number, request, made.matched_token_count)
            else:
                assert made.result is Result.NO_SPACE, made
                self.waiting += waiting[number:]
                return

    def _end_turn(self, pool: Pool) -> None:
        if self.pool is not pool:
            return
        running, self.running = self.running, []
        for run in running:
            if run.due:
                self._advance(pool, run, run.done + run.due)
                if run.done < run.request.prompt_tokens:
                    self.running.append(run)
                    continue
                self._fleet.first_token(self.number, run.request)
                run.left -= 1
            elif run.done >= run.request.prompt_tokens:
                run.left -= 1
            if run.left > 0 or run.done < run.request.prompt_tokens:
                self.running.append(run)
            else:
                self._advance(pool, run, run.request.prompt_tokens + run.request.output_tokens)
                self._say(partial(pool.free, run.sequence))
                self._fleet.ended(self.number, run.request)
        if not self._is_cut_off:
            self._fleet.changed(self.number)
        self._turn()

    def _advance(self, pool: Pool, run: Run, done: int) -> None:
        before, run.done = run.done, done
        digests = run.request.digests[before // BLOCK_TOKENS * DIGEST_BYTES : done // BLOCK_TOKENS * DIGEST_BYTES]
        self._say(lambda: pool.commit(run.sequence, done, digests))

    def _say(self, change: Callable[[], object]) -> None:
        if self._is_cut_off:
            self._unsaid.append(change)
        else:
            change()
