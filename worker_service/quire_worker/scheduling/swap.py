"""Pages of preempted samples in host memory, so that their tokens need not be computed again.

A preempted sample can come back in two ways: its tokens are computed again, or its pages are copied out now and back
later. The cheaper way is estimated from this worker's measurements: seconds of a pass per prompt token (`pace.py`), and
seconds per swapped block. Before any swap was measured, swapping is tried.

The tokens of a preempted sample:

    [0, first)      not swapped: other running samples hold these blocks, so they will be hit; or the blocks fell out of
                    a window, and their pages are gone
    [first, end)    in host memory, one *slot* for each block of each group
    [end, length)   never computed: the last sampled token, or the rest of the prompt

When the sample runs again, blocks in the allocator's cache are hit, the rest of `[0, first)` is computed, and `[first,
end)` is restored. Restored blocks are granted, filled and committed chunk by chunk like a prompt's blocks, but a pass
copies their pages instead of computing tokens. A recurrent state is one of the pages. No pass reads the restored state
before all pages are restored.

    slots   free -> taken by a swap -> restored or ended -> free

Swaps and passes run in the order of batches, so a swap out copies its blocks before any pass overwrites them. In one
batch all swaps out run before the swaps in.
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
    """Blocks of a sample that are copied into slots of host memory."""

    sample: Sample
    blocks: list[int]
    slots: list[int]


@dataclass(slots=True)
class SwapCost:
    """Measured cost of swapping: blocks moved in either direction, and seconds."""

    block_count: int = 0
    seconds: float = 0.0

    def seconds_for(self, block_count: int) -> float:
        """Returns the expected seconds for `block_count` blocks; 0 before any was measured."""
        return block_count * self.seconds / self.block_count if self.block_count else 0.0


class SwapSpace:
    """The slots of host memory.

    Args:
        slot_count: the number of slots, for one block each; 0: samples are not swapped.
        pace: the speed of this worker's passes.

    Attributes:
        swap_count: number of samples that were swapped out.
        out_count, in_count: number of blocks moved out and in.
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
        """Returns the number of free slots."""
        return len(self._free)

    def swap_out(self, sample: Sample, shared_tokens: int, block_size: int) -> SwapOut | None:
        """Takes slots for a sample's computed tokens, and notes them in the sample. Returns the copies to make.

        Returns None if too few slots are free, or if computing the tokens again is cheaper.

        Args:
            sample: the sample that is preempted, while it still has its blocks.
            shared_tokens: the number of its leading tokens in blocks that other running samples also hold.
            block_size: tokens per block.
        """
        first = max(shared_tokens, max(sample.fallen, default=0) * block_size)
        if not self.slot_count or sample.needs_all_logits or sample.fork_of is not None or first >= sample.computed:
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
        """Frees the slots of a sample that no longer needs them."""
        if sample.swapped is not None:
            self._free += sample.swapped.slots
            sample.swapped = None


def pages_to_restore(sample: Sample, start: int, end: int, block_size: int) -> tuple[list[int], list[int]]:
    """Returns the slots of tokens `[start, end)` of a swapped sample, and the blocks to copy them to."""
    swapped = sample.swapped
    assert swapped is not None, f"{sample.age} was not swapped"
    base = swapped.first // block_size
    count = -(-swapped.end // block_size) - base
    slots, blocks = list[int](), list[int]()
    for group, table in enumerate(sample.tables):
        for position in range(start // block_size, -(-end // block_size)):
            if table[position] != NULL_BLOCK:  # The position of a null block has already left the window.
                slots.append(swapped.slots[group * count + position - base])
                blocks.append(table[position])
    slots += swapped.slots[len(sample.tables) * count :]
    return slots, blocks + sample.states


def can_swap(has_states: bool, windows: Sequence[object]) -> bool:
    """Returns whether a pool's samples can be swapped.

    Pools with both states and windows cannot: prompts are granted chunk by chunk, and a checkpoint would be made of a
    state that is not restored yet.
    """
    return not (has_states and windows)
