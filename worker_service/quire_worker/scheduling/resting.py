"""Samples of branches, which hold blocks while no call uses them.

Lifecycle of a branch's sample, in addition to the one in `request.py`:

    1. forking    it is a fork of another branch's sample, and gets its sequence with the next step that forks
    2. resting    it has finished its task; it holds its sequence, and has nothing to compute
    3. settling   it rests, and the next step commits its full blocks and gives back the blocks held ahead
    4. running    it was woken for another request on the same sequence
    5. leaving    it was dropped, or its task failed; the next step frees its sequence

Running samples have precedence. If blocks are missing, the blocks of the least recently used branch are taken back
first, before any running sample is preempted. Lost blocks are computed again when the branch is used, unless the cache
still has them. So a branch never makes a request wait, and a pool full of branches is as good as an empty one.

A resting sample has computed all tokens of its branch except the last. The last token is computed again, because
its logits are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from quire.protocol.outcomes import NULL_BLOCK

from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.slots import BranchTask


class Resting:
    """The samples of all branches that no call uses.

    Attributes:
        forking: children that do not share their parent's blocks yet, even those that will run immediately.
        settling: samples that came to rest since the last step.
    """

    def __init__(self) -> None:
        self.forking: list[Sample] = []
        self.settling: list[Sample] = []
        self._held: dict[Sample, None] = {}  # the least recently used first

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, sample: Sample) -> bool:
        return sample in self._held

    def add(self, sample: Sample) -> None:
        """Makes a sample rest. If a token was sampled after its last token, the last token will be computed again."""
        if sample.draws:
            sample.computed = min(sample.computed, len(sample.tokens) - 1)
        sample.has_ended, sample.passed = True, None
        self._held[sample] = None
        self.settling.append(sample)

    def add_fork(self, child: Sample) -> None:
        """Adds a child of a resting sample. The child gets its share of the blocks with the next step."""
        child.has_ended = child.rests
        self.forking.append(child)

    def take_forks(self, place_count: int | None = None) -> list[Sample]:
        """Removes and returns the children that should run: at most `place_count`, or all if it is None."""
        to_run = [child for child in self.forking if not child.rests]
        taken = to_run if place_count is None else to_run[: max(0, place_count)]
        self.forking = [child for child in self.forking if child not in taken]
        return taken

    def take_shares(self, children: Iterable[Sample]) -> None:
        """Makes children rest that have got their share of their parent's blocks."""
        for child in children:
            if child.rests:
                self.forking.remove(child)
                self.add(child)

    def to_commit(self) -> list[Sample]:
        """Returns the samples that must commit: samples that came to rest since the last step, and parents of forks."""
        parents = dict.fromkeys(child.fork_of for child in self.forking)
        return [*self.settling, *[each for each in parents if each is not None and each in self._held]]

    def settled(self, block_size: int, *, has_states: bool) -> list[Sample]:
        """Returns the samples that came to rest since the last step and hold capacity behind their computed tokens.

        Each sample is returned once. The capacity must be a block or more, with states a token: a state is shared and
        published only at the end of the granted capacity.
        """
        settling, self.settling = self.settling, []
        unit = 1 if has_states else block_size
        return [each for each in settling if -(-each.granted // unit) > -(-each.computed // unit)]

    def remove(self, sample: Sample) -> None:
        """Removes a sample that runs or leaves, if it is held here."""
        self._held.pop(sample, None)
        if sample in self.settling:
            self.settling.remove(sample)
        if sample in self.forking:
            self.forking.remove(sample)

    def wake(self, sample: Sample, request: Request, tokens: list[int], *, draws: bool) -> None:
        """Removes a sample, which runs for a request. `tokens` begin with all tokens that the sample has computed."""
        self.remove(sample)
        sample.request, sample.tokens, sample.branch = request, tokens, BranchTask(rests=True, draws=draws)
        sample.has_ended, sample.finish_reason = False, None

    def chosen(self, block_count: int, holders: Iterable[Sample], parents: Collection[Sample | None]) -> list[Sample]:
        """Returns the samples to take blocks back from, until enough are free. Returns all if that is not enough.

        Args:
            block_count: the number of blocks needed in each group.
            holders: other samples that may hold the same blocks.
            parents: parents of coming forks; these are never chosen.
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
        """Returns the number of blocks of each group that only resting samples hold."""
        if not self._held:
            return 0
        blocks = {block for sample in self._held for block in _blocks(sample)}
        for sample in holders:
            blocks.difference_update(*sample.tables)
        return len(blocks) // group_count

    def clear(self) -> None:
        """Forgets all samples, because the allocator's state is gone."""
        for sample in (*self._held, *self.forking):
            sample.forget_blocks()
        self._held.clear()
        self.settling.clear()
        self.forking.clear()


def _blocks(sample: Sample) -> set[int]:
    blocks = {block for table in sample.tables for block in table}
    blocks.discard(NULL_BLOCK)
    return blocks
