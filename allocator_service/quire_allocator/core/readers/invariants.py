"""The invariants of a pool, recounted from its tables: for tests, and for servers with `--check-invariants`.

Slow on purpose: nothing here trusts a count, a queue or a link that the pool keeps for speed. Every check names the
broken invariant in its message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import retention
from quire_allocator.core.readers.group_invariants import CHECKS, Recount, Use
from quire_allocator.core.scopes import Namespace
from quire_allocator.core.sequence import SequenceState


def check(pool: Pool) -> None:
    """Checks everything in this file and in `group_invariants.py`.

    Raises:
        AssertionError: with the broken invariant in its message.
    """
    pool.blocks.check_invariants()
    spaces = _spaces(pool)
    found: list[Recount] = []
    for number in range(len(pool.managers)):
        found += _check_manager(pool, number, spaces)
    _check_blocks(pool, found)
    _check_queues(pool, found)
    retention.check(pool, spaces)
    for sequence_id, sequence in pool.sequences.items():
        _check_sequence(pool, sequence_id, sequence)
    _check_batch(pool)
    _check_admission(pool)
    _check_pending(pool)


def _check_manager(pool: Pool, number: int, spaces: Sequence[Namespace]) -> list[Recount]:
    """Checks every scope of a manager by the rules of its kind of group, and counts its blocks."""
    manager = pool.managers[number]
    uses = []
    for space in spaces:
        scope = space.scopes[number]
        assert scope.namespace is space, "a scope has another namespace than the one that lists it"
        assert scope.manager is manager, "a scope is listed in the place of another manager's scope"
        sequences = [sequence for sequence in pool.sequences.values() if sequence.namespace is space]
        uses.append(Use(scope, [(sequence, sequence.parts[number]) for sequence in sequences]))
    found = CHECKS[manager.spec.kind](manager, uses)
    for use, own in zip(uses, found, strict=True):
        scope = use.scope
        name, held, cached = scope.namespace.name, len(own.held), len(own.cached)
        assert scope.held == held, f"{scope.held} blocks of {name!r} count as held, but {held} are"
        assert scope.cached == cached, f"{scope.cached} blocks of {name!r} count as cached, but {cached} are"
    return found


# -- blocks ------------------------------------------------------------------------------------------------------------


def _spaces(pool: Pool) -> list[Namespace]:
    """Returns every namespace. A namespace's name is known exactly as long as the namespace is in use."""
    spaces = list(pool.blocks.namespaces.items())
    counts = Counter(id(sequence.namespace) for sequence in pool.sequences.values())
    known = {id(space) for _, space in spaces}
    for sequence_id, sequence in pool.sequences.items():
        assert id(sequence.namespace) in known, f"the namespace of sequence {sequence_id} was removed"
    for name, space in spaces:
        assert space.name == name, f"namespace {space.name!r} is listed as {name!r}"
        assert space.sequence_count == counts[id(space)], f"{name!r} miscounts {space.sequence_count} sequences"
        is_used = space.sequence_count or space.held_count or space.cached_count
        assert is_used, f"namespace {name!r} is empty but was not removed"
        limits_cache = space.quota is not None and space.quota.cached_blocks_max is not None
        assert (space.queue is not None) == limits_cache, (
            f"{name!r} has a queue without a limit, or a limit without a queue"
        )
    return [space for _, space in spaces]


def _check_blocks(pool: Pool, found: Sequence[Recount]) -> None:
    """Checks that every block is exactly one of empty, cached and held."""
    uses = Counter(pool.blocks.empty)
    for own in found:
        uses.update(own.held)
        uses.update(own.cached)
    twice = sorted(block for block, count in uses.items() if count > 1)
    assert not twice, f"blocks {twice} have two uses"
    lost = sorted(set(range(pool.spec.first_block_id, pool.spec.block_id_end)) - set(uses))
    assert not lost, f"blocks {lost} are lost"
    assert len(uses) == pool.spec.block_count, "a block id is outside the pool"
    cached = sum(len(own.cached) for own in found)
    assert pool.blocks.cached_count == cached, f"{pool.blocks.cached_count} blocks count as cached, but {cached} are"
    assert pool.blocks.free_count == cached + len(pool.blocks.empty), "free_count is not empty plus cached"


def _check_queues(pool: Pool, found: Sequence[Recount]) -> None:
    """Checks that the candidates for eviction are exactly the cached entries with nothing below them."""
    candidates = [entry for own in found for entry in own.candidates]
    wanted = {id(entry) for entry in candidates}
    for own in found:
        for entry in own.entries:
            assert bool(entry.ticket) == (id(entry) in wanted), "only entries that can be evicted have tickets"
    assert len(pool.blocks.queue) == len(candidates), (
        f"{len(pool.blocks.queue)} entries are queued for eviction, but {len(candidates)} can be evicted"
    )
    tickets = [entry.ticket for entry in candidates]
    assert len(set(tickets)) == len(tickets), "two candidates have the same ticket"
    queued = {ticket for _, ticket, entry in pool.blocks.queue.items() if ticket == entry.ticket}
    assert queued == set(tickets), "a candidate is not queued, or is queued under another ticket"
    for entry in candidates:
        queue = entry.scope.namespace.queue
        if queue is not None:
            tickets_of_it = {ticket for _, ticket, other in queue.items() if other is entry}
            assert entry.ticket in tickets_of_it, "a candidate is missing in its namespace's queue"


# -- sequences ---------------------------------------------------------------------------------------------------------


def _check_sequence(pool: Pool, sequence_id: int, sequence: SequenceState) -> None:
    committed, token_count = sequence.committed_token_count, sequence.token_count
    assert sequence_id <= pool.last_sequence_id, f"sequence {sequence_id} is above last_sequence_id"
    assert 0 <= committed <= token_count <= sequence.limit, (
        f"sequence {sequence_id}: {committed} committed, {token_count} tokens and limit {sequence.limit} do not rise"
    )
    parts = list(zip(pool.managers, sequence.parts, strict=True))
    room = min(manager.room(part, token_count) for manager, part in parts)
    # The limit is the token count while sequences share the block to write next. The limit may stay so afterwards.
    assert sequence.limit in (room, token_count), (
        f"sequence {sequence_id} has the limit {sequence.limit}, but room for {room} tokens"
    )
    quiet = (committed // pool.digest_tokens + 1) * pool.digest_tokens
    quiet = min([quiet, *[manager.settled_until(part, committed) for manager, part in parts]])
    assert sequence.quiet_until == quiet, (
        f"quiet_until of sequence {sequence_id} is {sequence.quiet_until}, not {quiet}"
    )


def _check_batch(pool: Pool) -> None:
    """Checks that the sequences that the last `grow_many` looked up still have these ids."""
    for sequence_id, sequence in pool._batch.items():
        assert pool.sequences.get(sequence_id) is sequence, f"the last batch has sequence {sequence_id}, which is gone"


def _check_admission(pool: Pool) -> None:
    assert list(pool.sequences) == sorted(pool.sequences), "sequences are not in the order of their ids"
    promised = sum(sequence.promised for sequence in pool.sequences.values())
    counted = pool.admission.promised_block_count
    assert counted == promised, f"{counted} blocks count as promised, but {promised} are"
    assert all(sequence.promised >= 0 for sequence in pool.sequences.values()), "a negative number of promised blocks"
    for space in pool.blocks.namespaces.values():
        if space.quota is not None and space.quota.cached_blocks_max is not None:
            limit = space.quota.cached_blocks_max
            assert space.cached_count <= limit, f"{space.name!r} has {space.cached_count} cached blocks, above {limit}"


def _check_pending(pool: Pool) -> None:
    """Checks that only live sequences have announcements, each filed under exactly the places that it names."""
    places: Counter[Any] = Counter()
    left = 0
    for sequence_id, sequence in pool.sequences.items():
        announced = sequence.announcement
        if announced is not None:
            done = sequence.committed_token_count // pool.digest_tokens
            assert announced.namespace == sequence.namespace.name, f"{sequence_id} announced to another namespace"
            assert announced.next_digest == done < announced.digest_count, (
                f"{sequence_id} still announces published blocks"
            )
            assert announced.places, f"the announcement of {sequence_id} has no place where it can be found"
            left += announced.digest_count - done
            places.update((announced.key(place), id(announced)) for place in announced.places)
    listed = Counter((key, id(found)) for key, founds in pool.pending._places.items() for found in founds)
    assert listed == places, "the index of announcements differs from the live sequences' announcements"
    assert all(pool.pending._places.values()), "the index of announcements has an empty place"
    assert pool.pending.left_count == left, f"{pool.pending.left_count} digests are counted as unpublished, not {left}"
