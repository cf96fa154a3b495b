"""Where the memory of a pool goes: states of all blocks, and the largest users. Looked at on request, never kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import TYPE_CHECKING, Final, NamedTuple

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.groups.runs import Run, RunScope, RunTree, holders_of_runs
from quire_allocator.core.spec import GroupKind

if TYPE_CHECKING:
    from quire_allocator.core.pool import Pool

LISTED_MAX: Final = 32
Shown = Callable[[str], bool]  # which namespaces may be named


class PrefixUse(NamedTuple):
    """A run as readers see it: `token_count` tokens from the root to its end, `block_count` blocks of its own."""

    namespace: str
    digest: bytes
    token_count: int
    block_count: int
    holder_count: int


class NamespaceUse(NamedTuple):
    """Blocks and sequences of one namespace."""

    namespace: str
    held_block_count: int
    cached_block_count: int
    sequence_count: int


class GroupUse(NamedTuple):
    """Blocks of one group."""

    group: int
    held_block_count: int
    cached_block_count: int


def block_states(pool: Pool) -> BlockStates:
    """Counts every table."""
    states = BlockStates(pool.spec.block_count)
    spaces = list(pool.blocks.namespaces.values())
    for number, manager in enumerate(pool.managers):
        scopes = [space.scopes[number] for space in spaces]
        manager.mark(states, scopes, [sequence.parts[number] for sequence in pool.sequences.values()])
    return states


def groups(pool: Pool) -> list[GroupUse]:
    """Blocks by group."""
    uses = []
    spaces = list(pool.blocks.namespaces.values())
    for number, manager in enumerate(pool.managers):
        held = sum(space.scopes[number].held for space in spaces)
        cached = sum(space.scopes[number].cached for space in spaces)
        width = len(manager.groups)
        uses += [GroupUse(group, held // width, cached // width) for group in manager.groups]
    return sorted(uses)


def namespaces(pool: Pool, shown: Shown) -> list[NamespaceUse]:
    """The largest namespaces, by blocks held and cached."""
    uses = (
        NamespaceUse(space.name, space.held_count, space.cached_count, space.sequence_count)
        for space in pool.blocks.namespaces.values()
        if shown(space.name)
    )
    return nlargest(LISTED_MAX, uses, key=lambda use: (use.held_block_count + use.cached_block_count, use.namespace))


def unwritten_slot_count(pool: Pool) -> int:
    """Tokens of room that sequences were granted and have not committed: ahead of them, or the rest of a last block.

    In the first group that holds tokens, as each table sees it: a half-filled block that forks share counts for each.
    """
    size = next((group.block_size for group in pool.spec.groups if group.kind is not GroupKind.STATE), 0)
    if not size:
        return 0
    return sum(
        -(-sequence.token_count // size) * size - sequence.committed_token_count
        for sequence in pool.sequences.values()
        if not sequence.is_hold
    )


def longest_prefixes(pool: Pool, shown: Shown) -> list[PrefixUse]:
    """The deepest leaves of all trees."""
    leaves = ((run, tree) for run, tree in _runs(pool, shown) if not run.children)
    deepest = nlargest(LISTED_MAX, leaves, key=lambda leaf: leaf[0].first_position + len(leaf[0].blocks))
    holders = _holders(pool)
    return [_use(run, tree, holders[run], pool) for run, tree in deepest]


def most_shared_prefixes(pool: Pool, shown: Shown) -> list[PrefixUse]:
    """The runs that most tables hold, of those that at least two do."""
    holders = _holders(pool)
    shared = ((run, tree) for run, tree in _runs(pool, shown) if holders[run] > 1)
    most = nlargest(LISTED_MAX, shared, key=lambda item: (holders[item[0]], len(item[0].blocks)))
    return [_use(run, tree, holders[run], pool) for run, tree in most]


def run_counts(pool: Pool) -> tuple[int, int]:
    """Runs, and blocks in them."""
    sizes = [len(run.blocks) for run, _ in _runs(pool)]
    return len(sizes), sum(sizes)


def free_stretch_count(states: BlockStates) -> int:
    """Stretches of consecutive ids that the free blocks form."""
    import numpy as np

    free = np.concatenate(([False], states.holders == 0))
    return int(np.count_nonzero(free[1:] & ~free[:-1]))


def _trees(pool: Pool) -> Iterator[tuple[int, RunTree]]:
    for number, manager in enumerate(pool.managers):
        tree = getattr(manager, "tree", None)
        if tree is not None:
            yield number, tree


def _runs(pool: Pool, shown: Shown = lambda _name: True) -> Iterator[tuple[Run, int]]:
    """Every run of these namespaces, with the number of its manager."""
    for number, tree in _trees(pool):
        for space in filter(lambda space: shown(space.name), pool.blocks.namespaces.values()):
            scope = space.scopes[number]
            assert isinstance(scope, RunScope)
            for run in tree.runs(scope.root):
                yield run, number


def _holders(pool: Pool) -> Counter[Run]:
    holders: Counter[Run] = Counter()
    for number, _ in _trees(pool):
        ends = [sequence.parts[number].run for sequence in pool.sequences.values()]
        holders += holders_of_runs([run for run, n in _runs(pool) if n == number], ends)
    return holders


def _use(run: Run, number: int, holders: int, pool: Pool) -> PrefixUse:
    manager = pool.managers[number]
    width, size = len(manager.groups), manager.spec.block_size
    end = run.first_position + len(run.blocks) // width
    return PrefixUse(run.scope.namespace.name, run.last_digest, end * size, len(run.blocks), holders)
