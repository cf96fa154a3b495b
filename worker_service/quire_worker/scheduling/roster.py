"""Who waits, who runs, and who has ended and still holds blocks."""

from __future__ import annotations

from bisect import insort

from quire_worker.scheduling import lookahead
from quire_worker.scheduling.request import FinishReason, Request, Sample


class Roster:
    """Samples of one worker, each in one place.

    Args:
        block_size: tokens per block.

    Attributes:
        waiting, running: oldest first.
        leaving: ended; committed once more and freed with the next step.
        to_free: sequences of samples that live on without them.
        preemption_count: how often a sample that ran had to wait again.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.leaving: list[Sample] = []
        self.to_free: list[int] = []
        self.preemption_count = 0

    @property
    def has_work(self) -> bool:
        """Tells whether another turn has anything to do."""
        return bool(self.waiting or self.running or self.leaving or self.to_free)

    def add(self, sample: Sample) -> None:
        """Adds a sample to those that wait. Its prompt is hashed here, while a forward pass may be running, and not
        between two of them when it is let in."""
        sample.digests(self.block_size, 0, (len(sample.tokens) - 1) // self.block_size)
        insort(self.waiting, sample, key=age_of)

    def add_fork(self, child: Sample) -> None:
        """Adds a sample that shares its parent's blocks with the next step."""
        insort(self.running, child, key=age_of)

    def finish(self, sample: Sample, reason: FinishReason | None) -> None:
        """Ends a sample; its blocks are freed with the next step."""
        if sample.has_ended:
            return
        sample.has_ended = True
        sample.finish_reason = reason
        sample.request.usage.unshared_block_count += -(-sample.computed // self.block_size)
        self._uncount_ahead(sample)
        if sample in self.running:
            self.running.remove(sample)
            if sample.sequence_id:
                self.leaving.append(sample)
        elif sample in self.waiting:
            self.waiting.remove(sample)

    def cancel(self, request: Request) -> None:
        """Ends every sample of the request."""
        for sample in request.samples:
            self.finish(sample, None)

    def forget_blocks(self) -> None:
        """Makes everybody who ran wait, because the allocator's state is gone."""
        self.waiting = sorted(self.waiting + self.running, key=age_of)
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

    def _uncount_ahead(self, sample: Sample) -> None:
        """Takes blocks that a sample held ahead and never used out of its request's usage."""
        sample.request.usage.granted_block_count -= lookahead.block_count_of(sample, self.block_size)

    def check_invariants(self) -> None:
        """Checks that counters of every sample are in order, nobody is in two places and tables hold what was granted.

        Raises:
            AssertionError: naming what is broken.
        """
        assert self.waiting == sorted(self.waiting, key=age_of), "waiting is out of order"
        assert self.running == sorted(self.running, key=age_of), "running is out of order"
        assert not set(self.waiting) & set(self.running), "a sample waits and runs"
        for sample in self.running:
            sample.check_invariants(self.block_size)
        for sample in self.waiting:
            assert not sample.sequence_id, f"{sample.age} waits with blocks"
            assert not sample.table, f"{sample.age} waits with blocks"


def age_of(sample: Sample) -> tuple[int, int]:
    """Returns the key by which samples are sorted: the oldest first."""
    return sample.age
