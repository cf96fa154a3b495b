"""Counts the blocks that stops keep, for metrics, and checks the invariants of retention against all stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from quire_allocator.core.eviction.queue import RANKED, SPARE
from quire_allocator.core.groups.fallen import WindowScope
from quire_allocator.core.groups.full import FullAttentionManager
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.groups.units import UnitScope
from quire_allocator.core.groups.window_parts import WindowPart
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.retention.partings import STEP_COUNT
from quire_allocator.core.retention.retention import CONTINUED_MAX
from quire_allocator.core.retention.stop import Run, Stop, StopKey, living
from quire_allocator.core.retention.worth import Worth
from quire_allocator.core.scopes import Namespace
from quire_allocator.core.spec import GroupSpec

if TYPE_CHECKING:
    from quire_allocator.core.pool import Pool

SPECIFICATIONS_MAX: Final = 16  # most specifications that get a metric label each


class RetentionUse(NamedTuple):
    """Block counts of the groups of one specification.

    Attributes:
        name: the kind of the group, and the sizes of blocks and windows: `sliding_window 16 1024`.
        held: blocks in tables.
        kept: cached blocks that a prompt is likely to hit.
        spare: cached blocks that are evicted first.
    """

    name: str
    held: int
    kept: int
    spare: int


def use(pool: Pool) -> list[RetentionUse]:
    """Returns the kept blocks of each specification's groups, in the order of search. Beyond
    `SPECIFICATIONS_MAX`, the rest counts together as `others`."""
    uses: list[RetentionUse] = []
    spaces = list(pool.blocks.namespaces.values())
    for number, manager in enumerate(pool.managers):
        scopes = [space.scopes[number] for space in spaces]
        spare = sum([scope.spare for scope in scopes])
        own = RetentionUse(
            _name(manager.spec), sum([s.held for s in scopes]), sum([s.cached for s in scopes]) - spare, spare
        )
        if number < SPECIFICATIONS_MAX:
            uses.append(own)
        else:
            last = uses.pop() if number > SPECIFICATIONS_MAX else RetentionUse("others", 0, 0, 0)
            uses.append(RetentionUse("others", last.held + own.held, last.kept + own.kept, last.spare + own.spare))
    return uses


def _name(spec: GroupSpec) -> str:
    sizes = f"{spec.block_size} {spec.window}" if spec.window else f"{spec.block_size}"
    return f"{spec.kind.name.lower()} {sizes}"


def check(pool: Pool, spaces: Sequence[Namespace]) -> None:
    """Checks all stops of a pool; there are none if all blocks are worth the same."""
    retention = pool.coordinator.retention
    for sequence_id, sequence in pool.sequences.items():
        counts, edge = sequence.turn.token_counts, pool.spec.edge_tokens
        assert list(counts) == sorted(set(counts)), f"stops of sequence {sequence_id} do not rise: {counts}"
        assert all(count > 0 and not count % edge for count in counts), f"{sequence_id} has stops that are not at edges"
    if retention.is_even:
        assert not retention.stops, "the pool has a stop although all its blocks are worth the same"
        return
    needed, aside, names = Counter[int](), Counter[int](), {space.name for space in spaces}
    ways = Counter(id(living(stop.parent)) for stop in retention.stops.values())
    for key, stop in retention.stops.items():
        assert key[0] in names, "a stop belongs to a namespace that does not exist"
        assert stop.is_continued or not stop.is_aside, "a stop is aside although a path ends or diverges there"
        assert stop.way_count == ways[id(stop)], "a stop's number of ways is wrong"
        _check_stop(key, stop)
        _check_path(stop, CONTINUED_MAX + STEP_COUNT)
        (aside if stop.is_aside else needed).update([id(unit) for unit in stop.needed])
    for number, manager in enumerate(pool.managers):
        if isinstance(manager, WindowManager):
            for sequence in pool.sequences.values():
                part = cast(WindowPart, sequence.parts[number])
                _check_remembered(manager, part, manager.last_end(part, sequence.committed_token_count))
                needed.update([id(unit) for unit in part.needed])
    for space in spaces:
        for number, manager in enumerate(pool.managers):
            scope = space.scopes[number]
            if isinstance(manager, FullAttentionManager):
                for run in manager.tree.runs(cast(RunScope, scope).root):
                    _check_run(retention.stops, retention.worth, run, number)
            else:
                _check_units(retention.worth, cast(UnitScope, scope), needed, aside)


def _check_stop(key: StopKey, stop: Stop) -> None:
    """Asserts that a stop is filed under its key and that everything it needs is published."""
    assert stop.key == key, "a stop is indexed under a key that is not its own"
    assert not stop.is_gone, "a removed stop is still indexed"
    assert stop.runs or stop.needed, "a stop has no run and no unit"
    for unit in stop.needed:
        assert unit.key is not None, "a stop needs a unit that is not published"
        assert unit.scope.namespace.name == key[0], "a stop needs a unit of another namespace"
        assert unit.stops is not None, "a unit that a stop needs has no list of stops"
        assert stop in unit.stops, "a unit's list of stops lacks a stop that needs it"
    for run in stop.runs:
        assert stop in run.stops, "a run's list of stops lacks one of its stops"


def _check_path(stop: Stop, count_max: int) -> None:
    """Checks that earlier stops are above this stop, and that only a few continued stops are left on its path."""
    count, below = 0, stop.token_count + 1
    before: Stop | None = stop
    while before is not None:
        assert before.token_count < below, "a stop is not above the next stop on its path"
        count, below = count + (not before.is_parting), before.token_count
        before = living(before.parent)
    assert count <= count_max, f"a path has {count} stops where no other path diverges"


def _check_remembered(window: WindowManager, part: WindowPart, edge: int) -> None:
    """Checks that a sequence remembers only fallen units that a hit at its last edge needs."""
    for unit in part.needed:
        if unit.key is not None:
            assert unit.key[0] in window.needed_at(edge), "a sequence remembers a unit that its last edge does not need"
            assert unit.key[0] < part.first, "a sequence remembers a unit that is in its table"


def _check_units(worth: Worth, scope: UnitScope, needed: Counter[int], aside: Counter[int]) -> None:
    stretches = scope.stretches.values() if isinstance(scope, WindowScope) else ()
    assert all(stretch.worth == SPARE for stretch in stretches), "a stretch is not spare"
    spare = sum(stretch.block_count for stretch in stretches)
    for unit in scope.units():
        assert unit.needed_count == needed[id(unit)], "a unit's needed_count is wrong"
        assert unit.aside_count == aside[id(unit)], "a unit's aside_count is wrong"
        if not unit.live:
            assert unit.worth == worth.of_unit(unit), "a cached unit has an outdated worth"
            spare += unit.block_count * (unit.worth == SPARE)
    assert scope.spare == spare, f"{scope.spare} blocks count as spare, but {spare} are"


def _check_run(stops: dict[StopKey, Stop], worth: Worth, run: Run, number: int) -> None:
    ends = [stop.token_count for stop in run.stops]
    first, end = run.first_position * run.scope.manager.block_size, run.token_count()
    assert ends == sorted(set(ends)), "the stops of a run are not in order"
    assert all(first < count <= end for count in ends), "a run has a stop outside its positions"
    for stop in run.stops:
        assert stops.get(stop.key) is stop, "a run has a removed stop"
        assert stop.runs[number] is run, "a run has a stop that names another run"
    if run.ticket:
        assert run.worth == worth.of_run(run), "a cached run has an outdated worth"
        assert run.worth in (SPARE, RANKED), "the worth of a cached run must be SPARE or RANKED"
