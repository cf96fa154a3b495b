"""Scheduler, the allocator's real core, and pages that remember which token was written where.

The model is replaced by arithmetic (the next token is a hash of all tokens before it), so thousands of turns take a
second and the right text of every sample is known beforehand.
"""

from __future__ import annotations

import asyncio
import hashlib
import random

import pytest
from quire.hashing import DIGEST_BYTES
from quire.protocol.steps import StepOutcome, read_reply
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec
from quire_allocator.wire import step_apply, step_checks
from quire_worker.sampler import SamplingParams
from quire_worker.scheduling.plan import Batch, Plan
from quire_worker.scheduling.request import FinishReason, Request, Sample
from quire_worker.scheduling.scheduler import Scheduler

STOP = 7
NOTHING_ASKED = StepOutcome([], [], [], [], [], [], 0)


def next_token(tokens: list[int], index: int) -> int:
    """What the pretended model and sampler give after `tokens`, for the sample of that index."""
    digest = hashlib.sha256(repr((tokens, index)).encode()).digest()
    return 10 + digest[0] if digest[1] > 5 else STOP


def expected_output(prompt: list[int], index: int, max_tokens: int, longest: int) -> tuple[list[int], FinishReason]:
    """The text that a sample must end with, whatever happens to it on the way."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < longest:
        token = next_token(tokens, index)
        if token == STOP:
            return tokens[len(prompt) :], FinishReason.STOP
        tokens.append(token)
    return tokens[len(prompt) :], FinishReason.LENGTH


class PretendedWorker:
    """Scheduler, the allocator's pool, and pages that hold tokens instead of keys and values.

    Args:
        others: groups of the pool behind the one of full attention. Pages of states hold the tokens that went in.
        chunk_tokens_max: what the pool is told of its owner's largest chunk.
        ahead_tokens: as the scheduler's; None: every turn asks, and nothing is asked for while a batch is computed.

    Attributes:
        is_silent: what is asked for is applied, and not answered as long as anybody can go on without.
        may_wait: commits and frees go along with the next step that somebody waits for.
        waited_count: turns in which nobody could.
        plan_count: steps that went out before a batch, which had to wait for the answer.
        asks: of each step that went out while a batch was computed, room for how many tokens it asked for whom.
    """

    def __init__(
        self,
        *,
        block_count: int,
        block_size: int,
        batch_tokens: int,
        running_max: int = 8,
        ahead_tokens: int | None = None,
        commit_blocks_max: int = 1_000,
        others: tuple[GroupSpec, ...] = (),
        chunk_tokens_max: int = 0,
    ) -> None:
        groups = (GroupSpec(GroupKind.FULL_ATTENTION, block_size), *others)
        self.pool = Pool(PoolSpec(block_count, groups, chunk_token_count_max=chunk_tokens_max))
        self.scheduler = Scheduler(
            block_size=block_size,
            sequence_tokens_max=block_count * block_size,
            batch_tokens_max=batch_tokens,
            running_max=running_max,
            ahead_tokens=ahead_tokens or 0,
            commit_blocks_max=commit_blocks_max,
            has_states=any(group.kind is GroupKind.STATE for group in others),
        )
        self.states: dict[int, list[int]] = {}  # block -> tokens that its state is of
        self.asks: list[list[tuple[Sample, int]]] = []
        self.commit_block_counts: list[int] = []  # of each step
        self._asks_ahead = ahead_tokens is not None
        self.is_silent = False
        self.may_wait = False
        self.waited_count = 0
        self.plan_count = 0
        self._asked: tuple[Plan, StepOutcome] | None = None
        self.pages: dict[tuple[int, int], int] = {}  # (block, offset) -> token
        self.prefilled_token_count = 0
        self.turn_count = 0
        self._request_count = 0

    def submit(self, prompt: list[int], *, namespace: str = "", **sampling: int) -> Request:
        self._request_count += 1
        root = hashlib.sha256(namespace.encode()).digest()
        params = SamplingParams(**sampling)
        request = Request(self._request_count, "", prompt, params, namespace, root, 0.0, deliveries=asyncio.Queue())
        request.samples = [Sample(request, i, list(prompt), None, None) for i in range(params.n)]
        self.scheduler.add(request.samples[0])
        return request

    def ask(self, plan: Plan) -> StepOutcome:
        """What the allocator's server does with a step."""
        message, reply = plan.step.message, pb.StepReply()
        self.commit_block_counts.append(len(message.commits.digests) // DIGEST_BYTES)
        step_apply.apply_step(self.pool, step_checks.check_step(self.pool, message), 0.0, reply)
        invariants.check(self.pool)
        return read_reply(message, reply, len(self.pool.spec.groups))

    def turn(self, *, cancel_meanwhile: Request | None = None) -> None:
        self.turn_count += 1
        if not self.is_silent:
            self.take_in()
        plan, outcome = self._plan()
        if cancel_meanwhile is not None:
            self.scheduler.cancel(cancel_meanwhile)
        batch = self.scheduler.schedule(plan, outcome)
        self.scheduler.check_invariants()
        if self._asked is None:
            self._check_pool()
        if self._asks_ahead and self._asked is None:
            plan = self.scheduler.plan_ahead(batch.work, may_wait=self.may_wait)
            self.asks.append(plan.grows)
            self._asked = plan, self.ask(plan)
        self._compute(batch)

    def take_in(self) -> None:
        """Takes in the answer to what was asked."""
        if self._asked is not None:
            self.scheduler.take_in(*self._asked)
            self.scheduler.check_invariants()
            self._asked = None

    def _plan(self) -> tuple[Plan, StepOutcome]:
        """As the engine does it."""
        ready = self.scheduler.plan_without_asking() if self._asks_ahead else Plan(is_whole=False)
        if not self.scheduler.has_to_ask(ready):
            return ready, NOTHING_ASKED
        goes_on = self.is_silent and bool(ready.wanted)
        if self._asked is None:
            self.plan_count += 1
            plan = self.scheduler.plan()
            outcome = self.ask(plan)
            if not goes_on:
                return plan, outcome
            self._asked = plan, outcome
        if goes_on:
            return ready, NOTHING_ASKED
        self.waited_count += 1
        self.take_in()
        return self._plan()

    def _check_pool(self) -> None:
        """The allocator knows of who runs what the scheduler does."""
        for sample in self.scheduler.running:
            if sample.fork_of is None:
                sequence = self.pool.sequences[sample.sequence_id]
                table, *others = self.pool.tables(sequence)
                assert list(table) == sample.table
                assert not self.scheduler.has_states or [list(own) for own in others] == [[b] for b in sample.states]
                assert sequence.committed_token_count == sample.committed
                assert sequence.token_count == sample.granted

    def _compute(self, batch: Batch) -> None:
        for copy in batch.copies:
            for offset in range(self.scheduler.block_size):
                if (copy.source, offset) in self.pages:
                    self.pages[copy.destination, offset] = self.pages[copy.source, offset]
            if copy.source in self.states:
                self.states[copy.destination] = self.states[copy.source]
        for item in batch.work:
            self._write(item.sample, item.token_count)
        for item in batch.work:
            self._read(item.sample, item.sample.computed + item.token_count)
        assert sum(item.token_count for item in batch.work) <= self.scheduler.batch_tokens_max
        complete = [item.sample for item in batch.work if item.is_complete]
        self.scheduler.advance(batch.work)
        for sample in complete:
            self._extend(sample)
        self.scheduler.check_invariants()

    def _write(self, sample: Sample, token_count: int) -> None:
        self.prefilled_token_count += token_count
        for position in range(sample.computed, sample.computed + token_count):
            block, offset = divmod(position, self.scheduler.block_size)
            self.pages[sample.table[block], offset] = sample.tokens[position]
        for block in sample.states:
            before = self.states.get(block) if sample.computed else []
            assert before == sample.tokens[: sample.computed], f"a state of sample {sample.age} is not of its tokens"
            self.states[block] = sample.tokens[: sample.computed + token_count]

    def _read(self, sample: Sample, end: int) -> None:
        size = self.scheduler.block_size
        content = [self.pages[sample.table[position // size], position % size] for position in range(end)]
        assert content == sample.tokens[:end], f"sample {sample.age} reads another sequence's tokens"

    def _extend(self, parent: Sample) -> None:
        drawn = [parent]
        if parent.index == 0 and parent.output_token_count == 0:
            drawn += parent.request.samples[1:]
        tokens = {sample.index: next_token(parent.tokens, sample.index) for sample in drawn}
        for sample in drawn:
            if sample is not parent:
                sample.fork_from(parent)
            self.scheduler.extend(sample, tokens[sample.index], is_stop=tokens[sample.index] == STOP)
            if sample is not parent and not sample.has_ended:
                self.scheduler.add_fork(sample)

    def run(self, *, turns_max: int = 5000) -> None:
        for _ in range(turns_max):
            if not self.scheduler.has_work:
                return
            self.turn()
        pytest.fail(f"still working after {turns_max} turns: {len(self.scheduler.waiting)} wait")

    def check_text(self, request: Request) -> None:
        for sample in request.samples:
            tokens, reason = expected_output(
                request.prompt, sample.index, request.sampling.max_tokens, self.scheduler.sequence_tokens_max
            )
            assert sample.tokens[len(request.prompt) :] == tokens
            assert sample.finish_reason is reason


def numbers(count: int, *, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000) for _ in range(count)]


def lasting_prompts(count: int, *, output_tokens: int) -> list[list[int]]:
    """Prompts of 20 tokens that no stop token ends too early."""
    prompts = (numbers(20, seed=seed) for seed in range(1000))
    return [p for p in prompts if len(expected_output(p, 0, output_tokens, 10**6)[0]) == output_tokens][:count]
