"""Room for tokens to come, so that decoding goes on while the allocator is slow, or gone.

Of a sample that decodes, in tokens, with `length` its tokens (the one that is being sampled is one of them) and `last`
those that it can ever compute:

    [0, length)                                needed
    [length, min(length + ahead, last))        granted ahead, rounded up to whole blocks

It asks whenever a block of this is missing, so once per block. Nobody pays for it: only free blocks that no sample
needs are taken ahead, for the oldest first; where a sample to be let in or one that runs needs them, the newest give
them back in the same step. For admission they are as good as free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire_worker.plan import Work
from quire_worker.request import Sample


def needs_of(
    work: Iterable[Work], free_block_count: int, *, ahead_tokens: int, block_size: int, sequence_tokens_max: int
) -> list[tuple[Sample, int]]:
    """Who asks for room while `work` is computed, and for how many tokens: whole blocks.

    A sample whose next token has no room asks for it in any case; the rest is within `free_block_count`. Prompts of
    which a chunk is left, and samples that this pass completes, ask for nothing.
    """
    lengths = [(item.sample, len(item.sample.tokens) + 1) for item in work if item.is_complete]
    going_on = [
        (sample, length, last) for sample, length in lengths if length <= (last := _last(sample, sequence_tokens_max))
    ]
    spare = free_block_count - sum(length > sample.granted for sample, length, _ in going_on)
    asks = []
    for sample, length, last in going_on:
        granted = sample.granted + block_size * (length > sample.granted)
        missing = -(-min(length + ahead_tokens, last) // block_size) - granted // block_size
        count = max(0, min(missing, spare))
        spare -= count
        if granted + count * block_size > sample.granted:
            asks.append((sample, granted + count * block_size))
    return asks


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
