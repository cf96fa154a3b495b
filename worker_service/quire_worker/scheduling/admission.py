"""Which waiting samples are let in: oldest first, as far as blocks, tokens and places go.

A sample is let in when the blocks it needs, less those it will share with running samples, are free, and one more for
each sample that runs: it may fill its last block with the next token. The first that does not fit ends the round, so
that a large prompt is not passed by small ones for ever. If nothing runs, the oldest is let in whatever it needs.

A sample whose prompt begins with a block that another one is computing right now waits for it without holding up
those behind it: identical prompts cost one prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.hashing import DIGEST_BYTES
from quire.types import GroupKind, GroupSpec

from quire_worker.scheduling.request import Sample


class TurnLimits(NamedTuple):
    """How much may still be let in in this turn.

    Attributes:
        tokens: of the forward pass.
        samples: that may run at a time, less those that do.
        blocks: free ones at the allocator, and those that are held ahead; None where it has not said.
        digest_bytes: of the step.
    """

    tokens: int
    samples: int
    blocks: int | None
    digest_bytes: int


class Admission(NamedTuple):
    """One sample to let in: how many tokens to compute first, how many free blocks it takes at most, and the digests to
    match."""

    sample: Sample
    token_count: int
    block_count: int
    digests: list[bytes]


class Peaks:
    """The most blocks that a sequence holds at a time, of each group: all of full attention, and of a window those that
    the tokens of a pass read. As for all else, blocks are counted as if each were one of every group.

    Args:
        groups: of the pool, with blocks of one size.
        pass_token_count: tokens of one sequence that are computed at a time, at most.
    """

    def __init__(self, groups: Sequence[GroupSpec], pass_token_count: int) -> None:
        size = groups[0].block_size
        windows = [group.window for group in groups if group.kind is not GroupKind.FULL_ATTENTION]
        # Of the keys that a pass reads, the first may be the last of its block.
        self._windowed = [-(-(window + pass_token_count - 2) // size) + 1 for window in windows]
        self._group_count = len(groups)

    def block_count(self, length: int) -> int:
        """Counts the blocks of a sequence whose tables get so many entries."""
        full = (self._group_count - len(self._windowed)) * length
        return -(-(full + sum(min(length, peak) for peak in self._windowed)) // self._group_count)


def admit(
    waiting: Sequence[Sample],
    running: Sequence[Sample],
    limits: TurnLimits,
    *,
    block_size: int,
    peaks: Peaks,
    resting: Sequence[Sample] = (),
) -> list[Admission]:
    """Chooses from `waiting`, which is sorted by age. Changes nothing but caches of digests. Those who rest only have
    blocks that may be shared."""
    if not waiting:
        return []
    being_computed = _being_computed(running, block_size)
    tokens, samples, blocks, digest_bytes = limits
    admitted: list[Admission] = []
    for sample in waiting:
        if tokens == 0 or digest_bytes < DIGEST_BYTES:
            break
        digests = sample.digests(block_size, 0, sample.matchable_token_count // block_size)
        if not being_computed.isdisjoint(digests):
            continue
        shared = _held_count(digests, (*running, *resting), block_size)
        needed = peaks.block_count(-(-len(sample.tokens) // block_size) - shared)
        alone = not running and not admitted
        if not alone and (samples < _places(sample) or (blocks is not None and needed + len(running) + 1 > blocks)):
            break
        token_count = min(len(sample.tokens) - shared * block_size, tokens)
        sent = digests[: digest_bytes // DIGEST_BYTES]  # fewer digests only make the hit shorter
        admitted.append(Admission(sample, token_count, needed, sent))
        being_computed.update(digests[shared:])
        tokens -= token_count
        samples -= _places(sample)
        digest_bytes -= len(sent) * DIGEST_BYTES
        if blocks is not None:
            blocks -= needed + 1
    return admitted


def _being_computed(running: Sequence[Sample], block_size: int) -> set[bytes]:
    """Returns the digests of prompt blocks that are not computed yet. What is computed is published, at the latest with
    the step that lets somebody in."""
    digests = set[bytes]()
    for sample in running:
        computed, end = sample.computed // block_size, (len(sample.tokens) - 1) // block_size
        if end > computed:
            digests.update(sample.digests(block_size, computed, end))
    return digests


def _held_count(digests: Sequence[bytes], running: Sequence[Sample], block_size: int) -> int:
    """Counts the leading blocks that some running sample holds; equal digests at one place mean equal ones before
    it."""
    count = 0
    for sample in running:
        end = min(len(digests), sample.computed // block_size)
        for digest in sample.digests(block_size, count, end):
            if digest != digests[count]:
                break
            count += 1
    return count


def _places(sample: Sample) -> int:
    """Counts the samples that will run because of this one: the first brings all forks of its request."""
    is_first = sample.index == 0 and sample.output_token_count == 0
    return len(sample.request.samples) if is_first else 1
