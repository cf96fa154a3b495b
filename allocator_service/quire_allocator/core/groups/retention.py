"""Which windows and states stay cached: those before stops (`stop.py`), as long as their prefix does.

When a stop is made, if every group can serve it from what the sequence has or remembers:

    a hit ends there                  somebody asked for just this
    a commit has reached a stop       `stops.py` says where these are; a junction takes the place of an early stop, and
                                      each stop of an answer that of the one before
    the sequence is forked or freed   the last edge before its committed tokens (where there are states, its deepest
                                      checkpoint): a turn has ended, and most prompts that go on do so from here

What leaves when. Four kinds of cached blocks leave in this order, each the one released longest ago first, but for
KEPT, which the eviction policy ranks:

    SPARE    windows and checkpoints that stand before no stop; the end of a run beyond its deepest stop
    ASIDE    what only stops need that are continued, unless prompts part early
    KEPT     runs with a stop at their end or with children; without full attention what a stop needs
    LED      what a stop needs of windows and states, where full attention has the same prefix: leaves with its run

So a block that no hit can need never outlasts one that some hit can. Nothing is kept for a hit that cannot come: when
the policy takes a block before a stop, in whatever group, the stop is gone, and what it alone needed is spare
in all groups; the next victim is only chosen when that is used up. A chat leaves as a whole, or back to an earlier
stop.

    chat of 8,192 tokens, blocks of 16, full attention and 5 windows of 1,024: 512 blocks are KEPT, 5 x 64 LED, and
    5 x 448 SPARE

Of one path the stops where paths part stay, and of the others the last three (what a chat's last two turns leave:
the end of the turn before, that of the last prompt and of its answer). While many prompts part from cached ones before
their end, further stops stand before the ends of prompts, and as many more stay (`partings.py`).

Sources: Marconi (MLSys 2025) keeps what the next prompts are likely to end at; SGLang's hybrid tree lets windows leave
before the prefix they belong to; `docs/decisions/0017-retention.md` has what was measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, cast

from quire_allocator.core.blocks import Blocks, Namespace, Scoped
from quire_allocator.core.eviction.queue import BURDEN_MAX
from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.keeper import Keeper
from quire_allocator.core.groups.manager import AnyManager, Hit
from quire_allocator.core.groups.run_tree import behind_hit
from quire_allocator.core.groups.runs import Run, RunHit, RunScope, stop_before, stops_behind
from quire_allocator.core.groups.states import StateManager, StatePart
from quire_allocator.core.groups.units import AnyUnitManager, Unit
from quire_allocator.core.groups.window_parts import WindowPart
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.retention.partings import STEP_COUNT, Partings
from quire_allocator.core.retention.stop import Stop, StopKey, living
from quire_allocator.core.sequence import SequenceState
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, PoolSpec

CONTINUED_MAX: Final = 3  # stops of one path where no paths part


class Retention(Keeper):
    """The stops of one pool.

    Attributes:
        full: the managers of full attention, which come first among those of the pool.
        windows, states: those of windowed groups and of states, each with its number there.
        edge_tokens: stops are at multiples of this.
    """

    def __init__(self, spec: PoolSpec, managers: Sequence[AnyManager], blocks: Blocks) -> None:
        self._digest_tokens = spec.block_size
        self._blocks = blocks
        self.edge_tokens = spec.edge_tokens
        kinds = [manager.spec.kind for manager in managers]
        self.full = [
            cast(FullAttentionManager, manager)
            for manager, kind in zip(managers, kinds)
            if kind is GroupKind.FULL_ATTENTION
        ]
        self.windows = [
            (number, cast(WindowManager, manager))
            for number, (manager, kind) in enumerate(zip(managers, kinds))
            if kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
        ]
        self.states = [
            (number, cast(StateManager, manager))
            for number, (manager, kind) in enumerate(zip(managers, kinds))
            if kind is GroupKind.STATE
        ]
        for full in self.full:
            full.tree.keeper = self
        for _, window in self.windows:
            window.keeper = self
            window.is_led = bool(self.full)
        for _, state in self.states:
            state.keeper = self
            state.is_led = bool(self.full)
        blocks.policy.trims = not self.full
        checkpoints = [manager.spec.block_size for _, manager in self.states]
        self.partings = Partings(self.edge_tokens, math.lcm(*checkpoints) if checkpoints else 0)

    # -- when stops are made --------------------------------------------------------------------------------------

    def reached(self, sequence: SequenceState, before: int) -> bool:
        """A sequence has committed more than the `before` tokens that it had; nothing has fallen out yet. Returns
        whether stops are left that it has not reached."""
        stops = sequence.stops
        for token_count in stops[bisect_right(stops, before) :]:
            if token_count > sequence.committed_token_count:
                return True
            self.make(sequence, token_count)
        return False

    def ended(self, sequence: SequenceState) -> None:
        """A turn has ended with what a sequence has committed."""
        last = living(sequence.last_stop)
        edge = self._last_stop(sequence)
        if edge > (0 if last is None else last.token_count):
            self.make(sequence, edge)

    def note_parting(
        self, space: Namespace, hits: Sequence[Hit], digests: bytes, prompt_token_count: int, junction: int
    ) -> None:
        """A new prompt parts behind its junction or, where there is none, behind its hits. Only full attention knows
        what follows there."""
        end = junction or hits[0].token_count
        if not end or not self.full:
            return
        full = self.full[0]
        hit = full.find(cast(RunScope, space.scopes[0]), digests, junction) if junction else cast(RunHit, hits[0])
        behind = behind_hit(hit, self.edge_tokens // full.block_size)
        last = end // self._digest_tokens * DIGEST_BYTES
        stop = space.stops.get((end, digests[last - DIGEST_BYTES : last]))
        self.partings.note(
            behind,
            is_parting=stop is not None and stop.is_parting,
            is_whole=end + self.edge_tokens >= prompt_token_count,
        )

    def _last_stop(self, sequence: SequenceState) -> int:
        """Returns the last edge before what is committed; where groups keep states, the last one with a checkpoint."""
        if not self.states:
            return sequence.committed_token_count // self.edge_tokens * self.edge_tokens
        number, state = self.states[0]
        last = state.last_checkpoint(cast(StatePart, sequence.parts[number]))
        return last[0] if last is not None and last[0] % self.edge_tokens == 0 else 0

    def make(self, sequence: SequenceState, token_count: int) -> None:
        """Hits can end after so many tokens of a sequence, if all groups can serve them from what it has."""
        digest = self._digest_at(sequence, token_count)
        if not digest:
            return
        index, key = sequence.namespace.stops, (token_count, digest)
        stop = index.get(key)
        if stop is None:
            tails = self._tails(sequence, token_count, digest)
            if tails is None:
                return
            parts = [cast(RunPart, sequence.parts[number]) for number in range(len(self.full))]
            runs = [full.run_at(part, token_count) for full, part in zip(self.full, parts)]
            parent = living(sequence.last_stop)
            early = parent if parent is not None and parent.is_early and not parent.is_parting else None
            stop = self.put(sequence.namespace, key, tails, runs, parent=parent)
            stop.is_early = token_count == sequence.early_stop
            if sequence.stops and sequence.stops[-1] > sequence.prompt_end:
                stop.answer_token_count = max(0, token_count - sequence.prompt_end)
            for full, part, run in zip(self.full, parts, runs):
                goes_on = part.published * full.block_size > token_count  # and then by one of the children
                stop.is_parting |= full.end_of(run) == token_count and len(run.children) > goes_on
            if early is not None:
                self._take_place_of(early, stop)
            if stop.answer_token_count and parent is not None and parent.token_count >= sequence.prompt_end:
                self._go_on(parent, stop)
        sequence.last_stop = stop
        self.end_old(stop)

    def _take_place_of(self, early: Stop, stop: Stop) -> None:
        """A new stop behind an early end takes its place, if others that were right behind that are behind the new
        one now: prompts part there, and no sooner."""
        moved = [other for other in stops_behind(stop) if living(other.parent) is early]
        if not moved:
            return
        for other in moved:
            other.parent = stop
        early.way_count -= len(moved)
        self._goes_on(stop, len(moved))
        self.end(early)

    def _go_on(self, before: Stop, stop: Stop) -> None:
        """An answer has gone on from the end of its prompt, or from an end of its own: the stop behind that takes
        its place, unless paths part there."""
        if not before.is_continued:
            return
        needed = before.needed
        for unit in stop.needed:
            unit.is_successor = True
        self.end(before)
        if before.answer_token_count:
            for unit in needed:
                manager = _manager(cast(Unit, unit))
                if isinstance(manager, StateManager):
                    manager.replaced(cast(Unit, unit))

    def put(
        self,
        space: Namespace,
        key: StopKey,
        needed: Sequence[Unit],
        runs: Sequence[Run],
        *,
        parent: Stop | None,
    ) -> Stop:
        """Files a new stop that stands in `runs`, one for each manager of full attention."""
        stop = space.stops[key] = Stop(space.stops, key, needed, runs, parent=parent)
        for unit in needed:
            unit.needed_count += 1
            _add(unit, stop)
            if not unit.live:  # a checkpoint that another sequence made
                _manager(unit).revalue(unit)
        for run in runs:
            counts = [other.token_count for other in run.stops]
            run.stops.insert(bisect_right(counts, stop.token_count), stop)
        if parent is not None:
            self._goes_on(parent, 1)
        return stop

    def _digest_at(self, sequence: SequenceState, token_count: int) -> bytes:
        if self.full:
            return self.full[0].digest_at(cast(RunPart, sequence.parts[0]), token_count)
        if self.windows:
            number, window = self.windows[0]
            return window.digest_at(cast(WindowPart, sequence.parts[number]), token_count)
        number, state = self.states[0]
        last = state.last_checkpoint(cast(StatePart, sequence.parts[number]))
        return last[1] if last is not None and last[0] == token_count else b""

    def _tails(self, sequence: SequenceState, token_count: int, digest: bytes) -> list[Unit] | None:
        """Returns the units that a stop there needs: of windows what the sequence has, of states the checkpoint,
        whoever made it. None where one lacks, or where none is needed."""
        needed = list[Unit]()
        for number, window in self.windows:
            part, wanted = cast(WindowPart, sequence.parts[number]), window.needed_at(token_count)
            own = window.tail(part, wanted)
            if len(own) < len(wanted):
                return None
            needed += own
        for number, state in self.states:
            scope = cast(StatePart, sequence.parts[number]).scope
            unit = state.checkpoint_at(scope, token_count, digest)
            if unit is None:
                return None
            needed.append(unit)
        return needed if needed or self.full else None

    def _goes_on(self, stop: Stop, way_count: int) -> None:
        """So many stops more are right behind it."""
        was_aside = stop.is_aside
        stop.way_count += way_count
        stop.is_parting |= stop.way_count > 1
        stop.is_aside = stop.is_continued and (was_aside or not self.partings.are_early)
        if stop.is_aside == was_aside:
            return
        step = 1 if was_aside else -1
        for entry in stop.needed:
            unit = cast(Unit, entry)
            unit.needed_count += step
            unit.aside_count -= step
            _manager(unit).revalue(unit)

    def end_old(self, stop: Stop | None) -> None:
        """Ends the stops of a path where no paths part, but for the last few."""
        count, count_max = 0, CONTINUED_MAX + (STEP_COUNT if self.partings.are_inside else 0)
        while stop is not None:
            before = stop.parent = living(stop.parent)
            if not stop.is_parting:
                count += 1
                if count > count_max:
                    self.end(stop)
            stop = before

    # -- when they are gone --------------------------------------------------------------------------------------------

    def end(self, stop: Stop) -> None:
        if stop.is_gone:
            return
        stop.is_gone = True
        for run in stop.runs:
            cast(Run, run).stops.remove(stop)
        for entry in stop.needed:
            unit = cast(Unit, entry)
            if stop.is_aside:
                unit.aside_count -= 1
            else:
                unit.needed_count -= 1
            _drop(unit, stop)
        for entry in stop.needed:
            unit = cast(Unit, entry)
            _manager(unit).revalue(unit)
        for number, run in enumerate(stop.runs):
            self.full[number].tree.lost(cast(Run, run))
        stop.parent = before = living(stop.parent)
        if before is not None:
            self._goes_on(before, stop.way_count - 1)
        stop.needed, stop.runs = [], []
        del stop.index[stop.key]

    def burden(self, run: Scoped) -> int:
        stands_in = cast(Run, run)
        stop = stands_in.stops[-1]
        prompt_end = stop.token_count - stop.answer_token_count  # no answer makes its turn worth more or less
        token_count = max(self.edge_tokens, prompt_end - stop_before(stands_in))
        own = sum([token_count // full.block_size * full.width for full in self.full])
        led = sum([entry.block_count for entry in stop.needed if cast(Unit, entry).needed_count == 1])
        return min(BURDEN_MAX, ((own + led) // own).bit_length() - 1)

    def moved(self, lower: Scoped, upper: Scoped, cut: int) -> None:
        below, above = cast(Run, lower), cast(Run, upper)
        above.stops = [stop for stop in below.stops if stop.token_count <= cut]
        below.stops = [stop for stop in below.stops if stop.token_count > cut]
        for stop in above.stops:
            stop.runs[stop.runs.index(below)] = above

    def trimmed(self, run: Scoped, end: int) -> None:
        for stop in reversed(cast(Run, run).stops[:]):
            if stop.token_count <= end:
                break
            self.end(stop)


def _manager(unit: Unit) -> AnyUnitManager:
    return cast(AnyUnitManager, unit.scope.manager)


def _add(unit: Unit, stop: Stop) -> None:
    if unit.stops is None:
        unit.stops = []
    unit.stops.append(stop)


def _drop(unit: Unit, stop: Stop) -> None:
    if unit.stops is not None:
        unit.stops.remove(stop)
