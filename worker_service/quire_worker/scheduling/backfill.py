"""EASY backfilling: admits samples before one that does not fit, without delaying it.

The first sample in order that finds too few blocks (or places) is the *head*. Later samples may pass it if they do not
delay it (Lifka, "The ANL/IBM SP Scheduling System", 1995). The head's latest start is known, because each sample's
latest end is known (`max_tokens`):

    start    the first turn in which enough samples have ended for the head to fit, if all of them run to the end
    spare    blocks that are free then beyond those of the head

A later sample is *backfilled* if it fits now and ends by that start, or takes no more than the spare blocks.

Samples can also end sooner, by a stop token, and then the head could start sooner, too. In turns, the head still never
starts later than without backfilling, because a backfilled sample uses only what is left over while the head that it
passed is waiting. It gets tokens of a pass after all others. It is preempted in the same step in which the head, or a
running sample's next token, needs its blocks. A sample that was preempted for a head does not pass it again. A prompt
of several samples is never backfilled, and neither is a beam: a step that frees a sequence cannot fork it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from quire.protocol.outcomes import NULL_BLOCK

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.room_ahead import block_count_of, last_of

DEPTH = 32  # samples behind a head that are looked at in a turn


class Reservation(NamedTuple):
    """Reservation of the head: its latest start, and the blocks that it leaves free then.

    Attributes:
        turn_count: turns until the head starts at the latest.
        spare: blocks that are free then beyond its own. Backfilled samples that run longer take theirs from these.
    """

    turn_count: int
    spare: int

    def admits(self, turn_count: int, block_count: int) -> bool:
        """Tells whether a sample that runs for so many turns, on so many blocks at its end, does not delay the head."""
        return turn_count <= self.turn_count or block_count <= self.spare

    def after(self, turn_count: int, block_count: int) -> Reservation:
        """Returns the reservation that is left once that sample is admitted."""
        return self if turn_count <= self.turn_count else self._replace(spare=self.spare - block_count)


def reserve(
    running: Sequence[Sample],
    *,
    blocks: int,
    places: int,
    needed: int,
    needed_places: int,
    block_size: int,
    sequence_tokens_max: int,
) -> Reservation:
    """Returns the reservation of a head that needs so many blocks and places.

    Args:
        running: all samples that hold blocks.
        blocks: free blocks, and those held ahead.
        places: samples that may run beside these.
        needed: blocks of the head.
        needed_places: its samples.
        block_size: tokens per block.
        sequence_tokens_max: the longest sequence, with whose last token a sample ends.
    """
    ends = sorted(
        (turns_left(each, sequence_tokens_max), each.table_length - block_count_of(each, block_size))
        for each in running
    )
    left = len(ends)
    for turn_count, held in ends:
        left -= 1
        blocks += held
        places += 1
        growth = left * (turn_count // block_size + 1)
        if needed + left + 1 <= blocks - growth and needed_places <= places:
            return Reservation(turn_count, blocks - growth - needed - left - 1)
    return Reservation(ends[-1][0] if ends else 0, 0)


def turns_left(sample: Sample, sequence_tokens_max: int) -> int:
    """Counts the turns after which a sample has ended at the latest, if its prompt takes one."""
    return last_of(sample, sequence_tokens_max) + 1 - len(sample.tokens) + (sample.computed < len(sample.tokens) - 1)


def blocks_at_end(sample: Sample, block_size: int, sequence_tokens_max: int) -> int:
    """Counts the blocks that a sample holds in the end."""
    return -(-last_of(sample, sequence_tokens_max) // block_size)


def places_of(sample: Sample) -> int:
    """Counts the samples that will run because of this one: the first brings all forks of its request."""
    is_first = sample.index == 0 and sample.output_token_count == 0 and sample.draws
    if not is_first:
        return 1
    return sample.request.sampling.sample_count if sample.is_beam else len(sample.request.samples)


def own_block_count(samples: Collection[Sample], others: Iterable[Sample], block_size: int) -> int:
    """Counts the blocks, of each group, that are free once these samples are, and are not yet counted as held ahead."""
    tables = [each.tables for each in others]
    counts = []
    for group in range(max((len(sample.tables) for sample in samples), default=0)):
        held = {block for sample in samples if sample.tables for block in sample.tables[group]} - {NULL_BLOCK}
        counts.append(len(held.difference(*(each[group] for each in tables if each))))
    return max(0, min(counts, default=0) - sum(block_count_of(sample, block_size) for sample in samples))


def held_count(digests: Sequence[bytes], running: Sequence[Sample], block_size: int) -> int:
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
