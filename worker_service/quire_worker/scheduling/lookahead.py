"""Who decodes on after a pass, and how many blocks are held ahead; how many to ask for is decided by
`quire.session.lookahead`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.session.lookahead import Decoding

from quire_worker.scheduling.plan import Work
from quire_worker.scheduling.request import Sample


def going_on(work: Iterable[Work], sequence_tokens_max: int) -> list[Decoding[Sample]]:
    """Returns the samples that decode on after this pass, if none of them stops."""
    return [
        Decoding(sample, sample.granted, len(sample.tokens) + 1, last)
        for sample, last in [
            (item.sample, _last(item.sample, sequence_tokens_max)) for item in work if item.is_complete
        ]
        if len(sample.tokens) < last
    ]


def tokens_after(running: Iterable[Sample], work: Iterable[Work], samples: Sequence[Decoding[Sample]]) -> int:
    """Counts the tokens of the pass after this one, of those who run."""
    counts = dict(work)
    return len(samples) + sum(len(sample.tokens) - sample.computed - counts.get(sample, 0) for sample in running)


def block_count_of(sample: Sample, block_size: int) -> int:
    """Counts the blocks that a sample holds beyond those of its tokens."""
    return max(0, len(sample.table) - -(-len(sample.tokens) // block_size))


def _last(sample: Sample, sequence_tokens_max: int) -> int:
    """Counts the tokens of a sample that are ever computed: the last one has no successor, so it is not."""
    return min(len(sample.request.prompt) + sample.request.sampling.max_tokens, sequence_tokens_max) - 1
