"""Runs a trace of requests through the worker's scheduler and the allocator's pool, without a model.

Every turn does what the engine does: plan, ask, schedule, advance, one token for each complete sample, and requests for
slots ahead of need. After each turn, `Traffic` counts the slots of held blocks, and the unwritten slots among them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.protocol.outcomes import StepOutcome, read_reply
from quire.session.lookahead import AHEAD_TOKENS
from quire.types import GroupKind, GroupSpec
from quire.v1 import _packed_pb2 as packed
from quire_allocator.core import spec
from quire_allocator.core.pool import Pool
from quire_allocator.wire import step_apply, step_checks
from quire_worker.encoding import step_of
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.plan import Batch, Plan
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.scheduler import Scheduler

TRACE_BLOCK_TOKENS = 512
FIRST_OUTPUT_TOKEN = 1 << 30  # least id of an output token; higher than the ids of all prompts
NOTHING_ASKED = StepOutcome([], [], [], [], [], [], 0)


class TraceRequest(NamedTuple):
    """One line of a trace."""

    input_length: int
    output_length: int
    hash_ids: list[int]

    def prompt(self) -> list[int]:
        """Makes the tokens of a prompt. Two prompts share as many tokens as in the trace."""
        first = (block * TRACE_BLOCK_TOKENS for block in self.hash_ids)
        tokens = [token for start in first for token in range(start, start + TRACE_BLOCK_TOKENS)]
        return tokens[: self.input_length]


def read_trace(file: Path, count: int) -> list[TraceRequest]:
    """Reads the first requests of a file with a line of JSON each."""
    with file.open() as lines:
        read = (json.loads(line) for line in lines)
        return [
            TraceRequest(each["input_length"], each["output_length"], each["hash_ids"])
            for each, _ in zip(read, range(count), strict=False)
        ]


class Slots(NamedTuple):
    """Token slots after one turn.

    Attributes:
        running_count: samples that hold blocks.
        token_count: tokens of these samples in the pages; a shared token counts once for each sample.
        held: slots of blocks in any table.
        unwritten: held slots that are unwritten.
    """

    running_count: int
    token_count: int
    held: int
    unwritten: int


class Traffic:
    """Scheduler and pool. As many requests wait at a time as run."""

    def __init__(
        self, requests: Sequence[TraceRequest], *, block_count: int, block_size: int, running_max: int
    ) -> None:
        group = spec.GroupSpec(spec.GroupKind.FULL_ATTENTION, block_size)
        self.pool = Pool(spec.PoolSpec(block_count, (group,)))
        self.scheduler = Scheduler(
            groups=[GroupSpec(GroupKind.FULL_ATTENTION, block_size)],
            sequence_tokens_max=block_count * block_size,
            batch_tokens_max=2_048,
            running_max=running_max,
            ahead_tokens=AHEAD_TOKENS,
        )
        self._waiting = list(reversed(requests))
        self._number = 0
        self._block_size = block_size
        self._running_max = running_max

    def run(self) -> Iterator[Slots]:
        """Takes turns until all requests are done."""
        roster = self.scheduler.roster
        while self._waiting or roster.has_work:
            while self._waiting and len(roster.waiting) < self._running_max:
                self._submit(self._waiting.pop())
            ready = self.scheduler.plan_without_asking()
            outcome = NOTHING_ASKED
            if self.scheduler.has_to_ask(ready):
                ready = self.scheduler.plan(ready.chosen)
                outcome = self._ask(ready)
            batch = self.scheduler.schedule(ready, outcome)
            self._compute(batch)
            yield self._slots()
            ahead = self.scheduler.plan_ahead(batch.work)
            if ahead.has_to_be_sent:
                self.scheduler.take_in(ahead, self._ask(ahead))

    def _submit(self, asked: TraceRequest) -> None:
        self._number += 1
        params = SamplingParams(max_tokens=asked.output_length)
        request = Request(self._number, "", asked.prompt(), params, "", bytes(32), 0.0)
        request.samples = [Sample(request, 0, list(request.prompt), None, None)]  # type: ignore[arg-type]  # it draws none
        self.scheduler.roster.add(request.samples[0])

    def _ask(self, plan: Plan) -> StepOutcome:
        message, reply = step_of(plan).message, packed.StepReply()
        step_apply.apply_step(self.pool, step_checks.check_step(self.pool, message), reply)
        return read_reply(message, reply, 1)

    def _compute(self, batch: Batch) -> None:
        complete = [item.sample for item in batch.work if item.is_complete and not item.sample.has_ended]
        self.scheduler.advance(batch.work)
        for sample in complete:
            token = FIRST_OUTPUT_TOKEN + (self._number * 100_003 + len(sample.tokens)) % FIRST_OUTPUT_TOKEN
            self.scheduler.extend(sample, token, is_stop=False)

    def _slots(self) -> Slots:
        """Counts the current slots. The pool counts only blocks that its owner has reported."""
        holders = [sample for sample in self.scheduler.roster.running if sample.tables]
        room = sum(sample.table_length * self._block_size - sample.computed for sample in holders)
        held_blocks = {block for sample in holders for block in sample.tables[0]}
        tokens = sum(sample.computed for sample in holders)
        return Slots(len(holders), tokens, len(held_blocks) * self._block_size, room)
