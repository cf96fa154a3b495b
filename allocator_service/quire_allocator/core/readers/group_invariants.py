"""The invariants of each kind of group, recounted from its tables; `invariants.py` checks all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic

from quire_allocator.core.groups.fallen import WindowScope
from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.manager import PartT, ScopeT
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.groups.states import StateManager, StatePart
from quire_allocator.core.groups.units import UnitScope
from quire_allocator.core.groups.window_parts import WindowPart
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.retention.stop import Run, Unit
from quire_allocator.core.scopes import Scoped
from quire_allocator.core.sequence import SequenceState
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind


class Use(Generic[ScopeT, PartT]):
    """The scope of one namespace in one manager, and each of its sequences with its part there."""

    def __init__(self, scope: ScopeT, parts: Sequence[tuple[SequenceState, PartT]]) -> None:
        self.scope = scope
        self.parts = parts


class Recount:
    """The recount of one scope.

    Attributes:
        held: blocks in tables, each once.
        cached: published blocks in no table.
        entries: published entries.
        candidates: published entries that may be evicted.
    """

    def __init__(self) -> None:
        self.held: list[int] = []
        self.cached: list[int] = []
        self.entries: list[Scoped] = []
        self.candidates: list[Scoped] = []

    def add(self, entry: Scoped, blocks: Sequence[int], holders: int, *, is_leaf: bool) -> None:
        """Adds one published entry after checking its count of holders."""
        assert entry.live == holders, f"the entry of blocks {list(blocks)} counts {entry.live} holders, not {holders}"
        (self.held if holders else self.cached).extend(blocks)
        self.entries.append(entry)
        if not holders and is_leaf:
            self.candidates.append(entry)


# -- full attention ----------------------------------------------------------------------------------------------------


def check_full(manager: FullAttentionManager, uses: Sequence[Use[RunScope, RunPart]]) -> list[Recount]:
    """Checks the trees of runs, the sequences that end in them, and the list of sharers of half-filled blocks."""
    _check_sharers(manager, [part for use in uses for _, part in use.parts])
    return [_check_tree(manager, use.scope, use.parts) for use in uses]


def _check_tree(
    manager: FullAttentionManager, scope: RunScope, parts: Sequence[tuple[SequenceState, RunPart]]
) -> Recount:
    """Checks the tree's shape, and that each run counts its held children and its sequences (ends and borrowers)."""
    found, width = Recount(), manager.width
    ends: Counter[int] = Counter()
    for _, part in parts:
        assert part.scope is scope, "a sequence points to the scope of another namespace"
        ends[id(part.run)] += 1
        if part.borrowed is not None:
            ends[id(part.borrowed)] += 1
    known = {id(scope.root)}
    for run in manager.tree.runs(scope.root):
        known.add(id(run))
        _check_run(run, scope, width)
        holders = ends[id(run)] + sum(child.live > 0 for child in run.children.values())
        found.add(run, run.blocks, holders, is_leaf=not run.children)
    assert not scope.root.live, "a root has a count of holders"
    assert not scope.root.ticket, "a root is queued for eviction"
    assert not scope.root.blocks, "a root has blocks"
    for sequence, part in parts:
        _check_run_part(manager, sequence, part, known)
        found.held.extend(part.tail if part.borrowed is None else part.tail[width:])
        for position, own in part.kept or ():
            assert position * width + len(own) <= part.published * width, "a kept block is not at a published position"
            found.held.extend(own)
    _count_shared_once(found.held, [part.tail[:width] for _, part in parts if part.borrowed is None], width)
    return found


def _check_run(run: Run, scope: RunScope, width: int) -> None:
    parent = run.parent
    assert parent is not None
    assert run.scope is scope, "a run has another scope than its tree"
    assert parent.children.get(run.first_digest) is run, "a run's parent does not have it under its first digest"
    count, rest = divmod(len(run.digests), DIGEST_BYTES)
    assert count > 0, "a run is empty"
    assert not rest, "a run has an incomplete digest"
    assert len(run.blocks) == count * width, f"a run of {count} digests has {len(run.blocks)} blocks"
    above = parent.end_position
    assert run.first_position == above, f"a run begins at {run.first_position}, but its parent ends at {above}"
    assert run.live == 0 or parent.parent is None or parent.live > 0, "a held run has a cached parent"


def _check_run_part(manager: FullAttentionManager, sequence: SequenceState, part: RunPart, known: set[int]) -> None:
    width, size = manager.width, manager.block_size
    assert id(part.run) in known, "a sequence ends in a run that is not in the tree"
    end = part.run.end_position
    assert part.published == end, f"a sequence has {part.published} published positions, but its run ends at {end}"
    committed = sequence.committed_token_count // size
    assert part.published <= committed, "more is published than committed"
    assert part.published == committed or not sequence.is_named, "committed positions are not published"
    entries = -(-sequence.token_count // size)
    assert len(part.tail) == (entries - part.published) * width, f"a tail does not end at {sequence.token_count} tokens"
    if part.borrowed is not None:
        assert id(part.borrowed) in known, "a borrowed run is not in the tree"
        assert part.borrowed.parent is part.run, "a borrowed run does not follow the borrower's run"
        assert list(part.borrowed.blocks[:width]) == list(part.tail[:width]), "a borrower has other blocks than the run"
        assert sequence.committed_token_count % size, "a sequence without a half-filled block borrows one"


def _count_shared_once(held: list[int], firsts: Sequence[Sequence[int]], width: int) -> None:
    """Leaves the blocks of a half-filled position in `held` only once, if several tails share it."""
    times = Counter(tuple(first) for first in firsts if len(first) == width)
    for blocks, count in times.items():
        for _ in range(count - 1):
            for block in blocks:
                held.remove(block)


def _check_sharers(manager: FullAttentionManager, parts: Sequence[RunPart]) -> None:
    """Checks that exactly the sequences that share their half-filled block are in the list of sharers."""
    tails: dict[int, set[int]] = {}
    for part in parts:
        if part.tail and part.borrowed is None:
            tails.setdefault(part.tail[0], set()).add(id(part))
    wanted = {block: sharers for block, sharers in tails.items() if len(sharers) > 1}
    listed = {block: {id(part) for part in sharers} for block, sharers in manager._sharers.items()}
    assert listed == wanted, "the list of sharers of half-filled blocks is wrong"


# -- windows and states ------------------------------------------------------------------------------------------------


def check_windows(manager: WindowManager, uses: Sequence[Use[WindowScope, WindowPart]]) -> list[Recount]:
    """Checks that tables begin where the window does and end where the grants do, and that computed blocks are
    published."""
    for use in uses:
        for sequence, part in use.parts:
            _check_window(manager, use.scope, sequence, part)
    founds = []
    for use in uses:
        found = _check_units(manager.width, use.scope, [part.units for _, part in use.parts])
        _check_stretches(manager, use.scope, found)
        found.held.extend([block for _, part in use.parts for block in part.tail])
        found.held.extend([block for _, part in use.parts for _, own in part.kept or () for block in own])
        founds.append(found)
    return founds


def _check_stretches(manager: WindowManager, scope: WindowScope, found: Recount) -> None:
    """Checks that stretches have no holders, and that each stretch is found where it begins."""
    starts = sorted({position for position, _ in scope.stretches})
    assert scope.starts.positions == starts, "the index of starts differs from where stretches begin"
    for key, stretch in scope.stretches.items():
        count, rest = divmod(len(stretch.digests), DIGEST_BYTES)
        assert key == (stretch.first_position, stretch.first_digest), "a stretch has a wrong key in the index"
        assert stretch.scope is scope, "a stretch has another scope than its index"
        assert count > 0, "a stretch is empty"
        assert not rest, "a stretch has an incomplete digest"
        assert len(stretch.blocks) == count * manager.width, f"{count} positions have {len(stretch.blocks)} blocks"
        found.add(stretch, stretch.blocks, 0, is_leaf=True)


def _check_window(manager: WindowManager, scope: WindowScope, sequence: SequenceState, part: WindowPart) -> None:
    size = manager.block_size
    assert part.scope is scope, "a sequence points to the scope of another namespace"
    end = part.end(manager.width)
    assert not part.falling, "units are leaving the window although no commit runs"
    assert len(part.tail) % manager.width == 0, "a tail ends inside a position"
    assert end == -(-sequence.token_count // size), f"a table of {sequence.token_count} tokens has {end} positions"
    committed = sequence.committed_token_count
    first = manager._rule.first_needed(committed) // size
    assert part.first == first, f"a table begins at position {part.first}, not at {first}"
    for position, unit in enumerate(part.units, part.first):
        if (position + 1) * size <= committed:
            key = unit.key
            assert key is not None or not sequence.is_named, f"position {position} is computed but not published"
            assert key is None or key[0] == position, f"position {position} was published as another position"
        assert position * size < committed, f"position {position} has a unit before its first token is committed"
    for position, own in part.kept or ():
        last = position + len(own) // manager.width
        assert part.first <= position < last <= part.first + len(part.units), "a kept block is outside the units"
        keys = [unit.key for unit in part.units[position - part.first : last - part.first]]
        assert None not in keys, "a block is kept at a position that is not published"
    tail = end - len(part.tail) // manager.width
    assert not part.tail or (tail + 1) * size > committed, f"position {tail} is computed but not published"


def check_states(manager: StateManager, uses: Sequence[Use[UnitScope, StatePart]]) -> list[Recount]:
    """Checks that every sequence has a running block; if published, it stands for exactly the committed tokens."""
    for use in uses:
        for sequence, part in use.parts:
            _check_state(manager, use.scope, sequence, part)
    return [_check_units(manager.width, use.scope, [[part.unit] for _, part in use.parts if part.unit]) for use in uses]


def _check_state(manager: StateManager, scope: UnitScope, sequence: SequenceState, part: StatePart) -> None:
    assert part.scope is scope, "a sequence's state has the scope of another namespace"
    assert part.unit is not None, "a sequence has no state"
    if part.unit.key is not None:
        tokens = part.unit.key[0] * manager._digest_tokens
        assert tokens == sequence.committed_token_count, f"a state of {tokens} tokens belongs to another length"
    if part.unit.key is not None or part.unit.live > 1:
        assert sequence.token_count == sequence.committed_token_count, "a published or shared state may be overwritten"


def _check_units(width: int, scope: UnitScope, tables: Sequence[Sequence[Unit]]) -> Recount:
    """Checks that each unit counts the tables that contain it, and that the index has exactly the published units."""
    found = Recount()
    published = scope.units()
    depths = sorted({unit.first_position for unit in published})
    assert scope.depths.positions == depths, "the index of depths differs from the units' positions"
    holders: Counter[int] = Counter(id(unit) for table in tables for unit in table)
    for unit in published:
        position, digest = unit.first_position, unit.first_digest
        assert scope.find(position, digest) is unit, f"a unit of position {position} is not indexed there"
        assert len(digest) == DIGEST_BYTES, "a unit is published under an incomplete digest"
        found.add(unit, unit.blocks, holders[id(unit)], is_leaf=True)
    for unit in {id(unit): unit for table in tables for unit in table}.values():
        assert unit.scope is scope, "a table has a unit of another scope"
        assert len(unit.blocks) == width, "the number of a unit's blocks differs from the number of groups"
        if unit.key is None:
            assert unit.live == holders[id(unit)], f"a private unit counts {unit.live} tables, which is wrong"
            found.held.extend(unit.blocks)
        else:
            assert scope.find(*unit.key) is unit, "a published unit is not in the index"
    return found


CHECKS: dict[GroupKind, Callable[[Any, Sequence[Use[Any, Any]]], list[Recount]]] = {
    GroupKind.FULL_ATTENTION: check_full,
    GroupKind.SLIDING_WINDOW: check_windows,
    GroupKind.CHUNKED_LOCAL: check_windows,
    GroupKind.STATE: check_states,
}
