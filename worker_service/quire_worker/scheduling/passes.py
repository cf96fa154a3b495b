"""Where a pass over a sample ends: at its budget, at a boundary, or where more would not fit the pool at once.

In a pool with recurrent states a commit makes a checkpoint only at a boundary, and only if nothing behind it was
granted: a pass ends there, what the sample holds beyond is given back with its commit, and asked for again in the same
step. Boundaries are the last block edge of the prompt that leaves a token to compute, where its next turn begins, and
the junction, where the allocator says that other prompts part from this one (`GrowOutcome.junction_token_count`).

    prompt of 96 tokens, blocks of 16, junction 64:     [0, 64)  commit  [64, 80)  commit  [80, 96)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quire_worker.scheduling.request import Sample


def boundaries_of(sample: Sample, junction_token_count: int, block_size: int) -> tuple[int, ...]:
    """Returns token counts at which a state of a sample that was just let in is worth keeping; rising."""
    ends = {(len(sample.tokens) - 1) // block_size * block_size, junction_token_count}
    return tuple(sorted(ends - {0}))


def pass_token_count(sample: Sample, budget: int) -> int:
    """Tokens that its next pass computes, of at most `budget`."""
    end = len(sample.tokens)
    for boundary in sample.boundaries:
        if sample.computed < boundary < end:
            end = boundary
            break
    count = min(end - sample.computed, budget)
    return min(count, sample.pass_token_count_max) if sample.pass_token_count_max else count


def is_at_boundary(sample: Sample) -> bool:
    """Tells whether its last pass ended where a checkpoint belongs, and was not committed yet."""
    return sample.committed < sample.computed and sample.computed in sample.boundaries


def to_cut(samples: Iterable[Sample], filled: Collection[Sample], parents: Collection[Sample | None]) -> list[Sample]:
    """Returns those that hold room beyond what they have computed and must not: whose commit is to make a checkpoint,
    or whose state is to be shared. `filled` are those that are committed now."""
    return [
        sample
        for sample in samples
        if sample.sequence_id
        and sample.granted > sample.computed
        and (sample in parents or (sample in filled and sample.computed in sample.boundaries))
    ]
