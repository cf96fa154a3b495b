"""What must hold of a pool at all times, counted again from its tables: for tests, and for servers told to check.

Slow on purpose: nothing here trusts a count, a queue or a link that the pool keeps for speed. Every check says in its
message what is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from quire_allocator.core.blocks import Namespace, Scoped
from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.runs import Run, RunScope
from quire_allocator.core.groups.states import StateManager, StatePart
from quire_allocator.core.groups.units import Unit, UnitScope
from quire_allocator.core.groups.windows import WindowManager, WindowPart
from quire_allocator.core.pool import Pool
from quire_allocator.core.sequence import SequenceState
from quire_allocator.core.spec import DIGEST_BYTES

Parts = Sequence[tuple[SequenceState, Any]]


class Found:
    """What was found in one scope.

    Attributes:
        held: blocks in tables, each once.
        cached: published blocks in no table.
        entries: what is published.
        candidates: those of them that may be evicted.
    """

    def __init__(self) -> None:
        self.held: list[int] = []
        self.cached: list[int] = []
        self.entries: list[Scoped] = []
        self.candidates: list[Scoped] = []

    def add(self, entry: Scoped, blocks: Sequence[int], holders: int, *, is_leaf: bool) -> None:
        """One published entry; its own count of holders must be right."""
        assert entry.live == holders, f"an entry of blocks {list(blocks)} counts {entry.live} holders, it has {holders}"
        (self.held if holders else self.cached).extend(blocks)
        self.entries.append(entry)
        if not holders and is_leaf:
            self.candidates.append(entry)


def check(pool: Pool) -> None:
    """Raises AssertionError, naming what is broken, unless everything in this file holds."""
    pool.blocks.check_invariants()
    found: list[Found] = []
    for space in _spaces(pool):
        parts = [sequence for sequence in pool.sequences.values() if sequence.namespace is space]
        for number, manager in enumerate(pool.managers):
            scope = space.scopes[number]
            assert scope.namespace is space, "a scope names another namespace than the one that it stands in"
            assert scope.manager is manager, "a scope stands in another manager's place"
            own = _CHECKS[type(manager)](manager, scope, [(sequence, sequence.parts[number]) for sequence in parts])
            assert scope.held == len(own.held), (
                f"{scope.held} blocks of {space.name!r} count as held, {len(own.held)} are"
            )
            assert scope.cached == len(own.cached), f"{scope.cached} blocks count as cached, {len(own.cached)} are"
            found.append(own)
    _check_blocks(pool, found)
    _check_queues(pool, found)
    for sequence_id, sequence in pool.sequences.items():
        _check_sequence(pool, sequence_id, sequence)
    _check_sharers(pool)
    _check_batch(pool)
    _check_gates(pool)
    _check_pending(pool)


# -- blocks ------------------------------------------------------------------------------------------------------------


def _spaces(pool: Pool) -> list[Namespace]:
    """Every namespace; each is known by its name as long as it is used, and no longer."""
    spaces = list(pool.blocks.namespaces.items())
    counts = Counter(id(sequence.namespace) for sequence in pool.sequences.values())
    known = {id(space) for _, space in spaces}
    for sequence_id, sequence in pool.sequences.items():
        assert id(sequence.namespace) in known, f"the namespace of sequence {sequence_id} was forgotten"
    for name, space in spaces:
        assert space.name == name, f"namespace {space.name!r} is filed as {name!r}"
        assert space.sequence_count == counts[id(space)], f"{name!r} counts {space.sequence_count} sequences"
        is_used = space.sequence_count or space.held_count or space.cached_count
        assert is_used, f"namespace {name!r} has nothing and was not forgotten"
        limits_cache = space.quota is not None and space.quota.cached_block_count_max is not None
        assert (space.queue is not None) == limits_cache, (
            f"{name!r} has a queue without a limit, or a limit without one"
        )
    return [space for _, space in spaces]


def _check_blocks(pool: Pool, found: Sequence[Found]) -> None:
    """Every block is exactly one of empty, cached and held."""
    uses = Counter(pool.blocks.empty)
    for own in found:
        uses.update(own.held)
        uses.update(own.cached)
    twice = sorted(block for block, count in uses.items() if count > 1)
    assert not twice, f"blocks {twice} have two uses"
    lost = sorted(set(range(pool.spec.block_count)) - set(uses))
    assert not lost, f"blocks {lost} are lost"
    assert len(uses) == pool.spec.block_count, "there are blocks that the pool does not have"
    cached = sum(len(own.cached) for own in found)
    assert pool.blocks.cached_count == cached, f"{pool.blocks.cached_count} blocks count as cached, {cached} are"
    assert pool.blocks.free_count == cached + len(pool.blocks.empty), "the free blocks are not the empty and the cached"


def _check_queues(pool: Pool, found: Sequence[Found]) -> None:
    """The candidates for eviction are the cached entries with nothing below them, and no others."""
    candidates = [entry for own in found for entry in own.candidates]
    wanted = {id(entry) for entry in candidates}
    for own in found:
        for entry in own.entries:
            assert bool(entry.ticket) == (id(entry) in wanted), "a ticket where nothing may leave, or none where it may"
    assert len(pool.blocks.queue) == len(candidates), (
        f"{len(pool.blocks.queue)} candidates count, {len(candidates)} are"
    )
    tickets = [entry.ticket for entry in candidates]
    assert len(set(tickets)) == len(tickets), "two candidates have one ticket"
    queued = {ticket for _, ticket, entry in pool.blocks.queue.items() if ticket == entry.ticket}
    assert queued == set(tickets), "a candidate is not queued, or is queued under another ticket"
    for entry in candidates:
        queue = entry.scope.namespace.queue
        if queue is not None:
            tickets_of_it = {ticket for _, ticket, other in queue.items() if other is entry}
            assert entry.ticket in tickets_of_it, "a candidate is missing among those of its namespace"


# -- full attention ----------------------------------------------------------------------------------------------------


def _check_runs(manager: FullAttentionManager, scope: RunScope, parts: Parts) -> Found:
    """The tree is well formed, and each run counts the sequences that end or borrow there and its held children."""
    found, width = Found(), manager.width
    ends: Counter[int] = Counter()
    for _, part in parts:
        assert part.scope is scope, "a sequence has its runs in another scope"
        ends[id(part.run)] += 1
        if part.borrowed is not None:
            ends[id(part.borrowed)] += 1
    known = {id(scope.root)}
    runs = list(manager.tree.runs(scope.root))
    for run in runs:
        known.add(id(run))
        _check_run(run, scope, width)
        holders = ends[id(run)] + sum(child.live > 0 for child in run.children.values())
        found.add(run, run.blocks, holders, is_leaf=not run.children)
    assert not scope.root.live, "a root counts holders"
    assert not scope.root.ticket, "a root may be evicted"
    assert not scope.root.blocks, "a root has blocks"
    for sequence, part in parts:
        _check_run_part(manager, sequence, part, known)
        found.held.extend(part.tail if part.borrowed is None else part.tail[width:])
    found.held = _shared_once(found.held, [part.tail[:width] for _, part in parts if part.borrowed is None], width)
    return found


def _check_run(run: Run, scope: RunScope, width: int) -> None:
    parent = run.parent
    assert parent is not None
    assert run.scope is scope, "a run names another scope than the one it hangs in"
    assert parent.children.get(run.first_digest) is run, "a run is not where its parent looks for it"
    count, rest = divmod(len(run.digests), DIGEST_BYTES)
    assert count > 0, "a run is empty"
    assert not rest, "a run has a part of a digest"
    assert len(run.blocks) == count * width, f"a run of {count} digests has {len(run.blocks)} blocks"
    above = parent.first_position + parent.size // DIGEST_BYTES
    assert run.first_position == above, f"a run below {above} positions says it begins at {run.first_position}"
    assert run.live == 0 or parent.parent is None or parent.live > 0, "a held run hangs below a cached one"


def _check_run_part(manager: FullAttentionManager, sequence: SequenceState, part: RunPart, known: set[int]) -> None:
    width, size = manager.width, manager.block_size
    assert id(part.run) in known, "a sequence ends in a run that is not in the tree"
    end = part.run.first_position + part.run.size // DIGEST_BYTES
    assert part.published == end, f"a sequence counts {part.published} published positions, its run ends at {end}"
    assert part.published == sequence.committed_token_count // size, "not what is committed is published"
    entries = -(-sequence.token_count // size)
    assert len(part.tail) == (entries - part.published) * width, f"a tail does not end at {sequence.token_count} tokens"
    if part.borrowed is not None:
        assert id(part.borrowed) in known, "a borrowed run is not in the tree"
        assert part.borrowed.parent is part.run, "a borrowed run does not follow what the borrower has"
        assert list(part.borrowed.blocks[:width]) == list(part.tail[:width]), "a borrower has other blocks than the run"
        assert sequence.committed_token_count % size, "a sequence without a half-filled block borrows one"


def _shared_once(held: list[int], firsts: Sequence[Any], width: int) -> list[int]:
    """Blocks of half-filled positions that several tails share count once."""
    times = Counter(tuple(first) for first in firsts if len(first) == width)
    for blocks, count in times.items():
        for _ in range(count - 1):
            for block in blocks:
                held.remove(block)
    return held


def _check_sharers(pool: Pool) -> None:
    """Whose half-filled block is also somebody else's is listed, and nobody else is."""
    for number, manager in enumerate(pool.managers):
        if isinstance(manager, FullAttentionManager):
            tails: dict[int, set[int]] = {}
            for sequence in pool.sequences.values():
                part = sequence.parts[number]
                if part.tail and part.borrowed is None:
                    tails.setdefault(part.tail[0], set()).add(id(part))
            wanted = {block: parts for block, parts in tails.items() if len(parts) > 1}
            listed = {block: {id(part) for part in parts} for block, parts in manager._sharers.items()}
            assert listed == wanted, "the sharers of half-filled blocks are not those that share them"


# -- windows and states ------------------------------------------------------------------------------------------------


def _check_units(manager: Any, scope: UnitScope, tables: Sequence[Sequence[Unit]]) -> Found:
    """Each unit counts the tables it is in; the published ones are those of the index."""
    found = Found()
    holders: Counter[int] = Counter(id(unit) for table in tables for unit in table)
    for key, unit in scope.index.items():
        assert unit.key == key, f"a unit of position {key[0]} is filed under another key than its own"
        assert len(key[1]) == DIGEST_BYTES, "a unit is published under a part of a digest"
        found.add(unit, unit.blocks, holders[id(unit)], is_leaf=True)
    for unit in {id(unit): unit for table in tables for unit in table}.values():
        assert unit.scope is scope, "a unit stands in a table of another scope"
        assert len(unit.blocks) == manager.width, "a unit has another number of blocks than there are groups"
        if unit.key is None:
            assert unit.live == holders[id(unit)], f"a private unit counts {unit.live} tables"
            found.held.extend(unit.blocks)
        else:
            assert scope.index.get(unit.key) is unit, "a published unit is not in the index"
    return found


def _check_windows(manager: WindowManager, scope: UnitScope, parts: Parts) -> Found:
    """Tables begin where the window does and end where the grants do; what is committed is published."""
    size = manager.block_size
    for sequence, part in parts:
        assert isinstance(part, WindowPart)
        assert part.scope is scope, "a sequence has its units in another scope"
        end = part.first + len(part.units)
        assert end == -(-sequence.token_count // size), f"a table ends at {end}, not at {sequence.token_count} tokens"
        committed = sequence.committed_token_count
        first = manager._rule.first_needed(committed) // size
        assert part.first == first, f"a table begins at {part.first}, not at {first}"
        for position, unit in enumerate(part.units, part.first):
            if (position + 1) * size <= committed:
                assert unit.key is not None, f"position {position} is computed and not published"
                assert unit.key[0] == position, f"position {position} was published as {unit.key[0]}"
            elif position * size >= committed:
                assert unit.key is None, f"position {position} was published before it was computed"
                assert unit.live == 1, f"position {position} is shared before anything was written to it"
    return _check_units(manager, scope, [part.units for _, part in parts])


def _check_states(manager: StateManager, scope: UnitScope, parts: Parts) -> Found:
    """Every sequence has a running block; one that is published stands for exactly the committed tokens."""
    for sequence, part in parts:
        assert isinstance(part, StatePart)
        assert part.scope is scope, "a sequence has its state in another scope"
        assert part.unit is not None, "a sequence has no state"
        assert len(part.checkpoints) <= manager._checkpoints_max, "a sequence keeps too many checkpoints"
        if part.unit.key is not None:
            tokens = part.unit.key[0] * manager._digest_tokens
            assert tokens == sequence.committed_token_count, f"a state after {tokens} tokens stands for another count"
        if part.unit.key is not None or part.unit.live > 1:
            assert sequence.token_count == sequence.committed_token_count, "a state that others use may be overwritten"
    return _check_units(manager, scope, [[part.unit] for _, part in parts])


_CHECKS: dict[type, Callable[[Any, Any, Parts], Found]] = {
    FullAttentionManager: _check_runs,
    WindowManager: _check_windows,
    StateManager: _check_states,
}


# -- sequences ---------------------------------------------------------------------------------------------------------


def _check_sequence(pool: Pool, sequence_id: int, sequence: SequenceState) -> None:
    committed, token_count = sequence.committed_token_count, sequence.token_count
    assert sequence_id <= pool.last_sequence_id, f"sequence {sequence_id} is above the highest id"
    assert 0 <= committed <= token_count <= sequence.limit, (
        f"{sequence_id}: {committed}, {token_count}, {sequence.limit}"
    )
    parts = list(zip(pool.managers, sequence.parts, strict=True))
    room = min(manager.room(part, token_count) for manager, part in parts)
    # It may also be as low as it was while somebody shared the block that is written next.
    assert sequence.limit in (room, token_count), (
        f"sequence {sequence_id} may grow to {sequence.limit} unseen, there is room for {room}"
    )
    quiet = (committed // pool.digest_tokens + 1) * pool.digest_tokens
    quiet = min([quiet, *[manager.settled_until(part, committed) for manager, part in parts]])
    assert sequence.quiet_until == quiet, (
        f"commits of {sequence_id} are unseen up to {sequence.quiet_until}, not {quiet}"
    )
    assert sequence.is_hold == (sequence_id in pool.holds), (
        f"sequence {sequence_id} is a hold without an end, or not one"
    )


def _check_batch(pool: Pool) -> None:
    """Who was looked up last is still who is there."""
    for sequence_id, sequence in zip(pool._batch_ids, pool._batch, strict=True):
        assert pool.sequences.get(sequence_id) is sequence, f"sequence {sequence_id} is remembered and gone"


def _check_gates(pool: Pool) -> None:
    assert list(pool.sequences) == sorted(pool.sequences), "sequences are not in the order of their ids"
    assert set(pool.holds) <= set(pool.sequences), "a hold that is gone still has an end"
    promised = sum(sequence.promised for sequence in pool.sequences.values())
    counted = pool.gates.promised_block_count
    assert counted == promised, f"{counted} blocks count as promised, {promised} are"
    assert all(sequence.promised >= 0 for sequence in pool.sequences.values()), "a promise of less than nothing"
    for space in pool.blocks.namespaces.values():
        if space.quota is not None and space.quota.cached_block_count_max is not None:
            limit = space.quota.cached_block_count_max
            assert space.cached_count <= limit, f"{space.name!r} left {space.cached_count} blocks of at most {limit}"


def _check_pending(pool: Pool) -> None:
    """Chains are those of live sequences, and are found at exactly the places they name."""
    places: Counter[Any] = Counter()
    for sequence_id, sequence in pool.sequences.items():
        chain = sequence.chain
        if chain is not None:
            done = sequence.committed_token_count // pool.digest_tokens
            assert chain.namespace == sequence.namespace.name, f"{sequence_id} announced to another namespace"
            assert chain.next_digest == done < chain.digest_count, f"{sequence_id} still announces what is published"
            assert chain.places, f"nobody can find what {sequence_id} announced"
            places.update((chain.key(place), id(chain)) for place in chain.places)
    listed = Counter((key, id(chain)) for key, chains in pool.pending._places.items() for chain in chains)
    assert listed == places, "what is announced is not what live sequences are computing"
    assert all(pool.pending._places.values()), "a place that nobody announced is kept"
