"""Who waits, who runs, and who has ended and still holds blocks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence

from quire.session.lookahead import Increment, give_back
from quire.types import GroupKind, GroupSpec

from quire_worker.scheduling import lookahead
from quire_worker.scheduling.plan import Plan
from quire_worker.scheduling.request import FinishReason, Request, Sample
from quire_worker.scheduling.resting import Resting


class Roster:
    """Samples of one worker, each in one place.

    Args:
        groups: of the pool: of attention, with blocks of one size, then of states.

    Attributes:
        waiting, running: oldest first.
        resting: of branches that nothing is asked of.
        leaving: ended; committed once more and freed with the next step.
        to_free: sequences of samples that live on without them.
        preemption_count: how often a sample that ran had to wait again.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        """Begins with nobody.

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
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.resting = Resting()
        self.leaving: list[Sample] = []
        self.to_free: list[int] = []
        self.preemption_count = 0

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
        """Tells whether somebody runs, and nobody has to be forked first."""
        return bool(self.running) and not self.resting.forking

    def parents(self) -> set[Sample | None]:
        """Returns those whose forks have no share of their blocks yet."""
        return {sample.fork_of for sample in (*self.running, *self.resting.forking)}

    def add(self, sample: Sample) -> None:
        """Adds a sample to those that wait. Its prompt is hashed here, while a forward pass may be running, and not
        between two of them when it is let in."""
        sample.digests(self.block_size, 0, (len(sample.tokens) - 1) // self.block_size)
        insort(self.waiting, sample, key=age_of)

    def add_fork(self, child: Sample) -> None:
        """Adds a sample that shares its parent's blocks with the next step."""
        insort(self.running, child, key=age_of)

    def start(self, sample: Sample) -> None:
        """Makes a waiting sample run, because it was let in."""
        self.waiting.remove(sample)
        insort(self.running, sample, key=age_of)

    def finish(self, sample: Sample, reason: FinishReason | None) -> None:
        """Ends a sample; its blocks are freed with the next step."""
        if sample.has_ended:
            return
        sample.has_ended = True
        sample.finish_reason = reason
        sample.request.usage.unshared_block_count += self.group_count * -(-sample.computed // self.block_size)
        self._uncount_ahead(sample)
        if sample in self.running:
            self.running.remove(sample)
            if sample.rests and reason is not None:
                self.resting.add(sample)
            elif sample.sequence_id:
                self.leaving.append(sample)
        elif sample in self.waiting:
            self.waiting.remove(sample)
        else:
            self.resting.remove(sample)

    def wake(self, sample: Sample, request: Request, tokens: list[int], *, draws: bool) -> None:
        """Makes a resting sample run on, for a request: `tokens` begin with all that it has computed."""
        self.resting.wake(sample, request, tokens, draws=draws)
        insort(self.running, sample, key=age_of)

    def drop(self, sample: Sample) -> None:
        """Takes the blocks of a resting sample back with the next step; one that rests no more is no error."""
        if sample in self.resting:
            self.resting.remove(sample)
            self.leaving.append(sample)

    def stop(self, sample: Sample) -> None:
        """Ends a sample because its text has come to its end, be it with the last token that it may have."""
        self.finish(sample, FinishReason.STOP)
        sample.finish_reason = FinishReason.STOP

    def cancel(self, request: Request) -> None:
        """Ends every sample of the request."""
        for sample in request.samples:
            self.finish(sample, None)

    def forget_blocks(self) -> None:
        """Makes everybody who ran wait, because the allocator's state is gone."""
        to_run = [child for child in self.resting.forking if not child.rests]
        self.waiting = sorted(self.waiting + self.running + to_run, key=age_of)
        self.resting.clear()
        for sample in self.waiting:
            self._uncount_ahead(sample)
            sample.forget_blocks()
        self.running.clear()
        self.leaving.clear()
        self.to_free.clear()

    def preempt_newest(self) -> Sample:
        """Makes the newest running sample wait, to be computed again, and returns it."""
        victim = self.running.pop()
        self.preemption_count += 1
        victim.request.usage.preemption_count += 1
        self.to_free.append(victim.sequence_id)
        self._uncount_ahead(victim)
        victim.forget_blocks()
        insort(self.waiting, victim, key=age_of)
        return victim

    def begin_outgrown_again(self, plan: Plan) -> None:
        """Makes samples wait that grew beyond the length that their keys are rotated for: they are computed again from
        their first token, as if they had begun with all that they have. Called when no answer is on its way; `plan`,
        whose commits may name them, frees them. Frees come before forks, so parents and forks of it stay a turn."""
        forking = {sample for pair in plan.forks for sample in pair}
        for sample in [each for each in self.running if each.is_outgrown and each not in forking]:
            self.running.remove(sample)
            plan.step.free(sample.sequence_id)
            self._uncount_ahead(sample)
            sample.begin_again()
            self.add(sample)

    @property
    def held_ahead_count(self) -> int:
        """Counts the blocks that samples hold beyond those of their tokens."""
        return sum(lookahead.block_count_of(sample, self.block_size) for sample in self.running + self.leaving)

    def holders(self) -> tuple[Sample, ...]:
        """Returns everybody who has a sequence, or gets one with the step under way."""
        return (*self.running, *self.leaving, *self.resting, *self.resting.forking)

    def given_back(self, block_count: int, increment: Increment) -> dict[Sample, int]:
        """Returns who gives back so many blocks that it holds ahead, and for how many tokens each keeps room."""
        if block_count <= 0:
            return {}
        holders = [(sample, sample.granted, len(sample.tokens)) for sample in self.running + self.leaving]
        return give_back(holders, block_count, increment)

    def block_count_beyond(self, kept: Mapping[Sample, int]) -> int:
        """Counts the blocks of each group beyond the room that samples keep."""
        return sum(sample.table_length + -count // self.block_size for sample, count in kept.items())

    @property
    def resting_block_count(self) -> int:
        """Counts the blocks that branches alone hold."""
        return self.resting.alone_held_count((*self.running, *self.leaving), self.group_count)

    def take_back_resting(self, plan: Plan, block_count: int) -> None:
        """Frees resting samples with the step of this plan, as many as hold so many blocks alone."""
        if block_count > 0 and len(self.resting):
            for sample in self.resting.chosen(block_count, (*self.running, *self.leaving), self.parents()):
                self.resting.remove(sample)
                plan.step.free(sample.sequence_id)

    def drop_resting(self, block_count: int) -> bool:
        """Drops resting samples that hold so many blocks alone; tells whether there were any."""
        chosen = self.resting.chosen(block_count, (*self.running, *self.leaving), self.parents())
        for sample in chosen:
            self.drop(sample)
        return bool(chosen)

    def settled(self) -> list[Sample]:
        """Returns those that rest since the last step and hold room beyond what they have computed; they are not named
        again."""
        settling, self.resting.settling = self.resting.settling, []
        return [each for each in settling if each.table_length > -(-each.computed // self.block_size)]

    def forks_due(self, running_max: int) -> list[tuple[Sample, Sample]]:
        """Makes children of resting samples run as far as there are places, and returns all children to be forked now,
        with their parents."""
        for child in self.resting.take_forks(running_max - len(self.running)):
            self.add_fork(child)
        resting = [child for child in self.resting.forking if child.rests]
        return [(child, child.fork_of) for child in (*self.running, *resting) if child.fork_of is not None]

    def uncommitted_block_count(self) -> int:
        """Counts the blocks that the next commit publishes."""
        return sum(
            sample.computed // self.block_size - sample.committed // self.block_size
            for sample in (*self.running, *self.leaving, *self.resting.settling)
        )

    def take_filled(self) -> dict[Sample, list[bytes]]:
        """Returns who filled blocks since the last commit, and their digests; among them parents of forks, which share
        only what is committed. From now on it all counts as committed."""
        parents = self.parents()
        filled = {}
        for sample in self.running + self.leaving + self._to_commit():
            first, end = sample.committed // self.block_size, sample.computed // self.block_size
            if sample.sequence_id and (end > first or (sample in parents and sample.computed > sample.committed)):
                filled[sample] = sample.digests(self.block_size, first, end)
                sample.committed = sample.computed
        return filled

    def _to_commit(self) -> list[Sample]:
        """Returns resting samples that have something to commit: they rest since the last step, or are forked now."""
        parents = dict.fromkeys(child.fork_of for child in self.resting.forking)
        return [*self.resting.settling, *[each for each in parents if each is not None and each in self.resting]]

    def _uncount_ahead(self, sample: Sample) -> None:
        """Takes blocks that a sample held ahead and never used out of its request's usage."""
        ahead = lookahead.block_count_of(sample, self.block_size)
        sample.request.usage.granted_block_count -= self.group_count * ahead

    def check_invariants(self) -> None:
        """Checks that counters of every sample are in order, nobody is in two places and tables hold what was granted.

        Raises:
            AssertionError: naming what is broken.
        """
        assert self.waiting == sorted(self.waiting, key=age_of), "waiting is out of order"
        assert self.running == sorted(self.running, key=age_of), "running is out of order"
        assert not set(self.waiting) & set(self.running), "a sample waits and runs"
        for sample in (*self.running, *self.resting):
            sample.check_invariants(self.block_size)
        assert not set(self.resting) & {*self.waiting, *self.running, *self.leaving}, "a sample rests and does not"
        assert set(self.resting.settling) <= set(self.resting), "a sample settles that does not rest"
        for sample in self.waiting:
            assert not sample.sequence_id, f"{sample.age} waits with blocks"
            assert not sample.tables, f"{sample.age} waits with blocks"


def age_of(sample: Sample) -> tuple[int, int]:
    """Returns the key by which samples are sorted: the oldest first."""
    return sample.age
