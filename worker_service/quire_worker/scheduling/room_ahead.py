"""Who decodes on after a pass, and how many blocks are held ahead; how many to ask for is decided by
`quire.session.lookahead`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.session.lookahead import Decoding

from quire_worker.scheduling.plan import Work
from quire_worker.scheduling.request import Sample


def going_on(work: Iterable[Work], sequence_tokens_max: int) -> list[Decoding[Sample]]:
    """Returns the samples that decode on after this pass, if none of them stops. Beams take no room ahead: which of
    them go on is not known."""
    return [
        Decoding(sample, sample.granted, len(sample.tokens) + 1, last_of(sample, sequence_tokens_max))
        for sample in (item.sample for item in work if item.is_complete)
        if not sample.has_ended and not sample.is_beam and len(sample.tokens) < last_of(sample, sequence_tokens_max)
    ]


def tokens_after(running: Iterable[Sample], work: Iterable[Work], samples: Sequence[Decoding[Sample]]) -> int:
    """Counts the tokens of the pass after this one, of those who run."""
    counts = {item.sample: item.token_count for item in work}
    return len(samples) + sum(len(sample.tokens) - sample.computed - counts.get(sample, 0) for sample in running)


def next_chunks(
    running: Iterable[Sample], work: Iterable[Work], budget: int, block_size: int
) -> list[tuple[Sample, int]]:
    """Returns whose prompt this pass leaves unfinished and whose next chunk has no room yet, and for how many tokens
    the next pass, of `budget` tokens, needs it."""
    chunks, counts = [], {item.sample: item.token_count for item in work}
    for sample in running:
        computed = sample.computed + counts.get(sample, 0)
        token_count = min(max(1, len(sample.tokens) - computed), budget)
        if sample.pass_token_count_max:
            token_count = min(token_count, sample.pass_token_count_max)
        budget -= token_count
        end = -(-(computed + token_count) // block_size) * block_size
        if sample in counts and computed < len(sample.tokens) and end > sample.granted:
            chunks.append((sample, end))
    return chunks


def grow_block_count(sample: Sample, token_count: int, block_size: int) -> int:
    """Counts the blocks that a grow to so many tokens takes; that of a fork copies the one that it has begun."""
    return -(-(token_count - sample.granted) // block_size)


def block_count_of(sample: Sample, block_size: int) -> int:
    """Counts the blocks of each group that a sample holds beyond those of its tokens."""
    return max(0, sample.table_length - -(-len(sample.tokens) // block_size))


def last_of(sample: Sample, sequence_tokens_max: int) -> int:
    """Counts the tokens of a sample that are ever computed: the last one has no successor, so it is not. Where none is
    drawn, those that it has are all."""
    if not sample.draws:
        return len(sample.tokens)
    return min(len(sample.request.prompt) + sample.request.sampling.max_tokens, sequence_tokens_max) - 1
