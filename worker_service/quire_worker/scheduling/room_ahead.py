"""Samples that continue to decode after a pass, and the blocks that they hold ahead.

`quire.session.lookahead` decides how many blocks to ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.session.lookahead import Decoding

from quire_worker.scheduling.plan import Work
from quire_worker.scheduling.request import Sample


def going_on(work: Iterable[Work], sequence_tokens_max: int) -> list[Decoding[Sample]]:
    """Returns the samples that continue to decode after this pass, unless they stop.

    Beams get no blocks ahead, because the search has not yet chosen the beams that continue.
    """
    return [
        Decoding(sample, sample.granted, len(sample.tokens) + 1, last_of(sample, sequence_tokens_max))
        for sample in (item.sample for item in work if item.is_complete)
        if not sample.has_ended and not sample.is_beam and len(sample.tokens) < last_of(sample, sequence_tokens_max)
    ]


def tokens_after(running: Iterable[Sample], work: Iterable[Work], samples: Sequence[Decoding[Sample]]) -> int:
    """Returns the number of tokens that the running samples need in the pass after this pass."""
    counts = {item.sample: item.token_count for item in work}
    return len(samples) + sum(len(sample.tokens) - sample.computed - counts.get(sample, 0) for sample in running)


def next_chunks(
    running: Iterable[Sample], work: Iterable[Work], budget: int, block_size: int
) -> list[tuple[Sample, int]]:
    """Returns the samples that have an unfinished prompt after this pass, and no blocks yet for the next chunk.

    Each sample comes with the number of tokens that it needs blocks for. The next pass has `budget` tokens.
    """
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
    """Returns the number of blocks that a grow takes.

    For a fork, the count includes a copy of its last, partly filled block.
    """
    return -(-(token_count - sample.granted) // block_size)


def block_count_of(sample: Sample, block_size: int) -> int:
    """Returns how many blocks of each group a sample holds beyond the blocks of its tokens."""
    return max(0, sample.table_length - -(-len(sample.tokens) // block_size))


def last_of(sample: Sample, sequence_tokens_max: int) -> int:
    """Returns how many tokens of a sample are ever computed: all except the last token, because no token follows it.

    If no token is sampled, all tokens of the sample are computed.
    """
    if not sample.draws:
        return len(sample.tokens)
    return min(len(sample.request.prompt) + sample.request.sampling.max_tokens, sequence_tokens_max) - 1
