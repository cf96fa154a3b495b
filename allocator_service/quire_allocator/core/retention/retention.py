"""Makes and ends the stops of a pool, and reports the resulting worth of blocks (`worth.py`) to the queue.

A stop is made if every group can serve it from blocks that the sequence has or remembers:

    a hit ends there                  a request has asked for exactly this prefix
    a commit has reached a stop       `stop_rules.py` computes stops; a junction replaces an early stop, and each stop
                                      of an answer replaces the previous stop
    the sequence is forked or freed   the last edge before its committed tokens (where there are states, its deepest
                                      checkpoint): a turn has ended, and most prompts that continue do so here

No block is kept for an impossible hit: when a block that its hit would take is evicted, the stop is gone. Blocks
that this stop alone needed are then spare in all groups, and are evicted before the next victim is chosen.

A path keeps all stops where paths diverge, and the last three other stops. In a chat these are the ends of the
previous turn, of the last prompt, and of its answer. While many prompts diverge before the end of a cached prompt, new
prompts get further stops before their ends, and a path keeps as many more (`partings.py`).

Managers report here which blocks they no longer publish, and which runs they cut. The coordinator asks them for the
units and runs of a stop.

Sources: Marconi (MLSys 2025) keeps the likely ends of the next prompts; SGLang's hybrid tree evicts windows before
    their prefix; `docs/decisions/0017-retention.md` has the measurements.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from quire_allocator.core.blocks import Blocks
from quire_allocator.core.eviction.queue import RANKED, SPARE
from quire_allocator.core.retention.partings import STEP_COUNT, Behind, Partings
from quire_allocator.core.retention.stop import Run, Stop, StopKey, Unit, living
from quire_allocator.core.retention.stop_rules import StopRules, Turn
from quire_allocator.core.retention.worth import Worth
from quire_allocator.core.spec import GroupKind, PoolSpec
from quire_allocator.core.stretches import Stretch

CONTINUED_MAX: Final = 3  # most stops that one path keeps, besides the stops where paths diverge


class Retention:
    """The stops of one pool.

    Attributes:
        blocks: the pool's blocks.
        worth: computes the worth of its blocks.
        is_even: whether all blocks have the same worth, and no stops are made.
        partings: counts the places where its prompts diverge.
        stops: all stops that are not gone.
    """

    def __init__(self, spec: PoolSpec, blocks: Blocks) -> None:
        self.blocks = blocks
        self.worth = Worth(spec)
        self.is_even = self.worth.is_even
        self.stops: dict[StopKey, Stop] = {}
        checkpoints = [group.block_size for group in spec.groups if group.kind is GroupKind.STATE]
        self.partings = Partings(spec.edge_tokens, math.lcm(*checkpoints) if checkpoints else 0)
        self.rules = StopRules(spec.groups, spec.edge_tokens, None if self.is_even else self.partings)
        if not self.is_even:
            blocks.policy.trims = all(group.kind is not GroupKind.FULL_ATTENTION for group in spec.groups)

    # -- when stops are made --------------------------------------------------------------------------------------

    def note_parting(self, key: StopKey, behind: Behind, *, is_whole: bool) -> None:
        """Counts a new prompt that diverges at an edge. `is_whole`: only its last tokens are behind that edge."""
        stop = self.find(key)
        self.partings.note(behind, is_parting=stop is not None and stop.is_parting, is_whole=is_whole)

    def find(self, key: StopKey) -> Stop | None:
        """Returns the stop that is filed under a key."""
        return self.stops.get(key)

    def passed(self, turn: Turn, stop: Stop) -> None:
        """Notes that a sequence has reached a stop."""
        turn.last = stop
        self.end_old(stop)

    def make(
        self, turn: Turn, key: StopKey, needed: Sequence[Unit], runs: Sequence[Run], *, other_way_count: int
    ) -> Stop:
        """Makes a stop that a sequence has reached. `other_way_count` other continuations begin right there."""
        parent = living(turn.last)
        early = parent if parent is not None and parent.is_early and not parent.is_parting else None
        stop = self.put(key, needed, runs, parent=parent)
        stop.is_early = key[1] == turn.early
        if turn.token_counts and turn.token_counts[-1] > turn.prompt_end:
            stop.answer_token_count = max(0, key[1] - turn.prompt_end)
        stop.is_parting |= other_way_count > 0
        if early is not None:
            self._take_place_of(early, stop)
        if stop.answer_token_count and parent is not None and parent.token_count >= turn.prompt_end:
            self._replace(parent, stop)
        return stop

    def _take_place_of(self, early: Stop, stop: Stop) -> None:
        """Replaces an early stop by a new, later one if all stops right after the early one now follow the new one."""
        moved = [other for other in stop.stops_after() if living(other.parent) is early]
        if not moved:
            return
        for other in moved:
            other.parent = stop
        early.way_count -= len(moved)
        self._add_ways(stop, len(moved))
        self.end(early)

    def _replace(self, before: Stop, stop: Stop) -> None:
        """Replaces the end of a prompt, or a stop of its answer, by the answer's next stop, unless paths diverge at
        `before`."""
        if not before.is_continued:
            return
        needed = before.needed
        for unit in stop.needed:
            unit.is_successor = True
        self.end(before)
        if before.answer_token_count:
            for unit in needed:
                unit.scope.manager.replaced(unit)

    def put(self, key: StopKey, needed: Sequence[Unit], runs: Sequence[Run], *, parent: Stop | None) -> Stop:
        """Files a new stop that stands in `runs`, one for each manager of full attention."""
        stop = self.stops[key] = Stop(key, needed, runs, parent=parent)
        for unit in needed:
            unit.needed_count += 1
            if unit.stops is None:
                unit.stops = []
            unit.stops.append(stop)
            if not unit.live:  # The unit is cached: a checkpoint that another sequence made.
                self._revalue(unit)
        for run in runs:
            counts = [other.token_count for other in run.stops]
            if not run.stops:
                run.stops = []
            run.stops.insert(bisect_right(counts, stop.token_count), stop)
        if parent is not None:
            self._add_ways(parent, 1)
        return stop

    def _add_ways(self, stop: Stop, way_count: int) -> None:
        """Notes that `way_count` more stops are right after a stop."""
        was_aside = stop.is_aside
        stop.way_count += way_count
        stop.is_parting |= stop.way_count > 1
        stop.is_aside = stop.is_continued and (was_aside or not self.partings.are_early)
        if stop.is_aside == was_aside:
            return
        step = 1 if was_aside else -1
        for unit in stop.needed:
            unit.needed_count += step
            unit.aside_count -= step
            self._revalue(unit)

    def end_old(self, stop: Stop | None) -> None:
        """Ends the stops of a path where no other path branches off, except for the last few."""
        count, count_max = 0, CONTINUED_MAX + (STEP_COUNT if self.partings.are_inside else 0)
        while stop is not None:
            before = stop.parent = living(stop.parent)
            if not stop.is_parting:
                count += 1
                if count > count_max:
                    self.end(stop)
            stop = before

    def end(self, stop: Stop) -> None:
        """Ends a stop, so that no hit can end there."""
        if stop.is_gone:
            return
        stop.is_gone = True
        for run in stop.runs:
            run.stops.remove(stop)
        for unit in stop.needed:
            if stop.is_aside:
                unit.aside_count -= 1
            else:
                unit.needed_count -= 1
            if unit.stops is not None:
                unit.stops.remove(stop)
        for unit in stop.needed:
            self._revalue(unit)
        for run in stop.runs:
            if run.ticket and run.worth == RANKED and self.worth.of_run(run) == SPARE:
                run.worth = SPARE
                self.blocks.reranked(run)
        stop.parent = before = living(stop.parent)
        if before is not None:
            self._add_ways(before, stop.way_count - 1)
        stop.needed, stop.runs = [], []
        del self.stops[stop.key]

    # -- what managers report: units and stretches ----------------------------------------------------------------

    def need(self, units: tuple[Unit, ...], no_more: tuple[Unit, ...]) -> None:
        """Notes that a live sequence would make a stop that needs `units`, and no longer one that needs `no_more`."""
        for unit in units:
            unit.needed_count += 1
        for unit in no_more:
            unit.needed_count -= 1
            self._revalue(unit)

    def held(self, unit: Unit, count: int) -> None:
        """Notes that a sequence holds a cached unit of `count` blocks again."""
        if unit.worth == SPARE:
            unit.scope.spare -= count
        self.blocks.now_held(unit, count)

    def cached(self, unit: Unit, count: int) -> None:
        """Notes that a published unit of `count` blocks has lost its last holder."""
        unit.worth = self.worth.of_unit(unit)
        if unit.worth == SPARE:
            unit.scope.spare += count
        self.blocks.now_cached(unit, count, is_candidate=True)

    def cached_stretch(self, stretch: Stretch) -> None:
        """Notes a new cached stretch: it is published, fell out of a window, and no sequence holds it."""
        count = stretch.block_count
        stretch.worth = RANKED if self.is_even else SPARE  # no stop needs a block of the stretch
        if stretch.worth == SPARE:
            stretch.scope.spare += count
        self.blocks.now_cached(stretch, count, is_candidate=True)

    def shrunk(self, stretch: Stretch, count: int) -> None:
        """Notes that `count` blocks of a cached stretch are no longer published."""
        if stretch.worth == SPARE:
            stretch.scope.spare -= count

    def lost(self, unit: Unit) -> None:
        """Ends the stops that need a unit, which is no longer published."""
        if unit.worth == SPARE and not unit.live:
            unit.scope.spare -= unit.block_count
        if unit.stops:
            for stop in unit.stops[:]:
                self.end(stop)

    def _revalue(self, unit: Unit) -> None:
        """Updates the worth of a unit after the set of stops that need it changed."""
        if unit.live or not unit.ticket:
            return
        worth, before = self.worth.of_unit(unit), unit.worth
        if worth != before:
            unit.scope.spare += unit.block_count * ((worth == SPARE) - (before == SPARE))
            unit.worth = worth
            self.blocks.reranked(unit)

    # -- what managers report: runs -------------------------------------------------------------------------------

    def leaving(self, run: Run, wanted: int) -> int:
        """Returns how many positions a run loses at once if `wanted` blocks are needed."""
        return self.worth.leaving(run, wanted)

    def assess(self, run: Run) -> None:
        """Notes the worth of a run that no sequence holds, and the blocks that leave with it."""
        run.worth = self.worth.of_run(run)
        run.burden = self.worth.burden(run)

    def divided(self, lower: Run, upper: Run) -> None:
        """Notes that a run was cut in two: stops before the lower part are in the upper one from now on."""
        if not lower.stops:
            return
        cut = upper.token_count()
        upper.stops = [stop for stop in lower.stops if stop.token_count <= cut]
        lower.stops = [stop for stop in lower.stops if stop.token_count > cut]
        for stop in upper.stops:
            stop.runs[stop.runs.index(lower)] = upper

    def trimmed(self, run: Run, *, moves: bool) -> None:
        """Ends the stops at the lost end of a cached run. The run `moves` if the policy changes its rank."""
        for stop in reversed(run.stops[:]):
            if run.size and stop.token_count <= run.token_count():
                break
            self.end(stop)
        if not run.size:
            return
        worth, burden = run.worth, run.burden
        self.assess(run)
        if moves or worth != run.worth or burden != run.burden:
            self.blocks.reranked(run)

    def now_leaf(self, run: Run) -> None:
        """Notes that a cached run has lost all of its children."""
        self.assess(run)
        self.blocks.reranked(run)
