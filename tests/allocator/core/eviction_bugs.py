"""Planted errors in the rules of eviction and trimming. `test_eviction_rules.py` has the rules."""

from __future__ import annotations

from typing import Any
from unittest import mock

from quire_allocator.core.eviction.policies import ReuseValue
from quire_allocator.core.eviction.queue import Candidates, Entry
from quire_allocator.core.eviction.reuse_model import Ghosts, ReuseModel
from quire_allocator.core.groups.full import FullAttentionManager
from quire_allocator.core.groups.run_tree import RunTree

from tests.simulation.planting import Planted, plant

ERRORS: dict[str, Planted] = {}


@plant(RunTree, "is_extendable", ERRORS)
def _a_run_with_hits_is_extended(original: Any, self: Any, run: Any) -> bool:
    return run.live == 1 and not run.children and run.parent is not None


@plant(RunTree, "evict", ERRORS)
def _one_position_more_than_the_spare_ones_is_trimmed(original: Any, self: Any, entry: Any, wanted: int) -> int:
    entry.left_behind += self.width if entry.left_behind else 0
    return int(original(self, entry, wanted))


@plant(ReuseValue, "evicted", ERRORS)
def _a_trimmed_entry_keeps_its_place(original: Any, self: Any, entry: Any, block_count: int) -> bool:
    original(self, entry, block_count)
    return False


@plant(ReuseValue, "evicted", ERRORS)
def _a_trimmed_entry_counts_as_whole(original: Any, self: Any, entry: Any, block_count: int) -> bool:
    is_whole, moves = entry.is_whole, original(self, entry, block_count)
    entry.is_whole = is_whole
    return bool(moves)


@plant(ReuseValue, "split", ERRORS)
def _what_was_left_behind_keeps_its_place(original: Any, self: Any, upper: Any, lower: Any) -> bool:
    original(self, upper, lower)
    return False


@plant(ReuseValue, "split", ERRORS)
def _what_was_shared_counts_as_left_behind(original: Any, self: Any, upper: Any, lower: Any) -> bool:
    hits, lower.hits = lower.hits, 0
    moves = original(self, upper, lower)
    lower.hits = hits
    return bool(moves)


@plant(ReuseValue, "split", ERRORS)
def _the_upper_part_loses_its_spare_end(original: Any, self: Any, upper: Any, lower: Any) -> bool:
    moves = original(self, upper, lower)
    upper.left_behind = 0
    return bool(moves)


@plant(RunTree, "evict", ERRORS)
def _a_trimmed_run_is_not_moved(original: Any, self: Any, entry: Any, wanted: int) -> int:
    with mock.patch.object(self._blocks, "push", lambda run: None if run is entry else self._blocks.queue.push(run)):
        return int(original(self, entry, wanted))


@plant(RunTree, "split", ERRORS)
def _a_run_that_was_cut_is_not_moved(original: Any, self: Any, run: Any, positions: int) -> Any:
    with mock.patch.object(self._blocks, "push"):
        return original(self, run, positions)


@plant(ReuseValue, "_end", ERRORS)
def _what_is_left_behind_still_waits(original: Any, self: Any, entry: Any, *, returned: bool) -> None:
    if returned:
        original(self, entry, returned=True)


@plant(ReuseValue, "cut", ERRORS)
def _the_upper_part_counts_as_whole(original: Any, self: Any, upper: Any, lower: Any) -> None:
    original(self, upper, lower)
    upper.is_whole = True


@plant(ReuseValue, "split", ERRORS)
def _the_lower_part_keeps_the_whole_spare_end(original: Any, self: Any, upper: Any, lower: Any) -> bool:
    spare, moves = lower.left_behind, original(self, upper, lower)
    if lower.live:
        lower.left_behind = spare
    return bool(moves)


@plant(ReuseValue, "hit", ERRORS)
def _only_the_last_wait_counts(original: Any, self: Any, entry: Any) -> None:
    age = self._time + entry.block_count - entry.released
    original(self, entry)
    if not entry.live:
        entry.gap = age


@plant(ReuseValue, "hit", ERRORS)
def _time_stands_while_blocks_are_shared(original: Any, self: Any, entry: Any) -> None:
    self._time -= entry.block_count
    original(self, entry)


@plant(ReuseValue, "hit", ERRORS)
def _a_shared_entry_counts_as_whole(original: Any, self: Any, entry: Any) -> None:
    is_whole = entry.is_whole
    original(self, entry)
    entry.is_whole = is_whole


@plant(ReuseValue, "_learn_left_behind", ERRORS)
def _what_is_left_behind_is_never_learned(original: Any, self: Any, origin: int, count: int) -> None:
    return None


@plant(ReuseValue, "stored", ERRORS)
def _below_popular_prefixes_is_as_below_any(original: Any, self: Any, entry: Any, parent: Any) -> None:
    original(self, entry, parent)
    entry.origin = min(entry.origin, 1)


@plant(ReuseValue, "released", ERRORS)
def _parts_have_a_spare_end(original: Any, self: Any, entry: Any) -> None:
    is_whole, entry.is_whole = entry.is_whole, True
    original(self, entry)
    entry.is_whole = is_whole


@plant(ReuseValue, "released", ERRORS)
def _a_whole_entry_may_be_spare(original: Any, self: Any, entry: Any) -> None:
    original(self, entry)
    if entry.is_whole and not entry.hits and self._left_behind[entry.origin] >= entry.block_count:
        entry.left_behind = entry.block_count


@plant(ReuseValue, "released", ERRORS)
def _one_hit_is_as_good_as_many(original: Any, self: Any, entry: Any) -> None:
    hits, entry.hits = entry.hits, min(entry.hits, 1)
    original(self, entry)
    entry.hits = max(hits, entry.hits)


@plant(ReuseValue, "released", ERRORS)
def _how_long_it_waited_does_not_matter(original: Any, self: Any, entry: Any) -> None:
    gap, entry.gap = entry.gap, 0
    original(self, entry)
    entry.gap = gap


@plant(Ghosts, "take", ERRORS)
def _the_hits_of_what_was_evicted_are_forgotten(original: Any, self: Any, key: bytes) -> Any:
    ghost = original(self, key)
    return ghost and ghost._replace(hits=0)


@plant(Ghosts, "add", ERRORS)
def _what_never_came_back_teaches_nothing(original: Any, self: Any, *args: Any) -> None:
    with mock.patch.object(self._model, "end"):
        original(self, *args)


@plant(ReuseModel, "learn", ERRORS)
def _what_began_is_not_forgotten(original: Any, self: Any, *times: int) -> None:
    started = self._started
    with mock.patch.object(type(self), "_learn"):  # The original method forgets before it learns.
        due = dict(self._due)
        original(self, *times)
    self._started = started
    for family in due:
        self._learn(family)


@plant(ReuseModel, "end", ERRORS)
def _ages_are_counted_in_single_blocks(original: Any, self: Any, kind: int, age: int, count: int, **rest: Any) -> None:
    original(self, kind, age * self.unit, count, **rest)


@plant(Candidates, "peek", ERRORS)
def _lanes_are_never_compared_again(original: Any, self: Any) -> Any:
    self._compare_at = self._policy.evicted_count + 1 if self._compare_at else 0
    return original(self)


@plant(Entry, "copy_history", ERRORS)
def _the_upper_part_was_never_shared(original: Any, self: Any, other: Any) -> None:
    original(self, other)
    self.hits = 0


@plant(FullAttentionManager, "open", ERRORS)
def _only_the_deepest_run_is_shared(original: Any, self: Any, scope: Any, hit: Any) -> Any:
    above = [(run, run.hits) for run in hit.runs[:-1]]
    part = original(self, scope, hit)
    for run, hits in above:
        run.hits = hits
    return part


@plant(ReuseValue, "value", ERRORS)
def _what_leads_much_is_worth_as_much_as_what_leads_nothing(original: Any, self: Any, entry: Any) -> float:
    return float(original(self, entry)) * 2**entry.burden


@plant(FullAttentionManager, "cut_after", ERRORS)
def _a_prompt_leaves_behind_what_other_groups_do_not_serve(original: Any, self: Any, hit: Any) -> None:
    return None


@plant(FullAttentionManager, "_adopt", ERRORS)
def _what_is_computed_again_is_not_shared(original: Any, self: Any, part: Any, digests: bytes, swaps: Any) -> int:
    with mock.patch.object(self._blocks.policy, "hit"):
        return int(original(self, part, digests, swaps))


@plant(RunTree, "cut", ERRORS)
def _the_end_of_a_pass_counts_as_a_parting(original: Any, self: Any, run: Any, positions: int) -> Any:
    return self.split(run, positions)
