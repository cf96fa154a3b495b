"""EASY backfilling: admits later samples before the first sample that does not fit, without delaying that sample.

The first sample in order that lacks blocks or a place is the *head*. Later samples may pass it if they do not delay it
(Lifka, "The ANL/IBM SP Scheduling System", 1995). The latest end of each sample is known from `max_tokens`, and so is
the latest start of the head:

    start   the first turn in which enough samples have ended for the head to fit, if all of them run to their end
    spare   blocks that are free then beyond those of the head

A later sample is *backfilled* if it fits now, and either ends before that start or needs no more than the spare blocks.

A stop token can end a sample sooner, and then the head could start sooner, too. Counted in turns, the head still never
starts later than without backfilling: a backfilled sample uses only resources that are left over while its head waits.
A backfilled sample gets a pass's tokens after all other samples. If the head or a running sample's next token needs its
blocks, the backfilled sample is preempted in the same step. A sample that was preempted for a head does not pass it
again. Prompts with several samples and beams are never backfilled, because a step that frees a sequence cannot fork it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from quire.protocol.outcomes import NULL_BLOCK

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.room_ahead import block_count_of, last_of

DEPTH = 32  # maximum number of samples behind the queue's head that are considered in a turn


class Reservation(NamedTuple):
    """A reservation for the head: its latest start, and the blocks that remain free after it.

    Attributes:
        turn_count: turns until the latest start of the head.
        spare: blocks that are free then beyond the head's. Backfilled samples that run longer use these.
    """

    turn_count: int
    spare: int

    def admits(self, turn_count: int, block_count: int) -> bool:
        """Returns whether a sample that runs for `turn_count` turns, and then holds `block_count` blocks, may pass."""
        return turn_count <= self.turn_count or block_count <= self.spare

    def after(self, turn_count: int, block_count: int) -> Reservation:
        """Returns the reservation after this sample is admitted."""
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
    """Returns the reservation of a head that needs `needed` blocks and `needed_places` places.

    Args:
        running: all samples that hold blocks.
        blocks: free blocks, plus blocks held ahead.
        places: the number of further samples that may run.
        needed: blocks that the head needs.
        needed_places: the number of the head's samples.
        block_size: tokens per block.
        sequence_tokens_max: the most tokens of a sequence; a sample ends when it has so many.
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
    """Returns the number of turns until a sample has ended at the latest, if its prompt takes one turn."""
    return last_of(sample, sequence_tokens_max) + 1 - len(sample.tokens) + (sample.computed < len(sample.tokens) - 1)


def blocks_at_end(sample: Sample, block_size: int, sequence_tokens_max: int) -> int:
    """Returns the blocks that a sample holds at its end."""
    return -(-last_of(sample, sequence_tokens_max) // block_size)


def places_of(sample: Sample) -> int:
    """Returns how many samples run if this sample does: the first sample of a request brings all its forks."""
    is_first = sample.index == 0 and sample.output_token_count == 0 and sample.draws
    if not is_first:
        return 1
    return sample.request.sampling.sample_count if sample.is_beam else len(sample.request.samples)


def own_block_count(samples: Collection[Sample], others: Iterable[Sample], block_size: int) -> int:
    """Returns the blocks per group that only these samples hold, except blocks that already count as held ahead."""
    tables = [each.tables for each in others]
    counts = []
    for group in range(max((len(sample.tables) for sample in samples), default=0)):
        held = {block for sample in samples if sample.tables for block in sample.tables[group]} - {NULL_BLOCK}
        counts.append(len(held.difference(*(each[group] for each in tables if each))))
    return max(0, min(counts, default=0) - sum(block_count_of(sample, block_size) for sample in samples))


def held_count(digests: Sequence[bytes], running: Sequence[Sample], block_size: int) -> int:
    """Returns the number of leading blocks that other samples hold.

    If two digests at the same position are equal, all blocks before that position are equal, too.
    """
    count = 0
    for sample in running:
        end = min(len(digests), sample.computed // block_size)
        for digest in sample.digests(block_size, count, end):
            if digest != digests[count]:
                break
            count += 1
    return count
