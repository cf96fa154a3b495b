"""Chooses where a pass over a sample ends: at its budget, at a stop, or at the most tokens that fit the pool at once.

In a pool with recurrent states, a commit makes a checkpoint only at a stop, and only if no block behind it is granted.
So a pass ends there. The commit gives back the blocks after the stop, and the same step asks for them again. The
allocator names the stops of a sample when it admits the sample (`pass_ends`).

    prompt of 96 tokens, blocks of 16, junction 64:     [0, 64)  commit  [64, 80)  commit  [80, 96)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from quire.protocol.outcomes import GrowOutcome

from quire_worker.scheduling.plan import Work
from quire_worker.scheduling.request import Sample


def pass_ends(grown: GrowOutcome, restored: int) -> tuple[int, ...]:
    """Returns the stops of an admitted sample in rising order.

    Stops among its first `restored` tokens have no known state.
    """
    return tuple(stop for stop in grown.stops if stop > restored)


class Standing(NamedTuple):
    """The state of a sample after its work under way: the tokens `[start, length)` are not computed."""

    start: int
    length: int


def standing(sample: Sample, work: Work | None) -> Standing:
    """Returns the standing of a sample. `work` is the sample's part of the pass under way, if any."""
    if work is None:
        return Standing(sample.computed, len(sample.tokens))
    return Standing(work.end, len(sample.tokens) + work.is_complete)


def pass_token_count(sample: Sample, at: Standing, budget: int) -> int:
    """Returns how many tokens of the sample the next pass computes, at most `budget`."""
    end = at.length
    if sample.swapped is not None and at.start < sample.swapped.end:
        end = sample.swapped.end if at.start >= sample.swapped.first else min(end, sample.swapped.first)
        if at.start >= sample.swapped.first:
            count = min(end - at.start, budget)
            return min(count, sample.pass_token_count_max) if sample.pass_token_count_max else count
    for stop in sample.pass_ends:
        if at.start < stop < end:
            end = stop
            break
    count = min(end - at.start, budget)
    return min(count, sample.pass_token_count_max) if sample.pass_token_count_max else count


def is_at_stop(sample: Sample, at: Standing) -> bool:
    """Returns whether the sample's last pass ended at a stop and is not committed yet."""
    return sample.committed < at.start and at.start in sample.pass_ends


def to_cut(samples: Iterable[Sample], filled: Collection[Sample], parents: Collection[Sample | None]) -> list[Sample]:
    """Returns the samples that must give back the blocks behind their computed tokens.

    Their commit makes a checkpoint, or their state will be shared. `filled` are the samples that commit now.
    """
    return [
        sample
        for sample in samples
        if sample.sequence_id
        and sample.granted > sample.computed
        and (sample in parents or (sample in filled and sample.computed in sample.pass_ends))
    ]
