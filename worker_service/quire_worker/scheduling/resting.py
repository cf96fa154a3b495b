"""Samples of branches, which hold blocks while nobody asks anything of them.

Lifecycle of a branch's sample, beside the one in `request.py`:

    1. forking    made from another branch's; gets its sequence with the next step that asks for forks
    2. resting    has done what it was asked for; holds its sequence and nothing to compute
       settling   the same until the next step has committed what it filled and given back its room ahead
    3. running    was woken, for another request on the same sequence
    4. leaving    dropped, or what it was asked for failed; its sequence is freed with the next step

Who computes comes before who rests: where blocks are missing, those of branches are taken back, the one first that was
not used for the longest time, before any sample that runs is preempted. What a branch loses is computed again when it
is used, as far as the cache has not kept it. So a branch never keeps anybody waiting, and a pool full of branches is
as good as an empty one.

A resting sample has all its tokens computed that its branch has, but for the branch's last: its logits are wanted, and
computing one token again is what they cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from quire.protocol.outcomes import NULL_BLOCK

from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.slots import BranchTask


class Resting:
    """The samples of all branches that nothing is asked of.

    Attributes:
        forking: children that have no share of their parent's blocks yet; those that are to run at once, too.
        settling: those that rest since the last step.
    """

    def __init__(self) -> None:
        self.forking: list[Sample] = []
        self.settling: list[Sample] = []
        self._held: dict[Sample, None] = {}  # the one first that was used the longest time ago

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, sample: Sample) -> bool:
        return sample in self._held

    def add(self, sample: Sample) -> None:
        """Lets a sample rest. Of what a token was sampled after, the last one will be computed again."""
        if sample.draws:
            sample.computed = min(sample.computed, len(sample.tokens) - 1)
        sample.has_ended, sample.passed = True, None
        self._held[sample] = None
        self.settling.append(sample)

    def add_fork(self, child: Sample) -> None:
        """Takes a child of a resting sample, which gets its share with the next step."""
        child.has_ended = child.rests
        self.forking.append(child)

    def take_forks(self, place_count: int | None = None) -> list[Sample]:
        """Removes and returns the children that are to run, as many as there are places for, or all of them."""
        to_run = [child for child in self.forking if not child.rests]
        taken = to_run if place_count is None else to_run[: max(0, place_count)]
        self.forking = [child for child in self.forking if child not in taken]
        return taken

    def take_shares(self, children: Iterable[Sample]) -> None:
        """Lets children rest that have their share of their parent's blocks."""
        for child in children:
            if child.rests:
                self.forking.remove(child)
                self.add(child)

    def to_commit(self) -> list[Sample]:
        """Returns those that have something to commit: they rest since the last step, or are forked now."""
        parents = dict.fromkeys(child.fork_of for child in self.forking)
        return [*self.settling, *[each for each in parents if each is not None and each in self._held]]

    def settled(self, block_size: int, *, has_states: bool) -> list[Sample]:
        """Returns those that rest since the last step and hold room beyond what they have computed: a block of it, or
        with states a token, because a state is shared and published at the end of the room alone. They are not named
        again."""
        settling, self.settling = self.settling, []
        unit = 1 if has_states else block_size
        return [each for each in settling if -(-each.granted // unit) > -(-each.computed // unit)]

    def remove(self, sample: Sample) -> None:
        """Takes a sample out, because it runs or leaves; one that is not here is no error."""
        self._held.pop(sample, None)
        if sample in self.settling:
            self.settling.remove(sample)
        if sample in self.forking:
            self.forking.remove(sample)

    def wake(self, sample: Sample, request: Request, tokens: list[int], *, draws: bool) -> None:
        """Takes a sample out to run for a request: `tokens` begin with all that it has computed."""
        self.remove(sample)
        sample.request, sample.tokens, sample.branch = request, tokens, BranchTask(rests=True, draws=draws)
        sample.has_ended, sample.finish_reason = False, None

    def chosen(self, block_count: int, holders: Iterable[Sample], parents: Collection[Sample | None]) -> list[Sample]:
        """Returns whom to take blocks back from, so that at least so many of each group are free, or all of them.

        Args:
            block_count: of each group.
            holders: others, who may hold the same blocks.
            parents: of forks to come, who stay.
        """
        if not self._held:
            return []
        holder_counts = Counter(block for sample in (*holders, *self._held) for block in _blocks(sample))
        chosen, freed = list[Sample](), 0
        for sample in self._held:
            if freed >= block_count * len(sample.tables):
                break
            if sample not in parents:
                blocks = _blocks(sample)
                holder_counts.subtract(blocks)
                freed += sum(holder_counts[block] == 0 for block in blocks)
                chosen.append(sample)
        return chosen

    def alone_held_count(self, holders: Iterable[Sample], group_count: int) -> int:
        """Counts the blocks of each group that nobody holds but samples here."""
        if not self._held:
            return 0
        blocks = {block for sample in self._held for block in _blocks(sample)}
        for sample in holders:
            blocks.difference_update(*sample.tables)
        return len(blocks) // group_count

    def clear(self) -> None:
        """Forgets everybody, because the allocator's state is gone."""
        for sample in (*self._held, *self.forking):
            sample.forget_blocks()
        self._held.clear()
        self.settling.clear()
        self.forking.clear()


def _blocks(sample: Sample) -> set[int]:
    blocks = {block for table in sample.tables for block in table}
    blocks.discard(NULL_BLOCK)
    return blocks
