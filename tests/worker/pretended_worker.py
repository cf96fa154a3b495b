"""A simulated worker: the real scheduler and the allocator's real core, with pages that record tokens.

Arithmetic replaces the model (the next token is a hash of all tokens before it). So thousands of turns take a second,
and the right text of every sample is known in advance.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from quire.hashing import DIGEST_BYTES
from quire.protocol.outcomes import Copy, StepOutcome, read_reply
from quire.types import GroupKind, GroupSpec
from quire.v1 import _packed_pb2 as packed
from quire_allocator.core import spec
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.wire import step_apply, step_checks
from quire_worker.encoding import step_of
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.output import FinishReason
from quire_worker.scheduling.plan import Batch, Plan, Work
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.scheduler import Scheduler
from quire_worker.scheduling.slots import NO_WISH, CacheWish
from quire_worker.scheduling.swap import pages_to_restore

STOP = 7
NOTHING_ASKED = StepOutcome([], [], [], [], [], [], 0)


def next_token(tokens: list[int], index: int) -> int:
    """Returns the token that the simulated model and sampler choose after `tokens` for the sample of that index."""
    digest = hashlib.sha256(repr((tokens, index)).encode()).digest()
    return 10 + digest[0] if digest[1] > 5 else STOP


def expected_output(prompt: list[int], index: int, max_tokens: int, longest: int) -> tuple[list[int], FinishReason]:
    """Returns the text and the finish reason that a sample must have, regardless of preemptions and failures."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < longest:
        token = next_token(tokens, index)
        if token == STOP:
            return tokens[len(prompt) :], FinishReason.STOP
        tokens.append(token)
    return tokens[len(prompt) :], FinishReason.LENGTH


class _Laid(NamedTuple):
    """A batch, with the tables and states that its samples had when it was planned."""

    batch: Batch
    tables: list[list[array[int]]]
    states: list[list[int]]
    restores: list[tuple[list[int], list[int]]]

    @classmethod
    def of(cls, batch: Batch, block_size: int) -> _Laid:
        tables = [[table[:] for table in item.sample.tables] for item in batch.work]
        restores = [pages_to_restore(*item[:2], item.end, block_size) for item in batch.work if item.is_restored]
        return cls(batch, tables, [list(item.sample.states) for item in batch.work], restores)


class PretendedWorker:
    """The scheduler, the allocator's pool, and pages that hold tokens instead of keys and values.

    Args:
        groups: groups of the pool; by default one group of full attention. Pages of states hold the tokens that the
            state has seen.
        sequence_tokens_max: the scheduler's limit; by default the tokens that fit if every group holds all of them.
        chunk_tokens_max: the largest chunk that is announced to the pool.
        is_pipelined: whether the worker plans the next batch while one is computed, as the engine does.
        swap_slots: number of blocks that fit into host memory.
        ahead_tokens: the scheduler's option. None: every turn asks for blocks, and none are requested during a batch.

    Attributes:
        is_silent: whether the allocator applies steps, but does not answer while any sample can continue without it.
        may_wait: whether commits and frees wait for the next step that a sample needs.
        waited_count: number of turns in which no sample could continue without an answer.
        plan_count: number of steps that were sent before a batch, so that the batch had to wait for the answer.
        asks: for each step that was sent during a batch, the samples and the number of tokens each needs blocks for.
        behind_count: number of batches that were planned while the previous one was computed.
    """

    def __init__(
        self,
        *,
        block_count: int,
        block_size: int,
        batch_tokens: int,
        groups: Sequence[GroupSpec] = (),
        sequence_tokens_max: int | None = None,
        running_max: int = 8,
        ahead_tokens: int | None = None,
        commit_blocks_max: int = 1_000,
        chunk_tokens_max: int = 0,
        is_pipelined: bool = False,
        swap_slots: int = 0,
    ) -> None:
        self.groups = tuple(groups) or (GroupSpec(GroupKind.FULL_ATTENTION, block_size),)
        core = [spec.GroupSpec(spec.GroupKind[each.kind.name], each.block_size, each.window) for each in self.groups]
        self.pool = Pool(spec.PoolSpec(block_count, tuple(core), chunk_token_count_max=chunk_tokens_max))
        table_count = sum(group.kind is not GroupKind.STATE for group in self.groups)
        self.scheduler = Scheduler(
            groups=self.groups,
            sequence_tokens_max=sequence_tokens_max or block_count // table_count * block_size,
            batch_tokens_max=batch_tokens,
            running_max=running_max,
            ahead_tokens=ahead_tokens or 0,
            commit_blocks_max=commit_blocks_max,
            swap_slot_count=swap_slots,
        )
        # slot on the host -> (tokens by offset, tokens that the state has seen)
        self.host: dict[int, tuple[dict[int, int], list[int] | None]] = {}
        self.states: dict[int, list[int]] = {}  # block -> tokens that the block's state has seen
        self.asks: list[list[tuple[Sample, int]]] = []
        self.commit_block_counts: list[int] = []  # number of blocks that each step commits
        self._asks_ahead = ahead_tokens is not None
        self.is_silent = False
        self.may_wait = False
        self._is_pipelined = is_pipelined
        self._under_way: _Laid | None = None
        self.behind_count = 0
        self.waited_count = 0
        self.plan_count = 0
        self._asked: tuple[Plan, StepOutcome] | None = None
        self.pages: dict[tuple[int, int], int] = {}  # (block, offset) -> token
        self.prefilled_token_count = 0
        self.turn_count = 0
        self._request_count = 0

    def submit(
        self,
        prompt: list[int],
        *,
        namespace: str = "",
        priority: int = 0,
        arrived_s: float = 0.0,
        deadline_s: float = math.inf,
        wish: CacheWish = NO_WISH,
        **sampling: int,
    ) -> Request:
        self._request_count += 1
        root = hashlib.sha256(namespace.encode()).digest()
        params = SamplingParams(**sampling)
        request = Request(self._request_count, "", prompt, params, namespace, root, arrived_s)
        request.priority, request.deadline_s, request.wish = priority, deadline_s, wish
        request.samples = [Sample(request, i, list(prompt), None, None) for i in range(params.n)]
        self.scheduler.roster.add(request.samples[0])
        return request

    def ask(self, plan: Plan) -> StepOutcome:
        """Applies a step as the allocator's server does."""
        message, reply = step_of(plan).message, packed.StepReply()
        self.commit_block_counts.append(len(message.commits.digests) // DIGEST_BYTES)
        step_apply.apply_step(self.pool, step_checks.check_step(self.pool, message), reply)
        invariants.check(self.pool)
        return read_reply(message, reply, len(self.groups))

    def turn(self, *, cancel_meanwhile: Request | None = None) -> None:
        self.turn_count += 1
        if not self.is_silent:
            self.take_in()
        if self._under_way is None:
            plan, outcome = self._plan()
            if cancel_meanwhile is not None:
                self.scheduler.roster.cancel(cancel_meanwhile)
            current = _Laid.of(self.scheduler.schedule(plan, outcome), self.scheduler.roster.block_size)
        else:
            current = self._under_way
            if cancel_meanwhile is not None:
                self.scheduler.roster.cancel(cancel_meanwhile)
        self.scheduler.roster.check_invariants()
        if self._asked is None:
            self._check_pool()
        if self._asks_ahead and self._asked is None:
            plan = self.scheduler.plan_ahead(current.batch.work, may_wait=self.may_wait)
            self.asks.append([(each.sample, each.token_count) for each in plan.grows])
            self._asked = plan, self.ask(plan)
        self._under_way = self._behind(current.batch.work) if self._is_pipelined and self._asks_ahead else None
        self._compute(current)

    def finish(self) -> None:
        """Computes the batches that were planned, and plans no further ones."""
        if self._under_way is not None:
            current, self._under_way = self._under_way, None
            self._compute(current)

    def _behind(self, work: list[Work]) -> _Laid | None:
        """Plans the next batch while one is computed, as the engine does."""
        if not self.is_silent:
            self.take_in()
        ready = self.scheduler.plan_without_asking(work)
        if self.scheduler.has_to_ask(ready):
            return None
        batch = self.scheduler.schedule(ready, NOTHING_ASKED, work)
        self.behind_count += bool(batch.work)
        return _Laid.of(batch, self.scheduler.roster.block_size) if batch.work else None

    def take_in(self) -> None:
        """Gives the answer of the outstanding step to the scheduler."""
        if self._asked is not None:
            self.scheduler.take_in(*self._asked)
            self.scheduler.roster.check_invariants()
            self._asked = None

    def _plan(self) -> tuple[Plan, StepOutcome]:
        """Makes a plan and sends it, as the engine does."""
        ready = self.scheduler.plan_without_asking() if self._asks_ahead else Plan(is_whole=False)
        if not self.scheduler.has_to_ask(ready):
            return ready, NOTHING_ASKED
        goes_on = self.is_silent and bool(ready.wanted)
        if self._asked is None:
            self.plan_count += 1
            plan = self.scheduler.plan(ready.chosen)
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
        """Checks that allocator and scheduler agree about the running samples."""
        for sample in self.scheduler.roster.running:
            if sample.fork_of is None:
                sequence = self.pool.sequences[sample.sequence_id]
                tables = [*map(list, self.pool.tables(sequence))]
                assert tables == [*map(list, sample.tables), *([block] for block in sample.states)]
                assert sequence.committed_token_count == sample.committed
                assert sequence.token_count == sample.granted

    def _compute(self, laid: _Laid) -> None:
        batch = laid.batch
        for move in batch.moves:
            if isinstance(move, Copy):
                self._fill(move.destination, *self._content(move.source))
            else:
                self.host |= {slot: self._content(block) for block, slot in zip(*move[1:], strict=True)}
        for slots, blocks in laid.restores:
            for slot, block in zip(slots, blocks, strict=True):
                self._fill(block, *self.host[slot])
        # A sample that ended with the previous token has no token here, so `STOP` stands for the token that the real
        # model would compute.
        tokens = [[*item.sample.tokens, STOP][: item.end] for item in batch.work]
        for item, tables, states, known in zip(batch.work, laid.tables, laid.states, tokens, strict=True):
            if not item.is_restored:
                self._write(item, tables, states, known)
        for item, tables, known in zip(batch.work, laid.tables, tokens, strict=True):
            self._read(item, tables, known)
        assert sum(item.token_count for item in batch.work) <= self.scheduler.batch_tokens_max
        complete = [item.sample for item in batch.work if item.is_complete and not item.sample.has_ended]
        self.scheduler.advance(batch.work)
        for sample in complete:
            self._extend(sample)
        self.scheduler.roster.check_invariants()

    def _content(self, block: int) -> tuple[dict[int, int], list[int] | None]:
        """Returns the contents of a page."""
        offsets = range(self.scheduler.roster.block_size)
        return {each: self.pages[block, each] for each in offsets if (block, each) in self.pages}, self.states.get(
            block
        )

    def _fill(self, block: int, tokens: dict[int, int], state: list[int] | None) -> None:
        """Writes contents that `_content` returned to a page."""
        self.pages |= {(block, offset): token for offset, token in tokens.items()}
        if state is not None:
            self.states[block] = state

    def _write(self, item: Work, tables: list[array[int]], states: list[int], known: list[int]) -> None:
        self.prefilled_token_count += item.token_count
        for position in range(item.start, item.end):
            block, offset = divmod(position, self.scheduler.roster.block_size)
            for table in tables:
                self.pages[table[block], offset] = known[position]
        for block in states:
            before = self.states.get(block) if item.start else []
            assert before == known[: item.start], f"a state of sample {item.sample.age} is not of its tokens"
            self.states[block] = known[: item.end]

    def _read(self, item: Work, tables: list[array[int]], known: list[int]) -> None:
        """Checks the tokens that `item` reads in each group, back to the start of the group's window."""
        size = self.scheduler.roster.block_size
        for table, group in zip(tables, self.scheduler.roster.groups, strict=True):
            first = group.first_read(item.start)
            content = [self.pages[table[position // size], position % size] for position in range(first, item.end)]
            assert content == known[first : item.end], f"sample {item.sample.age} reads another sequence's tokens"

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
                self.scheduler.roster.add_fork(sample)

    def run(self, *, turns_max: int = 5000) -> None:
        for _ in range(turns_max):
            if not self.scheduler.roster.has_work:
                self.finish()
                return
            self.turn()
        pytest.fail(f"still working after {turns_max} turns: {len(self.scheduler.roster.waiting)} wait")

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
    """Returns prompts of 20 tokens with texts that no stop token ends before `output_tokens`."""
    prompts = (numbers(20, seed=seed) for seed in range(1000))
    return [p for p in prompts if len(expected_output(p, 0, output_tokens, 10**6)[0]) == output_tokens][:count]
