"""Roster of a worker's samples: waiting, running and resting samples, and ended samples that still hold blocks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.protocol.outcomes import Copy
from quire.session.lookahead import Increment, give_back
from quire.types import GroupKind, GroupSpec

from quire_worker.scheduling import room_ahead
from quire_worker.scheduling.backfill import held_count, own_block_count
from quire_worker.scheduling.displacing import displaced_by_head
from quire_worker.scheduling.order import Shares, WaitingQueue, rank_of
from quire_worker.scheduling.output import FinishReason
from quire_worker.scheduling.pace import Pace
from quire_worker.scheduling.plan import Plan, Work
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.resting import Resting
from quire_worker.scheduling.swap import SwapOut, SwapSpace, can_swap


class Roster:
    """The samples of one worker. Each sample is in one list.

    Args:
        groups: the pool's groups: first attention, with blocks of one size, then states.
        swap_slot_count: the number of blocks of preempted samples that fit into host memory.

    Attributes:
        waiting: waiting samples, in the order of `order.py`, fair between namespaces.
        running: running samples, in the order of `order.py`, backfilled samples last.
        shares: the service that each namespace has received.
        resting: samples of branches that no call uses.
        leaving: ended samples; the next step commits them once more, and frees them.
        to_free: sequences that samples have lost, but the allocator still has.
        pace: the speed of this worker's passes.
        swap: host memory for pages of preempted samples.
        moves: pages to copy before the next batch, in order.
        preemption_count: how many times a running sample was preempted.
        recomputed_token_count: number of tokens that were computed again after preemptions.
        backfilled_count: how many times a sample passed a head.
        yield_count: how many times a backfilled sample was preempted in favor of other samples, in the same step.
        on_filled: called with a sample and the range of its blocks that are full and about to be committed.
        noted: requests whose blocks were already counted since the last pass, because one of their samples ended.
        preempted: requests with preempted samples; `Reception.note_admitted` clears the list.
    """

    def __init__(self, groups: Sequence[GroupSpec], swap_slot_count: int = 0) -> None:
        """Starts without samples.

        Raises:
            ValueError: attention groups have blocks of several sizes.
        """
        attention = tuple(group for group in groups if group.kind is not GroupKind.STATE)
        sizes = {group.block_size for group in attention}
        if len(sizes) != 1:
            raise ValueError(f"all blocks must have the same number of tokens, not {sorted(sizes)}")
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
        self.on_filled: Callable[[Sample, int, int], None] = lambda _sample, _first, _end: None
        self.preemption_count = self.recomputed_token_count = self.backfilled_count = self.yield_count = 0
        self.preempted: list[Request] = []
        self.noted: set[Request] = set()

    @property
    def group_count(self) -> int:
        """Returns the number of block tables of each sample."""
        return len(self.groups)

    @property
    def has_work(self) -> bool:
        """Returns whether another turn has anything to do."""
        has_to_say = self.leaving or self.to_free or self.resting.settling or self.resting.forking
        return bool(self.waiting or self.running or has_to_say)

    @property
    def may_go_on(self) -> bool:
        """Returns whether any running sample has tokens to compute, and no sample must be forked first."""
        return not self.resting.forking and not all(sample.awaits_choice for sample in self.running)

    def parents(self) -> set[Sample | None]:
        """Returns the samples with forks that still lack their share of the blocks."""
        return {sample.fork_of for sample in (*self.running, *self.resting.forking)}

    def holders(self) -> tuple[Sample, ...]:
        """Returns all samples that have a sequence, or get one with the step under way."""
        return (*self.running, *self.leaving, *self.resting, *self.resting.forking)

    def add(self, sample: Sample) -> None:
        """Adds a sample to the queue. Hashes its prompt now, while a pass may be running, and not at its admission."""
        sample.digests(self.block_size, 0, (len(sample.tokens) - 1) // self.block_size)
        self.waiting.add(sample)

    def add_fork(self, child: Sample) -> None:
        """Adds a sample that shares its parent's blocks with the next step."""
        insort(self.running, child, key=rank_of)

    def start(self, sample: Sample, passed: Sample | None = None) -> None:
        """Makes an admitted sample run. The sample is backfilled if the head that it `passed` still waits. Samples that
        passed this sample no longer count as backfilled."""
        self.waiting.remove(sample)
        self._forget_passing(sample)
        sample.passed = passed if passed in self.waiting else None
        self.backfilled_count += sample.passed is not None
        insort(self.running, sample, key=rank_of)

    def backfilled_apart(self) -> tuple[list[Sample], list[Sample]]:
        """Returns the running samples: first ordinary samples, then backfilled samples whose head still waits."""
        count = sum(sample.passed is not None for sample in self.running)
        return self.running[: len(self.running) - count], self.running[len(self.running) - count :]

    def finish(self, sample: Sample, reason: FinishReason | None) -> None:
        """Ends a sample. The next step frees its blocks."""
        if sample.has_ended:
            return
        if sample.request not in self.noted:  # once per pass, because several samples of a request often end together
            self.noted.add(sample.request)
            sample.request.trace.note_blocks(sample.request.block_count)
        sample.request.usage.unshared_block_count += self.group_count * -(-sample.computed // self.block_size)
        self._end(sample, reason)

    def prune(self, sample: Sample) -> None:
        """Ends a beam that was not chosen. The next step frees its blocks, and its request continues."""
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
        """Returns whether a sample's states may be a token ahead of its tokens. The states then include a stop token,
        or a token that is being computed, and cannot step back."""
        return self.has_states and sample.draws and reason is FinishReason.STOP

    def _forget_passing(self, head: Sample) -> None:
        """Notes that a sample no longer waits, so no sample counts as having passed it."""
        passed = [each for each in (*self.running, *self.waiting.in_any_order()) if each.passed is head]
        for sample in passed:
            sample.passed = None
        if passed:
            self.running.sort(key=rank_of)

    def leave_queue(self, sample: Sample) -> None:
        """Removes from the queue a beam that need not be computed again. Does nothing if the beam does not wait."""
        if sample in self.waiting:
            self.waiting.remove(sample)
            self._forget_passing(sample)

    def stop(self, sample: Sample) -> None:
        """Ends a sample with a complete text. The reason is STOP, even if the text also reached its limit."""
        self.finish(sample, FinishReason.STOP)
        sample.finish_reason = FinishReason.STOP

    def cancel(self, request: Request) -> None:
        """Ends all samples of a request."""
        for sample in request.samples:
            self.finish(sample, None)

    def forget_blocks(self) -> None:
        """Makes all running samples wait, because the allocator's state is gone."""
        running, self.running = [*self.running, *self.resting.take_forks()], []
        self.resting.clear()
        self.moves.clear()
        for sample in (*running, *self.waiting.in_any_order()):
            self.swap.release(sample)  # It is unknown which of the sample's blocks were moved.
        for sample in running:
            sample.request.trace.note_blocks(sample.request.block_count)
            self._uncount_ahead(sample)
            sample.forget_blocks()
            sample.passed = None
            self._wait(sample)
        self.leaving.clear()
        self.to_free.clear()

    def preempt_last(self) -> Sample:
        """Preempts the last running sample, and returns it. The next step frees its blocks."""
        victim = self.running[-1]
        self.to_free.append(victim.sequence_id)
        self._preempt(victim)
        return victim

    def displaced(self) -> Sample | None:
        """Returns the sample that is to be preempted for the head of the queue; see `displacing.py`."""
        return displaced_by_head(self.waiting, self.running)

    def preempt_displaced(self) -> set[Sample]:
        """Preempts the `displaced` sample, as `preempt_last` does. Returns it; an empty set if there is none."""
        victim = self.displaced()
        if victim is None:
            return set()
        self.to_free.append(victim.sequence_id)
        self._preempt(victim)
        return {victim}

    def make_way(self) -> None:
        """Preempts the last beam if all running samples await a choice of beams, so that other samples can be admitted.
        Only called while nothing is being computed."""
        are_idle = bool(self.running) and all(sample.awaits_choice for sample in self.running)
        if are_idle and self.waiting and not self.to_free:
            self.preempt_last()

    def make_room(self, plan: Plan) -> None:
        """Preempts the victims of a plan. Other samples get the victims' blocks in the same step. Only called while no
        answer is pending. Commits of the plan may name the victims."""
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
        """Puts a sample without blocks into the queue, unless it has nothing to compute."""
        if not sample.awaits_choice:
            self.waiting.add(sample)

    def begin_outgrown_again(self, plan: Plan) -> None:
        """Requeues samples that outgrew the length of their keys' rotation, to be computed from the start. Only called
        while no answer is pending. The plan frees these samples; its commits may name them. Frees come before forks, so
        parents and forks stay for one more turn."""
        forking = {sample for fork in plan.forks for sample in (fork.parent, fork.child)}
        for sample in [each for each in self.running if each.is_outgrown and each not in forking]:
            self.running.remove(sample)
            plan.frees.append(sample.sequence_id)
            self._uncount_ahead(sample)
            self.swap.release(sample)
            sample.begin_again()
            self.add(sample)

    def observe(self, work: Iterable[Work], seconds: float, swapped_block_count: int, swap_s: float) -> None:
        """Measures a pass that took `seconds`, and the swaps in it."""
        counts = [item.token_count for item in work if not item.is_restored]
        self.pace.observe(sum(counts), seconds - swap_s, len(counts))
        self.swap.cost.block_count += swapped_block_count
        self.swap.cost.seconds += swap_s

    def note_computed(self, work: Work) -> None:
        """Counts tokens that are computed again. Frees a sample's slots once all its swapped tokens are restored."""
        sample = work.sample
        if not work.is_restored and work.start < sample.lost:
            self.recomputed_token_count += min(work.end, sample.lost) - work.start
        if work.is_restored and sample.swapped is not None:
            blocks = -(-work.end // self.block_size) - work.start // self.block_size
            self.swap.in_count += blocks * self.group_count + len(sample.states)
            if sample.computed >= sample.swapped.end:
                self.swap.release(sample)

    def free_count_of(self, left: Sequence[Sample]) -> int:
        """Returns the number of blocks that become free when these samples end: the blocks that they hold ahead and, if
        any sample waits, all blocks that no other sample holds."""
        ahead = sum(room_ahead.block_count_of(sample, self.block_size) for sample in left)
        others = (*self.running, *self.resting)
        own = own_block_count(left, others, self.block_size) if left and self.waiting else 0
        return ahead + own

    def spare_block_count(self) -> int:
        """Counts the blocks that a step can give away: held ahead, of ended samples, or held only by branches."""
        parents = self.parents()
        stay = [*self.running, *(each for each in self.leaving if each in parents)]
        ahead = sum(room_ahead.block_count_of(sample, self.block_size) for sample in stay)
        free_count = self.free_count_of([sample for sample in self.leaving if sample not in parents])
        return ahead + free_count + self.resting.alone_held_count(stay, self.group_count)

    def uncommitted_block_count(self) -> int:
        """Returns the number of blocks that the next commit publishes."""
        return sum(
            sample.computed // self.block_size - sample.committed // self.block_size
            for sample in (*self.running, *self.leaving, *self.resting.settling)
        )

    def take_filled(self) -> dict[Sample, list[bytes]]:
        """Returns the samples that filled blocks since the last commit, with the digests; marks them as committed.
        Parents of forks are included, because forks share only committed tokens."""
        parents = self.parents()
        filled = {}
        for sample in (*self.running, *self.leaving, *self.resting.to_commit()):
            first, end = sample.committed // self.block_size, sample.computed // self.block_size
            if sample.sequence_id and (end > first or (sample in parents and sample.computed > sample.committed)):
                filled[sample] = sample.digests(self.block_size, first, end)
                self.on_filled(sample, first, end)
                sample.committed = sample.computed
        return filled

    def given_back(self, block_count: int, increment: Increment) -> dict[Sample, int]:
        """Returns the samples that give back blocks held ahead, each with the number of tokens that keep blocks. Ended
        samples with states are left out: a state ahead of its commit becomes a checkpoint only if no block follows it.
        """
        if block_count <= 0:
            return {}
        samples = self.running + ([] if self.has_states else self.leaving)
        holders = [(sample, sample.granted, len(sample.tokens)) for sample in samples]
        return give_back(holders, block_count, increment)

    # -- branches ------------------------------------------------------------------------------------------------------

    def wake(self, sample: Sample, request: Request, tokens: list[int], *, draws: bool) -> None:
        """Makes a resting sample run for a request. `tokens` begin with all tokens that the sample has computed. Blocks
        that the sample holds ahead are added to the request's usage: unused blocks are subtracted at the end."""
        request.usage.granted_block_count += self.group_count * room_ahead.block_count_of(sample, self.block_size)
        self.resting.wake(sample, request, tokens, draws=draws)
        self.shares.charge(request.namespace, prompt_tokens=len(tokens) - sample.computed)
        insort(self.running, sample, key=rank_of)

    def forks_due(self, running_max: int) -> list[tuple[Sample, Sample]]:
        """Makes children of resting samples run, up to `running_max`. Returns all pairs (child, parent) to fork."""
        for child in self.resting.take_forks(running_max - len(self.running)):
            self.shares.charge(child.request.namespace, prompt_tokens=len(child.tokens) - child.computed)
            self.add_fork(child)
        resting = [child for child in self.resting.forking if child.rests]
        return [(child, child.fork_of) for child in (*self.running, *resting) if child.fork_of is not None]

    def take_back_resting(self, plan: Plan, block_count: int) -> None:
        """Frees resting samples with the step of this plan, until `block_count` blocks are free."""
        if block_count > 0:
            for sample in self.resting.chosen(block_count, (*self.running, *self.leaving), self.parents()):
                self.resting.remove(sample)
                plan.frees.append(sample.sequence_id)

    def drop(self, sample: Sample) -> None:
        """Takes back the blocks of a resting sample with the next step. Does nothing if the sample no longer rests."""
        if sample in self.resting:
            self.resting.remove(sample)
            self.leaving.append(sample)

    def drop_resting(self, block_count: int) -> bool:
        """Drops resting samples until `block_count` blocks are free. Returns whether any sample was dropped."""
        chosen = self.resting.chosen(block_count, (*self.running, *self.leaving), self.parents())
        for sample in chosen:
            self.drop(sample)
        return bool(chosen)

    def block_count_beyond(self, kept: Mapping[Sample, int]) -> int:
        """Returns the number of blocks of each group beyond the tokens that samples keep capacity for."""
        return sum(sample.table_length + -count // self.block_size for sample, count in kept.items())

    # -- counting ------------------------------------------------------------------------------------------------------

    def _uncount_ahead(self, sample: Sample) -> None:
        """Subtracts from the request's usage the blocks that a sample held ahead and never used."""
        ahead = room_ahead.block_count_of(sample, self.block_size)
        sample.request.usage.granted_block_count -= self.group_count * ahead

    def check_invariants(self) -> None:
        """Checks that each sample is in one place only, and that its counters and tables are valid.

        Raises:
            AssertionError: a check fails; the message says which.
        """
        assert self.running == sorted(self.running, key=rank_of), "the running samples are out of order"
        for sample in self.running:
            assert sample.passed is None or sample.passed in self.waiting, (
                f"{sample.age} counts as backfilled but passed no waiting sample"
            )
        assert not set(self.waiting) & set(self.running), "a sample waits and runs"
        for sample in (*self.running, *self.resting):
            sample.check_invariants(self.block_size)
        assert not set(self.resting) & {*self.waiting, *self.running, *self.leaving}, "a sample is both resting and not"
        assert set(self.resting.settling) <= set(self.resting), "a sample settles but does not rest"
        for sample in self.waiting:
            assert not sample.sequence_id, f"{sample.age} waits but has blocks"
            assert not sample.tables, f"{sample.age} waits but has blocks"
