"""The worth of cached blocks, which decides how early they are evicted.

| worth | blocks | order |
| --- | --- | --- |
| SPARE | windows and checkpoints that no stop needs; the end of a run after its deepest stop | of release |
| ASIDE | blocks that only continued stops need, unless prompts diverge early | of release |
| RANKED | runs with a stop at their end or with children; without full attention, blocks of a stop | of the policy |
| LED | blocks of windows and states that a stop needs, if full attention has the same prefix | with the run |

So a block that no hit can need is evicted before any block that a hit can need. A chat is evicted as a whole, or back
to an earlier stop. In pools with `dense` retention, and in pools of full attention alone, all blocks are RANKED.

    chat of 8,192 tokens, blocks of 16, full attention and 5 windows of 1,024: 512 blocks are RANKED, 5 x 64 LED, and
    5 x 448 SPARE

`eviction/queue.py` orders candidates by worth, and `eviction/policies.py` orders the RANKED ones among themselves.
"""

from __future__ import annotations

from quire_allocator.core.eviction.queue import ASIDE, BURDEN_MAX, LED, RANKED, SPARE
from quire_allocator.core.retention.stop import Run, Unit
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, PoolSpec


class Worth:
    """Computes the worth of blocks of one pool.

    Attributes:
        is_even: whether all blocks are RANKED, and no stops are made.
    """

    def __init__(self, spec: PoolSpec) -> None:
        kinds = {group.kind for group in spec.groups}
        self.is_even = spec.retention == "dense" or kinds == {GroupKind.FULL_ATTENTION}
        self._full_block_sizes = [group.block_size for group in spec.groups if group.kind is GroupKind.FULL_ATTENTION]
        self._needed = LED if self._full_block_sizes else RANKED
        self._edge_tokens = spec.edge_tokens

    def of_unit(self, unit: Unit) -> int:
        """Returns the worth of a unit: SPARE, ASIDE, RANKED or LED."""
        if self.is_even:
            return RANKED
        if unit.needed_count:
            return self._needed
        return ASIDE if unit.aside_count else SPARE

    def of_run(self, run: Run) -> int:
        """Returns SPARE if the other groups cannot serve a hit that ends where a run does; else RANKED."""
        if self.is_even or run.children:
            return RANKED
        return RANKED if run.stops and run.stops[-1].token_count == run.token_count() else SPARE

    def burden(self, run: Run) -> int:
        """Returns `Entry.burden`: log2((own + led) / own) in blocks, rounded down; 0 if no stop is in the run.

        Own blocks are the path's blocks since the previous stop. Led blocks are evicted with the run. Example: 4 own
        and 60 led give 4. A stop of an answer counts as if the answer were empty.
        """
        if not run.stops:
            return 0
        stop = run.stops[-1]
        prompt_end = stop.token_count - stop.answer_token_count
        token_count = max(self._edge_tokens, prompt_end - run.token_count_before_stop())
        own = sum([token_count // block_size for block_size in self._full_block_sizes])
        led = sum([unit.block_count for unit in stop.needed if unit.needed_count == 1])
        return min(BURDEN_MAX, ((own + led) // own).bit_length() - 1)

    def leaving(self, run: Run, wanted: int) -> int:
        """Returns how many positions a run loses at once if `wanted` blocks are needed. At most as many as prompts
        usually leave behind at its end, and none before the next place where a hit can end."""
        width = run.scope.manager.width
        positions = min(run.size // DIGEST_BYTES, -(-wanted // width))
        if run.left_behind:
            positions = min(positions, max(1, run.left_behind // width))
        if self.is_even:
            return positions
        # A RANKED run loses only its last position: the stop there ends, so the positions before it become SPARE.
        return 1 if run.worth == RANKED else min(positions, _positions_to_stop(run))


def _positions_to_stop(run: Run) -> int:
    """Counts the positions of a run after the last stop before its end; all of them if there is none."""
    block_size, end = run.scope.manager.block_size, run.end_position
    for stop in reversed(run.stops):
        if stop.token_count < end * block_size:
            return end - stop.token_count // block_size
    return end - run.first_position
