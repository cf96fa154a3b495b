"""Admission of waiting samples: in order, while there are enough blocks, tokens of the pass, and places to run.

A sample needs its blocks, except the blocks that it will share with running samples. The sample is admitted when that
many blocks are free, plus one for itself and one for each running sample, because the next token may need a new block.
The first sample that does not fit is the head: no later sample is admitted before it, except by backfilling
(`backfill.py`). If nothing else runs, the head is admitted in any case.

If another sample is computing the first block of a sample's prompt right now, the sample waits for that block, but
later samples may pass it. So identical prompts cost one prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.hashing import DIGEST_BYTES
from quire.types import GroupKind, GroupSpec
from quire.views import WaitReason

from quire_worker.scheduling.backfill import (
    DEPTH,
    Reservation,
    blocks_at_end,
    held_count,
    own_block_count,
    places_of,
    reserve,
    turns_left,
)
from quire_worker.scheduling.plan import Admission, Round
from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.waiting import Wait


class TurnLimits(NamedTuple):
    """Limits of further admissions in this turn.

    Attributes:
        tokens: tokens left in the forward pass.
        samples: the number of samples that may still start to run.
        blocks: free blocks at the allocator, plus blocks held ahead; None while the allocator has not reported them.
        digest_bytes: bytes of digests left in the step.
    """

    tokens: int
    samples: int
    blocks: int | None
    digest_bytes: int


class Peaks:
    """The most blocks that a sequence holds at a time.

    Of a group with full attention, it holds all blocks; of a window, the blocks that the tokens of a pass read; of
    recurrent states, the running block. Like all block counts here, the result counts one block of every attention
    group as 1.

    Args:
        groups: the pool's groups, with blocks of one size.
        pass_token_count: the most tokens of one sequence that are computed at a time.
    """

    def __init__(self, groups: Sequence[GroupSpec], pass_token_count: int) -> None:
        attention = [group for group in groups if group.kind is not GroupKind.STATE]
        size = attention[0].block_size
        windows = [group.window for group in attention if group.kind is not GroupKind.FULL_ATTENTION]
        # The first key that a pass reads may be the last key of its block, so one more block is needed.
        self._windowed = [-(-(window + pass_token_count - 2) // size) + 1 for window in windows]
        self._group_count = len(attention)
        self._state_count = len(groups) - len(attention)

    def block_count(self, length: int) -> int:
        """Returns the blocks of a sequence that has `length` entries in each table."""
        full = (self._group_count - len(self._windowed)) * length
        windowed = sum(min(length, peak) for peak in self._windowed)
        return -(-(full + windowed + self._state_count) // self._group_count)


class Applicants:
    """Waiting samples that apply for admission. `consider` goes through them, and admits those that fit.

    Args:
        running: the running samples in order, backfilled samples last.
        limits: what admissions may use in this turn.
        block_size: tokens per block.
        peaks: the most blocks that sequences hold at a time.
        sequence_tokens_max: the most tokens of a sequence; a sample ends when it has so many.
        resting: samples of branches; their blocks may be shared.
    """

    def __init__(
        self,
        running: Sequence[Sample],
        limits: TurnLimits,
        *,
        block_size: int,
        peaks: Peaks,
        sequence_tokens_max: int,
        resting: Iterable[Sample] = (),
    ) -> None:
        self.chosen = Round()
        self._waits: dict[Sample, Wait] | None = None
        self._running = running
        self._resting = tuple(resting)
        self._left = limits
        self._block_size = block_size
        self._peaks = peaks
        self._sequence_tokens_max = sequence_tokens_max
        self._being_computed = _being_computed(running, block_size)
        self._head: Sample | None = None
        self._reservation: Reservation | None = None

    def consider(
        self, waiting: Iterable[Sample], *, may_preempt: bool, waits: dict[Sample, Wait] | None = None
    ) -> Round:
        """Chooses admissions from `waiting`. Changes nothing except caches of digests.

        Args:
            waiting: samples in the order of consideration.
            may_preempt: whether backfilled samples may be preempted for the head that they passed. If not, and the head
                needs a preemption, neither the head nor any later sample is admitted.
            waits: gets the reasons why samples wait; None if they are not needed.
        """
        looked_at, self._waits = 0, waits
        for sample in waiting:
            if self._left.tokens <= 0 or self._left.digest_bytes < DIGEST_BYTES:
                self._note(sample, WaitReason.PASS_FULL)
                break
            if self._head is not None and looked_at >= DEPTH:
                break
            digests = sample.digests(self._block_size, 0, sample.matchable_token_count // self._block_size)
            if not self._being_computed.isdisjoint(digests):
                self._note(sample, WaitReason.PREFIX)
                continue
            if self._head is not None:
                looked_at += 1
                self._backfill(sample, digests)
            elif not self._admit(sample, digests, self._running):
                # Each of these samples passed this head, or an earlier head that now waits behind this head.
                passed = [each for each in self._running if each.passed is not None]
                if passed and self._fits_without(sample, digests, passed):
                    if not may_preempt:
                        break
                    self._preempt_for(sample, digests, passed)
                else:
                    self._note_shortage(sample, digests)
                    if not self._reserve_for(sample, digests):
                        break
        return self.chosen

    def _admit(self, sample: Sample, digests: list[bytes], running: Sequence[Sample]) -> bool:
        """Admits a sample if it fits together with the running samples."""
        shared = self._shared(digests, running)
        needed = self._needed(sample, shared)
        is_alone = not running and not self.chosen.admissions
        if not is_alone and not self._fits(sample, needed, len(running)):
            return False
        self._add(sample, needed, digests, shared)
        return True

    def _shared(self, digests: Sequence[bytes], running: Sequence[Sample]) -> int:
        """Returns the number of leading blocks that other samples hold."""
        return held_count(digests, (*running, *self._resting), self._block_size)

    def _needed(self, sample: Sample, shared: int) -> int:
        return self._peaks.block_count(-(-len(sample.tokens) // self._block_size) - shared)

    def _fits(self, sample: Sample, needed: int, running_count: int) -> bool:
        blocks = self._left.blocks
        return self._left.samples >= places_of(sample) and (blocks is None or needed + running_count + 1 <= blocks)

    def _note(self, sample: Sample, reason: WaitReason, missing_block_count: int = 0) -> None:
        if self._waits is not None:
            self._waits[sample] = Wait(reason, missing_block_count)

    def _note_shortage(self, sample: Sample, digests: list[bytes]) -> None:
        """Records the resources that a sample lacks if it does not fit together with the running samples."""
        if self._left.samples < places_of(sample):
            self._note(sample, WaitReason.PLACES)
        elif self._waits is not None:
            needed = self._needed(sample, self._shared(digests, self._running)) + len(self._running) + 1
            self._note(sample, WaitReason.BLOCKS, needed - (self._left.blocks or 0))

    def _add(
        self, sample: Sample, needed: int, digests: list[bytes], shared: int, passed: Sample | None = None
    ) -> None:
        tokens, samples, blocks, digest_bytes = self._left
        token_count = min(len(sample.tokens) - shared * self._block_size, tokens)
        sent = digests[: digest_bytes // DIGEST_BYTES]  # With fewer digests, the hit is only shorter.
        self.chosen.admissions.append(Admission(sample, token_count, needed, sent, passed))
        self._note(sample, WaitReason.NEXT_PASS)
        self._being_computed.update(digests[shared:])
        self._left = TurnLimits(
            tokens - token_count,
            samples - places_of(sample),
            None if blocks is None else blocks - needed - 1,
            digest_bytes - len(sent) * DIGEST_BYTES,
        )

    # -- the head, and the samples that pass it ------------------------------------------------------------------------

    def _without(self, passed: Sequence[Sample]) -> tuple[list[Sample], TurnLimits, int]:
        """Returns the state without the samples in `passed`: other running samples, limits, and blocks freed."""
        others = [each for each in self._running if each not in passed]
        own = own_block_count(passed, (*others, *self._resting), self._block_size)
        blocks = None if self._left.blocks is None else self._left.blocks + own
        return others, self._left._replace(samples=self._left.samples + len(passed), blocks=blocks), own

    def _fits_without(self, head: Sample, digests: list[bytes], passed: Sequence[Sample]) -> bool:
        others, limits, _ = self._without(passed)
        shared = self._shared(digests, others)
        if not others and not self.chosen.admissions:
            return True
        before, self._left = self._left, limits
        fits = self._fits(head, self._needed(head, shared), len(others))
        self._left = before
        return fits

    def _preempt_for(self, head: Sample, digests: list[bytes], passed: Sequence[Sample]) -> None:
        """Preempts samples that passed the head, the last first, and only as many as the head needs."""
        count = next(count for count in range(1, len(passed) + 1) if self._fits_without(head, digests, passed[-count:]))
        self.chosen.victims = list(passed[-count:])
        self._running, self._left, self.chosen.victim_block_count = self._without(self.chosen.victims)
        is_admitted = self._admit(head, digests, self._running)
        assert is_admitted, "the head no longer fits"

    def _reserve_for(self, head: Sample, digests: list[bytes]) -> bool:
        """Makes a sample the head. Returns False if no sample could pass it."""
        blocks = self._left.blocks
        if blocks is None or self._left.samples < 1 or blocks < len(self._running) + 2:
            return False
        self._head = head
        self._reservation = reserve(
            self._running,
            blocks=blocks,
            places=self._left.samples,
            needed=self._needed(head, self._shared(digests, self._running)),
            needed_places=places_of(head),
            block_size=self._block_size,
            sequence_tokens_max=self._sequence_tokens_max,
        )
        return True

    def _backfill(self, sample: Sample, digests: list[bytes]) -> None:
        """Lets a sample pass the head if that does not delay the head.

        The estimate assumes that it shares no blocks.
        """
        assert self._reservation is not None
        needed = self._needed(sample, 0)
        turn_count = turns_left(sample, self._sequence_tokens_max)
        at_end = self._peaks.block_count(blocks_at_end(sample, self._block_size, self._sequence_tokens_max))
        if (
            places_of(sample) == 1
            and not sample.is_beam
            and sample.passed is not self._head  # This head preempted the sample earlier.
            and self._fits(sample, needed, len(self._running))
            and self._reservation.admits(turn_count, at_end)
        ):
            self._reservation = self._reservation.after(turn_count, at_end)
            self._add(sample, needed, digests, 0, self._head)


def _being_computed(running: Sequence[Sample], block_size: int) -> set[bytes]:
    """Returns the digests of prompt blocks that are not computed yet.

    Computed blocks are published no later than in the step that admits a sample.
    """
    digests = set[bytes]()
    for sample in running:
        computed, end = sample.computed // block_size, (len(sample.tokens) - 1) // block_size
        if end > computed:
            digests.update(sample.digests(block_size, computed, end))
    return digests
