"""Roster of a worker's samples: waiting ones, running ones, and ended ones that still hold blocks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

from quire.protocol.outcomes import Copy
from quire.session.lookahead import Increment, give_back
from quire.types import GroupKind, GroupSpec

from quire_worker.scheduling import room_ahead
from quire_worker.scheduling.backfill import held_count, own_block_count
from quire_worker.scheduling.displacing import displaced_by_head
from quire_worker.scheduling.order import Shares, WaitingQueue, rank_of
from quire_worker.scheduling.pace import Pace
from quire_worker.scheduling.plan import Plan, Work
from quire_worker.scheduling.request import FinishReason, Request, Sample
from quire_worker.scheduling.resting import Resting
from quire_worker.scheduling.swap import SwapOut, SwapSpace, can_swap


class Roster:
    """Samples of one worker, each in one place.

    Args:
        groups: of the pool: of attention, with blocks of one size, then of states.
        swap_slot_count: blocks of preempted samples that fit into host memory.

    Attributes:
        waiting: in the order of `order.py`, fair between namespaces.
        running: in the order of `order.py`; backfilled samples are the last.
        shares: what each namespace has been served.
        resting: of branches that nothing is asked of.
        leaving: ended; committed once more and freed with the next step.
        to_free: sequences of samples that live on without them.
        pace: of this worker's passes.
        swap: host memory for pages of preempted samples.
        moves: pages to be copied before the next batch, in order.
        preemption_count: how often a sample that ran had to wait again.
        recomputed_token_count: tokens that were computed again after that.
        backfilled_count: how often one passed a head.
        yield_count: how often such a one was preempted in the step in which others got its blocks.
        noted: requests whose blocks were counted since the last pass, because a sample of theirs ended.
        preempted: requests of samples that were preempted; whoever has the time takes them out.
    """

    def __init__(self, groups: Sequence[GroupSpec], swap_slot_count: int = 0) -> None:
        """Begins without samples.

        Raises:
            ValueError: blocks have several sizes.
        """
        attention = tuple(group for group in groups if group.kind is not GroupKind.STATE)
        sizes = {group.block_size for group in attention}
        if len(sizes) != 1:
            raise ValueError(f"blocks of one size are scheduled, not of {sorted(sizes)} tokens")
        self.groups = attention
        self.has_states = len(attention) < len(groups)
        self.block_size = sizes.pop()
        self.shares = Shares()
        self.waiting = WaitingQueue(self.shares)
        self.running: list[Sample] = []
        self.resting = Resting()
        self.leaving: list[Sample] = []
        self.to_free: list[int] = []
        windows = [group for group in attention if group.kind is not GroupKind.FULL_ATTENTION]
        self.pace = Pace()
        self.swap = SwapSpace(swap_slot_count if can_swap(self.has_states, windows) else 0, self.pace)
        self.moves: list[Copy | SwapOut] = []
        self.preemption_count = 0
        self.recomputed_token_count = 0
        self.backfilled_count = 0
        self.yield_count = 0
        self.preempted: list[Request] = []
        self.noted: set[Request] = set()

    @property
    def group_count(self) -> int:
        """Counts the block tables of each sample."""
        return len(self.groups)

    @property
    def has_work(self) -> bool:
        """Tells whether another turn has anything to do."""
        has_to_say = self.leaving or self.to_free or self.resting.settling or self.resting.forking
        return bool(self.waiting or self.running or has_to_say)

    @property
    def may_go_on(self) -> bool:
        """Tells whether some running sample has something to compute, and no sample has to be forked first."""
        return not self.resting.forking and not all(sample.awaits_choice for sample in self.running)

    def parents(self) -> set[Sample | None]:
        """Returns the samples whose forks have no share of their blocks yet."""
        return {sample.fork_of for sample in (*self.running, *self.resting.forking)}

    def holders(self) -> tuple[Sample, ...]:
        """Returns all samples that have a sequence, or get one with the step under way."""
        return (*self.running, *self.leaving, *self.resting, *self.resting.forking)

    def add(self, sample: Sample) -> None:
        """Adds a sample to the queue. Hashes its prompt here, while a forward pass may be running, so that its
        admission between two passes need not."""
        sample.digests(self.block_size, 0, (len(sample.tokens) - 1) // self.block_size)
        self.waiting.add(sample)

    def add_fork(self, child: Sample) -> None:
        """Adds a sample that shares its parent's blocks with the next step."""
        insort(self.running, child, key=rank_of)

    def start(self, sample: Sample, passed: Sample | None = None) -> None:
        """Makes an admitted sample run, backfilled if the head that it `passed` is still waiting. Samples that passed
        this one no longer count as backfilled."""
        self.waiting.remove(sample)
        self._let_down(sample)
        sample.passed = passed if passed in self.waiting else None
        self.backfilled_count += sample.passed is not None
        insort(self.running, sample, key=rank_of)

    def backfilled_apart(self) -> tuple[list[Sample], list[Sample]]:
        """Returns the running samples: first the ordinary ones, then the backfilled ones whose head still waits."""
        count = sum(sample.passed is not None for sample in self.running)
        return self.running[: len(self.running) - count], self.running[len(self.running) - count :]

    def finish(self, sample: Sample, reason: FinishReason | None) -> None:
        """Ends a sample; its blocks are freed with the next step."""
        if sample.has_ended:
            return
        if sample.request not in self.noted:  # once a pass, as the samples of a request often end together
            self.noted.add(sample.request)
            sample.request.trace.note_blocks(sample.request.block_count)
        sample.request.usage.unshared_block_count += self.group_count * -(-sample.computed // self.block_size)
        self._end(sample, reason)

    def prune(self, sample: Sample) -> None:
        """Ends a beam that was not chosen; its blocks are freed with the next step, and its request continues."""
        self._end(sample, None)

    def _end(self, sample: Sample, reason: FinishReason | None) -> None:
        sample.has_ended = True
        sample.finish_reason = reason
        self._uncount_ahead(sample)
        self.swap.release(sample)
        if sample in self.running:
            self.running.remove(sample)
            if sample.rests and reason is not None and not self._is_beyond(sample, reason):
                self.resting.add(sample)
            elif sample.sequence_id:
                self.leaving.append(sample)
        else:
            self.leave_queue(sample)
            self.resting.remove(sample)

    def _is_beyond(self, sample: Sample, reason: FinishReason) -> bool:
        """Tells whether a sample's states may be a token further than a branch of its tokens begins: they hold what
        its text was stopped with, or that is being computed, and they cannot step back."""
        return self.has_states and sample.draws and reason is FinishReason.STOP

    def _let_down(self, head: Sample) -> None:
        """Notes that a sample waits no more, so that no other one has passed it."""
        passed = [each for each in (*self.running, *self.waiting.in_any_order()) if each.passed is head]
        for sample in passed:
            sample.passed = None
        if passed:
            self.running.sort(key=rank_of)

    def leave_queue(self, sample: Sample) -> None:
        """Takes out a beam that waits to be computed again and need not be; one that does not wait is no error."""
        if sample in self.waiting:
            self.waiting.remove(sample)
            self._let_down(sample)

    def stop(self, sample: Sample) -> None:
        """Ends a sample because its text has come to its end, be it with the last token that it may have."""
        self.finish(sample, FinishReason.STOP)
        sample.finish_reason = FinishReason.STOP

    def cancel(self, request: Request) -> None:
        """Ends every sample of the request."""
        for sample in request.samples:
            self.finish(sample, None)

    def forget_blocks(self) -> None:
        """Makes all running samples wait, because the allocator's state is gone."""
        running, self.running = [*self.running, *self.resting.take_forks()], []
        self.resting.clear()
        self.moves.clear()
        for sample in (*running, *self.waiting.in_any_order()):
            self.swap.release(sample)  # it is not known which blocks were moved
        for sample in running:
            sample.request.trace.note_blocks(sample.request.block_count)
            self._uncount_ahead(sample)
            sample.forget_blocks()
            sample.passed = None
            self._wait(sample)
        self.leaving.clear()
        self.to_free.clear()

    def preempt_last(self) -> Sample:
        """Makes the last running sample wait, to be computed again, and returns it. Its blocks are freed with the next
        step."""
        victim = self.running[-1]
        self.to_free.append(victim.sequence_id)
        self._preempt(victim)
        return victim

    def displaced(self) -> Sample | None:
        """Returns the sample that makes way for the head of the queue; see `displacing.py`."""
        return displaced_by_head(self.waiting, self.running)

    def preempt_displaced(self) -> set[Sample]:
        """Preempts the `displaced` sample, if there is one, as `preempt_last` does, and returns it."""
        victim = self.displaced()
        if victim is None:
            return set()
        self.to_free.append(victim.sequence_id)
        self._preempt(victim)
        return {victim}

    def make_way(self) -> None:
        """Preempts the last beam if all running samples only await the choice of beams, so that waiting samples can be
        admitted. Called when nothing is being computed."""
        are_idle = bool(self.running) and all(sample.awaits_choice for sample in self.running)
        if are_idle and self.waiting and not self.to_free:
            self.preempt_last()

    def make_room(self, plan: Plan) -> None:
        """Makes the victims of a plan wait; others get their blocks in its step. Called when no answer is on its way.
        Commits of the plan may name the victims."""
        self.yield_count += len(plan.victims)
        for victim in plan.victims:
            plan.frees.append(victim.sequence_id)
            self._preempt(victim)

    def _preempt(self, victim: Sample) -> None:
        self.running.remove(victim)
        self.preemption_count += 1
        victim.lost = max(victim.lost, victim.computed)
        victim.request.usage.preemption_count += 1
        victim.request.trace.note_blocks(victim.request.block_count)
        self.preempted.append(victim.request)
        self._uncount_ahead(victim)
        if victim.swapped is None and self.swap.slot_count and not victim.awaits_choice:
            digests = victim.digests(self.block_size, 0, victim.computed // self.block_size)
            shared = held_count(digests, self.running, self.block_size) * self.block_size
            swap_out = self.swap.swap_out(victim, shared, self.block_size)
            self.moves += [swap_out] if swap_out is not None else []
        victim.forget_blocks()
        self._wait(victim)

    def _wait(self, sample: Sample) -> None:
        """Adds a sample that holds no blocks any more to the queue, unless it has nothing to compute."""
        if not sample.awaits_choice:
            self.waiting.add(sample)

    def begin_outgrown_again(self, plan: Plan) -> None:
        """Makes samples wait that grew beyond the length that their keys are rotated for: they are computed again from
        their first token, as if they had begun with all that they have. Called when no answer is on its way; `plan`,
        whose commits may name them, frees them. Frees come before forks, so parents and forks of it stay a turn."""
        forking = {sample for fork in plan.forks for sample in (fork.parent, fork.child)}
        for sample in [each for each in self.running if each.is_outgrown and each not in forking]:
            self.running.remove(sample)
            plan.frees.append(sample.sequence_id)
            self._uncount_ahead(sample)
            self.swap.release(sample)
            sample.begin_again()
            self.add(sample)

    def observe(self, work: Iterable[Work], seconds: float, swapped_block_count: int, swap_s: float) -> None:
        """Measures a pass that took so many seconds, and what was swapped in it."""
        token_count = sum(item.token_count for item in work if not item.is_restored)
        self.pace.observe(token_count, seconds - swap_s)
        self.swap.cost.block_count += swapped_block_count
        self.swap.cost.seconds += swap_s

    def note_computed(self, work: Work) -> None:
        """Counts tokens computed again after a preemption, and what was restored: frees its slots once that is all."""
        sample = work.sample
        if not work.is_restored and work.start < sample.lost:
            self.recomputed_token_count += min(work.end, sample.lost) - work.start
        if work.is_restored and sample.swapped is not None:
            blocks = -(-work.end // self.block_size) - work.start // self.block_size
            self.swap.in_count += blocks * self.group_count + len(sample.states)
            if sample.computed >= sample.swapped.end:
                self.swap.release(sample)

    def free_count_of(self, left: Sequence[Sample]) -> int:
        """Counts the blocks that become free with samples that left: the blocks that they hold ahead and, if samples
        wait, all blocks that no other sample holds."""
        ahead = sum(room_ahead.block_count_of(sample, self.block_size) for sample in left)
        others = (*self.running, *self.resting)
        own = own_block_count(left, others, self.block_size) if left and self.waiting else 0
        return ahead + own

    def spare_block_count(self) -> int:
        """Counts the blocks that a step can give to others: held ahead, by left samples, or by branches alone."""
        parents = self.parents()
        stay = [*self.running, *(each for each in self.leaving if each in parents)]
        ahead = sum(room_ahead.block_count_of(sample, self.block_size) for sample in stay)
        free_count = self.free_count_of([sample for sample in self.leaving if sample not in parents])
        return ahead + free_count + self.resting.alone_held_count(stay, self.group_count)

    def uncommitted_block_count(self) -> int:
        """Counts the blocks that the next commit publishes."""
        return sum(
            sample.computed // self.block_size - sample.committed // self.block_size
            for sample in (*self.running, *self.leaving, *self.resting.settling)
        )

    def take_filled(self) -> dict[Sample, list[bytes]]:
        """Returns the samples that filled blocks since the last commit, and the blocks' digests. Includes parents of
        forks, because forks share only committed tokens. From now on all these tokens count as committed."""
        parents = self.parents()
        filled = {}
        for sample in (*self.running, *self.leaving, *self.resting.to_commit()):
            first, end = sample.committed // self.block_size, sample.computed // self.block_size
            if sample.sequence_id and (end > first or (sample in parents and sample.computed > sample.committed)):
                filled[sample] = sample.digests(self.block_size, first, end)
                sample.committed = sample.computed
        return filled

    def given_back(self, block_count: int, increment: Increment) -> dict[Sample, int]:
        """Returns the samples that give back so many blocks held ahead, and the tokens that each keeps room for. The
        state of an ended sample may be a token further than its commit: with room behind it is no checkpoint."""
        if block_count <= 0:
            return {}
        samples = self.running + ([] if self.has_states else self.leaving)
        holders = [(sample, sample.granted, len(sample.tokens)) for sample in samples]
        return give_back(holders, block_count, increment)

    # -- branches ------------------------------------------------------------------------------------------------------

    def wake(self, sample: Sample, request: Request, tokens: list[int], *, draws: bool) -> None:
        """Makes a resting sample run on, for a request: `tokens` begin with all that it has computed. The request pays
        for room ahead that the one before has not given back, as what it does not use is taken out of its usage."""
        request.usage.granted_block_count += self.group_count * room_ahead.block_count_of(sample, self.block_size)
        self.resting.wake(sample, request, tokens, draws=draws)
        self.shares.charge(request.namespace, prompt_tokens=len(tokens) - sample.computed)
        insort(self.running, sample, key=rank_of)

    def forks_due(self, running_max: int) -> list[tuple[Sample, Sample]]:
        """Makes children of resting samples run as far as there are places, and returns all children to be forked now,
        with their parents."""
        for child in self.resting.take_forks(running_max - len(self.running)):
            self.shares.charge(child.request.namespace, prompt_tokens=len(child.tokens) - child.computed)
            self.add_fork(child)
        resting = [child for child in self.resting.forking if child.rests]
        return [(child, child.fork_of) for child in (*self.running, *resting) if child.fork_of is not None]

    def take_back_resting(self, plan: Plan, block_count: int) -> None:
        """Frees resting samples with the step of this plan, as many as hold so many blocks alone."""
        if block_count > 0:
            for sample in self.resting.chosen(block_count, (*self.running, *self.leaving), self.parents()):
                self.resting.remove(sample)
                plan.frees.append(sample.sequence_id)

    def drop(self, sample: Sample) -> None:
        """Takes the blocks of a resting sample back with the next step; one that rests no more is no error."""
        if sample in self.resting:
            self.resting.remove(sample)
            self.leaving.append(sample)

    def drop_resting(self, block_count: int) -> bool:
        """Drops resting samples that hold so many blocks alone; tells whether there were any."""
        chosen = self.resting.chosen(block_count, (*self.running, *self.leaving), self.parents())
        for sample in chosen:
            self.drop(sample)
        return bool(chosen)

    def block_count_beyond(self, kept: Mapping[Sample, int]) -> int:
        """Counts the blocks of each group beyond the room that samples keep."""
        return sum(sample.table_length + -count // self.block_size for sample, count in kept.items())

    # -- counting ------------------------------------------------------------------------------------------------------

    def _uncount_ahead(self, sample: Sample) -> None:
        """Takes blocks that a sample held ahead and never used out of its request's usage."""
        ahead = room_ahead.block_count_of(sample, self.block_size)
        sample.request.usage.granted_block_count -= self.group_count * ahead

    def check_invariants(self) -> None:
        """Checks that each sample has valid counters, is in one place only, and has its grants in its tables.

        Raises:
            AssertionError: naming what is broken.
        """
        assert self.running == sorted(self.running, key=rank_of), "running is out of order"
        for sample in self.running:
            assert sample.passed is None or sample.passed in self.waiting, f"{sample.age} has passed nobody who waits"
        assert not set(self.waiting) & set(self.running), "a sample waits and runs"
        for sample in (*self.running, *self.resting):
            sample.check_invariants(self.block_size)
        assert not set(self.resting) & {*self.waiting, *self.running, *self.leaving}, "a sample rests and does not"
        assert set(self.resting.settling) <= set(self.resting), "a sample settles that does not rest"
        for sample in self.waiting:
            assert not sample.sequence_id, f"{sample.age} waits with blocks"
            assert not sample.tables, f"{sample.age} waits with blocks"
