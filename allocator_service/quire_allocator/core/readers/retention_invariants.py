"""The invariants of stops and of the blocks that they keep, recounted from all stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from quire_allocator.core.blocks import Namespace
from quire_allocator.core.eviction.queue import KEPT, SPARE
from quire_allocator.core.groups.fallen import WindowScope
from quire_allocator.core.groups.full import FullAttentionManager
from quire_allocator.core.groups.retention import CONTINUED_MAX, Retention
from quire_allocator.core.groups.runs import Run, RunScope
from quire_allocator.core.groups.states import StateManager
from quire_allocator.core.groups.units import Unit, UnitScope
from quire_allocator.core.groups.window_parts import WindowPart
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.retention.partings import STEP_COUNT
from quire_allocator.core.retention.stop import Stop, living
from quire_allocator.core.spec import DIGEST_BYTES

if TYPE_CHECKING:
    from quire_allocator.core.pool import Pool


def check(pool: Pool, spaces: Sequence[Namespace]) -> None:
    """Checks the stops of all namespaces. There are none where the policy ranks all blocks alike."""
    retention = pool.coordinator.retention
    if retention is None:
        assert not any(space.stops for space in spaces), "a stop in a pool that makes none"
        return
    needed, aside = Counter[int](), Counter[int]()
    for space in spaces:
        ways = Counter(id(living(stop.parent)) for stop in space.stops.values())
        for key, stop in space.stops.items():
            assert stop.is_continued or not stop.is_aside, "a stop is aside where paths end or part"
            assert stop.way_count == ways[id(stop)], "a stop counts other ways than there are"
            _check_stop(space, key, stop)
            _check_path(stop, CONTINUED_MAX + STEP_COUNT)
            (aside if stop.is_aside else needed).update([id(unit) for unit in stop.needed])
    for sequence in pool.sequences.values():
        for number, window in retention.windows:
            part = cast(WindowPart, sequence.parts[number])
            _check_remembered(window, part, sequence.committed_token_count // retention.edge_tokens)
            needed.update([id(unit) for unit in part.needed])
    for space in spaces:
        _check_worths(retention, space, needed, aside)


def _check_stop(space: Namespace, key: tuple[int, bytes], stop: Stop) -> None:
    """It is where it says, and everything that it needs is published."""
    assert stop.key == key, "a stop is filed under another key than its own"
    assert stop.index is space.stops, "a stop is filed in another namespace than its own"
    assert not stop.is_gone, "a stop that is gone is still filed"
    assert stop.runs or stop.needed, "a stop that nothing ends"
    for entry in stop.needed:
        unit = cast(Unit, entry)
        assert unit.key is not None, "a stop needs what is not published"
        assert unit.scope.namespace is space, "a stop needs what another namespace has"
        assert unit.stops is not None, "a unit does not know who needs it"
        assert stop in unit.stops, "a unit does not know a stop that needs it"
    for entry in stop.runs:
        assert stop in cast(Run, entry).stops, "a run does not know a stop that stands in it"


def _check_path(stop: Stop, count_max: int) -> None:
    """The stops before it are above it, and few of them are there for no other reason than edits."""
    count, below = 0, stop.token_count + 1
    before: Stop | None = stop
    while before is not None:
        assert before.token_count < below, "a stop is behind one that it comes before"
        count, below = count + (not before.is_parting), before.token_count
        before = living(before.parent)
    assert count <= count_max, f"a path has {count} stops where none parts from it"


def _check_remembered(window: WindowManager, part: WindowPart, edge_count: int) -> None:
    """Checks that a sequence remembers only those fallen blocks that its last edge needs."""
    edge = edge_count * window.edge_tokens
    for unit in part.needed:
        if unit.key is not None:
            assert unit.key[0] in window.needed_at(edge), "a sequence remembers what it does not need"
            assert unit.key[0] < part.first, "a sequence remembers what it has in its table"


def _check_worths(retention: Retention, space: Namespace, needed: Counter[int], aside: Counter[int]) -> None:
    others: list[tuple[int, WindowManager | StateManager]] = [*retention.windows, *retention.states]
    for number, manager in others:
        scope, spare = cast(UnitScope, space.scopes[number]), 0
        if isinstance(scope, WindowScope):
            spare = sum(stretch.block_count for stretch in scope.stretches.values())
        for unit in scope.units():
            assert unit.needed_count == needed[id(unit)], "a unit counts others that need it than there are"
            assert unit.aside_count == aside[id(unit)], "a unit counts others that have it aside than there are"
            if not unit.live:
                assert unit.worth == manager.worth(unit), "a cached unit is taken for worth more or less than it is"
                spare += manager.width * (unit.worth == SPARE)
        assert scope.spare == spare, f"{scope.spare} blocks count as spare, {spare} are"
    for number, full in enumerate(retention.full):
        for run in full.tree.runs(cast(RunScope, space.scopes[number]).root):
            _check_run(full, run, number)


def _check_run(full: FullAttentionManager, run: Run, number: int) -> None:
    ends = [stop.token_count for stop in run.stops]
    first = run.first_position * full.block_size
    end = first + run.size // DIGEST_BYTES * full.block_size
    assert ends == sorted(set(ends)), "the stops of a run are not in order"
    assert all(first < count <= end for count in ends), "a stop stands in a run that does not reach to it"
    for stop in run.stops:
        assert stop.index.get(stop.key) is stop, "a run has a stop that is gone"
        assert stop.runs[number] is run, "a stop names another run than the one it stands in"
    if run.ticket:
        assert run.worth == full.worth(run), "a cached run is taken for worth more or less than it is"
        assert run.worth in (SPARE, KEPT), "a run leaves in order or first"
