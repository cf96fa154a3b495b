"""Continuous batching: chooses the tokens that go through the model next, and the requests to the allocator.

Pure: no torch, grpc, clock or randomness. One turn of the engine:

    1. plan       what to commit, free, fork and grow, as one step for the allocator: first running samples, in order,
                  then waiting samples, as far as the token budget reaches. The budget cuts prompts into chunks
    2. schedule   takes the allocator's answer. Samples that got their blocks form the batch. If a running sample got
                  none, the last running sample is preempted. Its blocks are free for the next turn. While the batch is
                  computed, `plan_ahead` asks for blocks and admissions of the next turns. A turn then finds its blocks
                  granted, and `plan_without_asking` plans it. It also plans turns while an answer is late; `take_in`
                  applies the answer later
    3. advance    counts the computed tokens of the batch
    4. extend     adds sampled tokens; `finish` records why a sample ends

If a group has a window, a prompt is granted chunk by chunk: blocks that fall out of one chunk's window serve the next.
Tables of all groups grow equally, so block counts here are per group: "a block" is one block of each group.

Order never changes (`order.py`): the first sample is asked for first and preempted last, so it always makes progress.
`admission.py` decides which samples are admitted, `passes.py` where a pass over a prompt ends, and
`quire.session.lookahead` how many blocks are asked for ahead. `roster.py` keeps the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.protocol.outcomes import Result, StepOutcome
from quire.session.lookahead import Decoding, Increment, needs_of
from quire.types import GroupKind, GroupSpec

from quire_worker.scheduling import room_ahead
from quire_worker.scheduling.admission import Applicants, Peaks, TurnLimits
from quire_worker.scheduling.backfill import own_block_count
from quire_worker.scheduling.drafts import Drafting, with_drafts
from quire_worker.scheduling.granted import REFUSED, take_commits, take_grow, work_of
from quire_worker.scheduling.output import FinishReason
from quire_worker.scheduling.passes import pass_token_count, standing, to_cut
from quire_worker.scheduling.plan import Batch, Committing, Entering, Forking, Growing, Plan, Round, Work
from quire_worker.scheduling.ready import ready_after
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.roster import Roster


class Scheduler:
    """Schedules the samples of one worker.

    Args:
        groups: the pool's groups: first attention, with blocks of one size, then states.
        sequence_tokens_max: the longest sequence that the model and the pool can hold.
        batch_tokens_max: tokens per forward pass.
        running_max: the most samples that run at a time.
        ahead_tokens: for how many tokens beyond its next token a decoding sample asks for blocks.
        digest_bytes_max: the most bytes of digests for new sequences in one step.
        commit_blocks_max: the most committed blocks in one step, at least those of a forward pass. While the allocator
            is down, samples compute at most this far.
        swap_slot_count: the number of blocks of preempted samples that fit into host memory.
        drafting: makes drafts; None without them. Models with states have none, because states cannot step back.
    """

    def __init__(
        self,
        *,
        groups: Sequence[GroupSpec],
        sequence_tokens_max: int,
        batch_tokens_max: int,
        running_max: int,
        ahead_tokens: int = 0,
        digest_bytes_max: int = 512 << 10,
        commit_blocks_max: int = 10 << 10,
        swap_slot_count: int = 0,
        drafting: Drafting | None = None,
    ) -> None:
        self.roster = Roster(groups, swap_slot_count)  # all samples of the worker
        self.sequence_tokens_max = sequence_tokens_max
        self.batch_tokens_max = batch_tokens_max
        self.running_max = running_max
        self.ahead_tokens = ahead_tokens
        self.drafting = drafting
        self.digest_bytes_max = digest_bytes_max
        self.commit_blocks_max = commit_blocks_max
        self._increment = Increment.of(self.roster.block_size)
        self._peaks = Peaks(groups, batch_tokens_max)
        self._has_windows = any(group.kind is not GroupKind.FULL_ATTENTION for group in self.roster.groups)
        self._last_sequence_id = 0
        self._free_block_count: int | None = None

    # -- one turn ------------------------------------------------------------------------------------------------------

    def plan(self, chosen: Round | None = None) -> Plan:
        """Plans the requests to the allocator: for running samples in order, then admitted, then backfilled samples.

        Args:
            chosen: admissions that `has_to_ask` has found in the same turn. They are chosen again only if blocks were
                given back since then.
        """
        plan, filled = Plan(), self.roster.take_filled()
        cut = self._cut(filled)
        self._fork(plan)
        freed = self._free(plan)
        first, backfilled = self.roster.backfilled_apart()
        budget, taken = self._want(plan, first, self.batch_tokens_max)
        room = self.room()
        spare = None if room is None else room + freed - taken
        if spare is not None and spare < 0:
            spare += self._take_back(plan, backfilled, -spare)
        if chosen is None or cut:
            chosen = self._choose(budget, spare, without=plan.victims)
        plan.victims += chosen.victims
        admitted = self._admit(plan, chosen)
        left = [sample for sample in backfilled if sample not in plan.victims]
        _, taken_last = self._want(
            plan, left, budget - sum(each.token_count for each in chosen.admissions), room=(spare or 0) - admitted
        )
        missing = taken + taken_last + admitted - (self._free_block_count or 0) - freed
        given_back = self.roster.given_back(missing, self._increment)
        self.roster.take_back_resting(plan, missing - self.roster.block_count_beyond(given_back))
        self._commit(plan, filled, {**cut, **given_back})
        self.roster.make_room(plan)
        self.roster.begin_outgrown_again(plan)
        plan.is_unfair = budget > 0 and not plan.to_admit and self.roster.displaced() is not None
        return plan

    def plan_without_asking(self, under_way: Sequence[Work] = ()) -> Plan:
        """Plans a turn of samples that already have all their blocks; see `ready.py`.

        Args:
            under_way: work that is being computed before this turn.
        """
        # most blocks that one pass can fill
        filled_max = self.batch_tokens_max // self.roster.block_size + len(self.roster.running)
        pass_count = 2 if under_way else 1
        if self.roster.uncommitted_block_count() + pass_count * filled_max > self.commit_blocks_max:
            return Plan(is_whole=False)
        return ready_after(
            under_way, self.roster, self.drafting, budget=self.batch_tokens_max, longest=self.sequence_tokens_max
        )

    def has_to_ask(self, ready: Plan) -> bool:
        """Returns whether a `ready` turn leaves out a sample that runs or could be admitted. Stores the admissions in
        `ready`. Changes nothing else except caches of digests."""
        if not ready.is_whole or (ready.tokens_left > 0 and self.roster.displaced() is not None):
            return True
        if not self._can_admit(ready.tokens_left):
            return False
        ready.chosen = self._choose(ready.tokens_left, self.room())
        return bool(ready.chosen.admissions)

    def plan_ahead(self, work: Sequence[Work], *, may_wait: bool = False) -> Plan:
        """Plans the requests during `work`: commits of earlier passes, frees, blocks for next tokens, and admissions.

        Admits only samples that need no blocks from other samples, and share nothing that is being computed.

        Args:
            work: the work of the pass under way.
            may_wait: whether to ask for nothing if there are only commits and frees.
        """
        plan = Plan()
        samples = room_ahead.going_on(work, self.sequence_tokens_max)
        budget = max(0, self.batch_tokens_max - room_ahead.tokens_after(self.roster.running, work, samples))
        needs = self._needs_of(samples, self._free_block_count or 0)
        chunks = room_ahead.next_chunks(self.roster.running, work, self.batch_tokens_max, self.roster.block_size)
        if may_wait and not needs and not chunks and not self._can_admit(budget):
            return plan
        filled = self.roster.take_filled()
        self._commit(plan, filled, self._cut(filled))
        free = (self._free_block_count or 0) + self._free(plan)
        for sample, token_count in chunks:
            needed = room_ahead.grow_block_count(sample, token_count, self.roster.block_size)
            if needed <= free:
                free -= needed
                plan.grows.append(Growing(sample, sample.sequence_id, token_count))
        chosen = self._choose(budget, free - sum(each.lacks_room for each in samples), may_preempt=False)
        for sample, token_count in self._needs_of(samples, free - sum(each.block_count for each in chosen.admissions)):
            plan.grows.append(Growing(sample, sample.sequence_id, token_count))
        self._admit(plan, chosen)
        return plan

    def schedule(self, plan: Plan, outcome: StepOutcome, under_way: Sequence[Work] = ()) -> Batch:
        """Applies the allocator's answer, and returns the batch to run after the work under way.

        Raises:
            AssertionError: the allocator and this scheduler disagree about which sequences live.
        """
        denied = self.take_in(plan, outcome)
        rows = zip(plan.grows, outcome.grows, strict=True)
        squeezed = {growing.sample for growing, grown in rows if grown.result is Result.PASS_TOO_LONG}
        lacking = {sample for sample in denied - squeezed if not sample.has_ended}
        is_helped = bool(lacking) and self.roster.drop_resting(1)
        if not is_helped and lacking - plan.to_admit:
            denied.add(self.roster.preempt_last())
        elif plan.is_unfair:
            denied |= self.roster.preempt_displaced()
        work = work_of(plan, denied, under_way)
        if self.drafting is not None and not under_way:
            work = with_drafts(work, self.drafting, budget=self.batch_tokens_max, longest=self.sequence_tokens_max)
        if not work:  # Moves wait for the next batch.
            self.roster.make_way()
            return Batch([], [])
        moves, self.roster.moves = self.roster.moves, []
        return Batch(moves, work)

    def take_in(self, plan: Plan, outcome: StepOutcome) -> set[Sample]:
        """Applies the answer to any plan. Moves wait for the next batch. Returns the samples that got no blocks: they
        ask again when they need blocks.

        Raises:
            AssertionError: the allocator and this scheduler disagree about which sequences live.
        """
        if plan.has_to_be_sent:
            self._free_block_count = outcome.free_block_count // self.roster.group_count
        take_commits(self.roster, plan, outcome)
        for fork in plan.forks:
            fork.child.take_blocks_of(fork.parent, self.roster.block_size)
            fork.child.request.trace.note_sequence(fork.child_id)
        self.roster.resting.take_shares(fork.child for fork in plan.forks)
        self.roster.moves += outcome.copies
        return {
            growing.sample
            for growing, grown in zip(plan.grows, outcome.grows, strict=True)
            if not take_grow(self.roster, growing, grown)
        }

    @staticmethod
    def refused(plan: Plan, outcome: StepOutcome) -> list[tuple[Request, Result]]:
        """Returns the requests that the allocator refuses: FORBIDDEN, QUOTA, or a result that is unknown here. They
        must end before the answer is taken in."""
        rows = zip(plan.grows, outcome.grows, strict=True)
        return [
            (growing.sample.request, grown.result)
            for growing, grown in rows
            if grown.result in REFUSED or not grown.result.is_known
        ]

    def advance(self, work: Iterable[Work]) -> None:
        """Counts the computed tokens of the batch. The position of a dropped token does not count, because the sample
        had ended with an earlier token. Resting samples keep their counts."""
        self.roster.noted.clear()
        for item in work:
            if item.sample not in self.roster.resting:
                item.sample.computed = min(item.end, len(item.sample.tokens))
            self.roster.note_computed(item)

    def extend(self, sample: Sample, token: int, *, is_stop: bool) -> None:
        """Adds a sampled token. A stop token ends the sample and is not kept. The longest length also ends it."""
        if is_stop:
            self.roster.finish(sample, FinishReason.STOP)
            return
        sample.tokens.append(token)
        sample.request.usage.output_token_count += 1
        self.roster.shares.charge(sample.request.namespace, output_tokens=1)
        longest = len(sample.tokens) >= self.sequence_tokens_max
        if longest or sample.output_token_count >= sample.request.sampling.max_tokens:
            self.roster.finish(sample, FinishReason.LENGTH)

    # -- the allocator's state is gone ---------------------------------------------------------------------------------

    def forget_blocks(self) -> None:
        """Makes all running samples wait to be computed again."""
        self.roster.forget_blocks()
        self._free_block_count = None

    def give_everything_back(self, plan: Plan) -> None:
        """Frees all sequences with the next step, because the allocator refused the step of this plan."""
        held = [sample.sequence_id for sample in self.roster.holders() if sample.sequence_id]
        self.forget_blocks()
        self.roster.to_free = sorted({*held, *plan.frees})

    # -- parts of a plan -----------------------------------------------------------------------------------------------

    def _commit(self, plan: Plan, filled: dict[Sample, list[bytes]], kept: dict[Sample, int]) -> None:
        """Commits samples that filled a block, and samples that give blocks back and keep `kept` tokens' capacity."""
        plan.commits = [
            Committing(sample, sample.sequence_id, sample.computed, filled.get(sample, ()), kept.get(sample, 0))
            for sample in {**filled, **kept}
        ]
        for sample, token_count in kept.items():
            self._keep(sample, token_count)
            sample.committed = sample.computed

    def _keep(self, sample: Sample, token_count: int) -> None:
        """Limits a sample's capacity to `token_count` tokens, and drops the blocks behind them."""
        end = -(-token_count // self.roster.block_size)
        if not sample.has_ended:  # The usage of an ended sample no longer includes its blocks.
            sample.request.usage.granted_block_count -= self.roster.group_count * (sample.table_length - end)
        for table in sample.tables:
            del table[end:]
        sample.granted = token_count

    def _cut(self, filled: dict[Sample, list[bytes]]) -> dict[Sample, int]:
        """Returns the samples that give back all blocks behind their computed tokens: they came to rest, or their state
        becomes a checkpoint or is shared."""
        cut = self.roster.resting.settled(self.roster.block_size, has_states=self.roster.has_states)
        if self.roster.has_states:
            cut += to_cut((*self.roster.running, *self.roster.leaving), filled, self.roster.parents())
        for sample in cut:
            self._keep(sample, sample.computed)
        return {sample: sample.computed for sample in cut}

    def _fork(self, plan: Plan) -> None:
        for child, parent in self.roster.forks_due(self.running_max):
            child.sequence_id = self._new_sequence_id()
            plan.forks.append(Forking(parent, child, parent.sequence_id, child.sequence_id))

    def _free(self, plan: Plan) -> int:
        """Frees ended samples. Returns the number of blocks that become free at once. Parents of forks stay for another
        step, because frees come before forks."""
        parents, leaving = self.roster.parents(), self.roster.leaving
        left, self.roster.leaving = (
            [sample for sample in leaving if sample not in parents],
            [sample for sample in leaving if sample in parents],
        )
        plan.frees += [sample.sequence_id for sample in left]
        plan.note_wishes(left, self.roster.block_size)
        plan.frees += self.roster.to_free
        self.roster.to_free.clear()
        return self.roster.free_count_of(left)

    def _want(self, plan: Plan, samples: Iterable[Sample], budget: int, *, room: int | None = None) -> tuple[int, int]:
        """Plans the next tokens of running samples, and asks for their blocks, within `room` if it is given. Returns
        the remaining budget, and the number of blocks asked for."""
        taken = 0
        for sample in samples:
            if sample.is_outgrown or sample.awaits_choice:
                continue
            token_count = pass_token_count(sample, standing(sample, None), budget)
            if token_count == 0:
                break
            if sample.computed + token_count > sample.granted:
                end = self._round_up(sample.computed + token_count)
                needed = room_ahead.grow_block_count(sample, end, self.roster.block_size)
                if room is not None and taken + needed > room:
                    continue
                taken += needed
                plan.grows.append(Growing(sample, sample.sequence_id, end))
            budget -= token_count
            plan.wanted.append((sample, token_count))
        return budget, taken

    def _take_back(self, plan: Plan, backfilled: Sequence[Sample], block_count: int) -> int:
        """Preempts backfilled samples, the last first, until `block_count` blocks are free. Returns how many are."""
        own = 0
        for sample in reversed(backfilled):
            if own >= block_count:
                break
            plan.victims.append(sample)
            others = [*(each for each in self.roster.running if each not in plan.victims), *self.roster.resting]
            own = own_block_count(plan.victims, others, self.roster.block_size)
        return own

    def _can_admit(self, budget: int) -> bool:
        first, _ = self.roster.backfilled_apart()
        return bool(self.roster.waiting) and budget > 0 and len(first) < self.running_max

    def room(self) -> int | None:
        """Returns the number of blocks that are free, or can be taken: blocks held ahead, of ended samples, or only of
        branches. None while the allocator has not reported its free blocks."""
        return None if self._free_block_count is None else self._free_block_count + self.roster.spare_block_count()

    def _needs_of(self, samples: Sequence[Decoding[Sample]], free_block_count: int) -> list[tuple[Sample, int]]:
        return needs_of(samples, free_block_count, ahead_tokens=self.ahead_tokens, increment=self._increment)

    def _choose(
        self, budget: int, free_block_count: int | None, *, may_preempt: bool = True, without: Sequence[Sample] = ()
    ) -> Round:
        applicants = self.applicants(budget, free_block_count, without)
        return applicants.consider(self.roster.waiting.in_turn(), may_preempt=may_preempt)

    def applicants(self, budget: int, free_block_count: int | None, without: Sequence[Sample] = ()) -> Applicants:
        """Returns the chooser of admissions, with a budget of tokens and the number of free blocks."""
        running = [sample for sample in self.roster.running if sample not in without]
        limits = TurnLimits(budget, self.running_max - len(running), free_block_count, self.digest_bytes_max)
        return Applicants(
            running,
            limits,
            block_size=self.roster.block_size,
            peaks=self._peaks,
            sequence_tokens_max=self.sequence_tokens_max,
            resting=self.roster.resting,
        )

    def _admit(self, plan: Plan, chosen: Round) -> int:
        """Admits the chosen samples. Returns the most blocks that they take, beyond their victims'."""
        block_count = -chosen.victim_block_count
        for sample, token_count, needed, digests, passed in chosen.admissions:
            prompt, request = self._round_up(len(sample.tokens)), sample.request
            at_once = sample.pass_token_count_max or (self.batch_tokens_max if self._has_windows else prompt)
            capacity = min(prompt, self._round_up(at_once))
            entering = Entering(digests, prompt if capacity < prompt else 0, request.admitted, passed)
            plan.grows.append(Growing(sample, self._new_sequence_id(), capacity, entering))
            plan.wanted.append((sample, token_count))
            block_count += needed
        return block_count

    def _round_up(self, token_count: int) -> int:
        return -(-token_count // self.roster.block_size) * self.roster.block_size

    def _new_sequence_id(self) -> int:
        self._last_sequence_id += 1
        return self._last_sequence_id
