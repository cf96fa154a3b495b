"""Pages of preempted samples in host memory, so that what was computed need not be computed again.

A preempted sample can come back in two ways: its tokens are computed again, or its pages are copied out now and back
later. Which one is cheaper is estimated from what this worker has measured: seconds of a pass for each token of a
prompt (`pace.py`), and seconds for each block that was swapped. While nothing was swapped yet, it is tried.

Of a preempted sample, in tokens:

    [0, first)         not swapped: other samples that run hold these blocks, so that they will be hit; or a window has
                       let go of them, so that the pages are not there any more
    [first, end)       in host memory, one *slot* for each block of each group
    [end, length)      never computed: the token that was sampled last, or the rest of the prompt

When it runs again, what the allocator finds in its cache is hit, the rest of `[0, first)` is computed, and `[first,
end)` is restored: its blocks are granted, filled and committed as those of a prompt are, chunk by chunk, only that a
pass copies pages instead of computing tokens. A recurrent state is one of the pages; it is right as soon as all are
restored, and nobody reads it before.

    slots   free -> a swap takes them -> restored or ended -> free

A swap out runs before any pass that could write to the same blocks for somebody else, because both are in the order of
batches; a swap in runs after all swaps out of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.protocol.outcomes import NULL_BLOCK

from quire_worker.scheduling.pace import Pace
from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.slots import Swapped


class SwapOut(NamedTuple):
    """Blocks of a sample to be copied into slots of host memory."""

    sample: Sample
    blocks: list[int]
    slots: list[int]


@dataclass(slots=True)
class SwapCost:
    """Cost of swapping so far: blocks moved, out or in, and seconds."""

    block_count: int = 0
    seconds: float = 0.0

    def seconds_for(self, block_count: int) -> float:
        """Returns the seconds that so many blocks will take; 0 while nothing is known."""
        return block_count * self.seconds / self.block_count if self.block_count else 0.0


class SwapSpace:
    """Slots of host memory.

    Args:
        slot_count: blocks that fit; 0: nobody is swapped.
        pace: of passes.

    Attributes:
        swap_count: samples that were swapped out.
        out_count, in_count: blocks that were moved each way.
    """

    def __init__(self, slot_count: int, pace: Pace) -> None:
        self.slot_count = slot_count
        self.cost = SwapCost()
        self.swap_count = 0
        self.out_count = 0
        self.in_count = 0
        self._pace = pace
        self._free = list(range(slot_count))

    @property
    def free_count(self) -> int:
        """Counts the slots that hold nothing of use."""
        return len(self._free)

    def swap_out(self, sample: Sample, shared_tokens: int, block_size: int) -> SwapOut | None:
        """Takes slots for what a sample has computed, if that is cheaper than computing it again and there is room;
        the sample keeps a note of it. None where it is computed again.

        Args:
            sample: the sample to be preempted, with its blocks.
            shared_tokens: of it that others who run hold, too.
            block_size: tokens per block.
        """
        first = max(shared_tokens, max(sample.fallen, default=0) * block_size)
        if not self.slot_count or sample.is_scored or sample.fork_of is not None or first >= sample.computed:
            return None
        positions = range(first // block_size, -(-sample.computed // block_size))
        blocks = [table[position] for table in sample.tables for position in positions] + sample.states
        assert NULL_BLOCK not in blocks, f"{sample.age} swaps a block that it does not hold"
        again_s = self._pace.seconds_for(sample.computed - first)
        is_dearer = again_s is not None and 2 * self.cost.seconds_for(len(blocks)) > again_s
        if len(blocks) > len(self._free) or is_dearer:
            return None
        slots = [self._free.pop() for _ in blocks]
        sample.swapped = Swapped(first, sample.computed, slots)
        self.swap_count += 1
        self.out_count += len(blocks)
        return SwapOut(sample, blocks, slots)

    def release(self, sample: Sample) -> None:
        """Frees the slots of a sample that needs them no more."""
        if sample.swapped is not None:
            self._free += sample.swapped.slots
            sample.swapped = None


def pages_to_restore(sample: Sample, start: int, end: int, block_size: int) -> tuple[list[int], list[int]]:
    """Returns the slots of tokens `[start, end)` of a sample that was swapped, and the blocks that they belong into."""
    swapped = sample.swapped
    assert swapped is not None, f"{sample.age} was not swapped"
    base = swapped.first // block_size
    count = -(-swapped.end // block_size) - base
    slots, blocks = list[int](), list[int]()
    for group, table in enumerate(sample.tables):
        for position in range(start // block_size, -(-end // block_size)):
            if table[position] != NULL_BLOCK:  # it fell out of the window already
                slots.append(swapped.slots[group * count + position - base])
                blocks.append(table[position])
    slots += swapped.slots[len(sample.tables) * count :]
    return slots, blocks + sample.states


def can_swap(has_states: bool, windows: Sequence[object]) -> bool:
    """Tells whether a pool's samples can be swapped: with states and windows, a prompt is granted chunk by chunk, and a
    checkpoint would be made of a state that is not restored yet."""
    return not (has_states and windows)
