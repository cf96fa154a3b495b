"""Room for tokens to come, so that decoding goes on while the allocator is slow, or gone.

Of a sample that decodes, in tokens, with `length` its tokens (the one that is being sampled is one of them) and `last`
those that it can ever compute:

    [0, length)                                needed
    [length, min(length + ahead, last))        granted ahead, rounded up to whole blocks

Whoever misses some of this asks for one block more than it misses, and so does everybody who has not got that much:
all are asked for together, once in two blocks' length of turns as long as nobody joins. Nobody pays for it: only free
blocks that no sample needs are taken ahead, for the oldest first; where a sample to be let in or one that runs needs
them, the newest give them back in the same step. For admission they are as good as free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire_worker.plan import Work
from quire_worker.request import Sample


class GoesOn(NamedTuple):
    """A sample that decodes on after a pass: its tokens then, and those that it can ever compute."""

    sample: Sample
    length: int
    last: int

    @property
    def lacks_block(self) -> bool:
        """Whether its next token has no room: a block is needed, whatever is asked for ahead."""
        return self.length > self.sample.granted


def going_on(work: Iterable[Work], sequence_tokens_max: int) -> list[GoesOn]:
    """Whom this pass neither leaves with a chunk of its prompt, nor completes, if nobody stops."""
    return [
        GoesOn(sample, len(sample.tokens) + 1, last)
        for sample, last in [
            (item.sample, _last(item.sample, sequence_tokens_max)) for item in work if item.is_complete
        ]
        if len(sample.tokens) < last
    ]


def needs_of(
    samples: Sequence[GoesOn], free_block_count: int, *, ahead_tokens: int, block_size: int
) -> list[tuple[Sample, int]]:
    """Who asks for room while they are computed, and for how many tokens: whole blocks.

    A sample whose next token has no room asks for it in any case; the rest is within `free_block_count`.
    """
    if all(sample.granted >= min(length + ahead_tokens, last) for sample, length, last in samples):
        return []
    more = ahead_tokens + block_size if ahead_tokens else 0
    spare = free_block_count - sum(each.lacks_block for each in samples)
    asks = []
    for each in samples:
        granted = each.sample.granted + block_size * each.lacks_block
        missing = -(-min(each.length + more, each.last) // block_size) - granted // block_size
        count = max(0, min(missing, spare))
        spare -= count
        if granted + count * block_size > each.sample.granted:
            asks.append((each.sample, granted + count * block_size))
    return asks


def tokens_after(running: Iterable[Sample], work: Iterable[Work], samples: Sequence[GoesOn]) -> int:
    """Tokens of the pass after this one, of those who run."""
    counts = dict(work)
    return len(samples) + sum(len(sample.tokens) - sample.computed - counts.get(sample, 0) for sample in running)


def block_count_of(sample: Sample, block_size: int) -> int:
    """Blocks that it holds beyond those of its tokens."""
    return max(0, len(sample.table) - -(-len(sample.tokens) // block_size))


def give_back(running: Sequence[Sample], block_count: int, block_size: int) -> dict[Sample, int]:
    """Who of `running`, which is sorted by age, gives back so many blocks or all that there are, and for how many
    tokens each keeps room."""
    kept: dict[Sample, int] = {}
    for sample in reversed(running):
        count = min(block_count, block_count_of(sample, block_size))
        if count > 0:
            kept[sample] = sample.granted - count * block_size
            block_count -= count
    return kept


def _last(sample: Sample, sequence_tokens_max: int) -> int:
    """Tokens of it that can ever be computed: nothing follows the last one."""
    return min(len(sample.request.prompt) + sample.request.sampling.max_tokens, sequence_tokens_max) - 1
