"""The memory use of a pool: states of all blocks, and the largest users. Computed on request, never kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.run_tree import holders_of_runs
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.retention.stop import Run
from quire_allocator.core.spec import GroupKind

if TYPE_CHECKING:
    from quire_allocator.core.pool import Pool

LISTED_MAX: Final = 32
Shown = Callable[[str], bool]  # returns whether the caller may learn this namespace's name


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
    """Says how many blocks one group holds and has cached."""

    group: int
    held_block_count: int
    cached_block_count: int


def block_states(pool: Pool) -> BlockStates:
    """Returns the state of every block, counted from all tables."""
    states = BlockStates(pool.spec.block_count, pool.spec.first_block_id)
    spaces = list(pool.blocks.namespaces.values())
    for number, manager in enumerate(pool.managers):
        scopes = [space.scopes[number] for space in spaces]
        manager.mark(states, scopes, [sequence.parts[number] for sequence in pool.sequences.values()])
    return states


def held_count(pool: Pool, namespace: str | None = None) -> int:
    """Counts the blocks that sequences hold, of one namespace or of all."""
    if namespace is None:
        return pool.spec.block_count - pool.blocks.free_count
    space = pool.blocks.namespaces.get(namespace)
    return space.held_count if space is not None else 0


def groups(pool: Pool) -> list[GroupUse]:
    """Returns the use of each group, by its number."""
    uses = []
    spaces = list(pool.blocks.namespaces.values())
    for number, manager in enumerate(pool.managers):
        held = sum(space.scopes[number].held for space in spaces)
        cached = sum(space.scopes[number].cached for space in spaces)
        width = len(manager.groups)
        uses += [GroupUse(group, held // width, cached // width) for group in manager.groups]
    return sorted(uses)


def namespaces(pool: Pool, shown: Shown) -> list[NamespaceUse]:
    """Returns the largest namespaces that the caller may see, by blocks held and cached; at most `LISTED_MAX`."""
    uses = (
        NamespaceUse(space.name, space.held_count, space.cached_count, space.sequence_count)
        for space in pool.blocks.namespaces.values()
        if shown(space.name)
    )
    return nlargest(LISTED_MAX, uses, key=lambda use: (use.held_block_count + use.cached_block_count, use.namespace))


def unwritten_slot_count(pool: Pool) -> int:
    """Counts the granted slots that have no committed token: the lookahead of sequences, and the rest of each last
    block.

    Looks at the first group that holds tokens, and at each table separately: if forks share a half-filled block, each
    of them counts it.
    """
    size = next((group.block_size for group in pool.spec.groups if group.kind is not GroupKind.STATE), 0)
    if not size:
        return 0
    return sum(
        -(-sequence.token_count // size) * size - sequence.committed_token_count for sequence in pool.sequences.values()
    )


def longest_prefixes(pool: Pool, shown: Shown) -> list[PrefixUse]:
    """Returns the deepest leaves of all trees, at most `LISTED_MAX`."""
    leaves = [run for run in _runs(pool, shown) if not run.children]
    holders = _holders(pool)
    return [_use(run, holders[run]) for run in nlargest(LISTED_MAX, leaves, key=Run.token_count)]


def most_shared_prefixes(pool: Pool, shown: Shown) -> list[PrefixUse]:
    """Returns the runs that most sequences hold, at least two each; at most `LISTED_MAX`."""
    holders = _holders(pool)
    shared = [run for run in _runs(pool, shown) if holders[run] > 1]
    most = nlargest(LISTED_MAX, shared, key=lambda run: (holders[run], run.block_count))
    return [_use(run, holders[run]) for run in most]


def table_entry_count(pool: Pool) -> int:
    """Counts the blocks in all tables. A shared block counts once per table, as if sequences did not share."""
    return sum(
        manager.footprint(part, sequence.token_count)
        for sequence in list(pool.sequences.values())  # a copy, because another thread reads the metrics
        for manager, part in zip(pool.managers, sequence.parts)
    )


def run_counts(pool: Pool) -> tuple[int, int]:
    """Counts the runs of the pool, and the blocks in them."""
    sizes = [run.block_count for run in _runs(pool)]
    return len(sizes), sum(sizes)


def free_stretch_count(states: BlockStates) -> int:
    """Counts the stretches of consecutive ids that the free blocks form."""
    import numpy as np

    free = np.concatenate(([False], states.holders[states.first_id :] == 0))
    return int(np.count_nonzero(free[1:] & ~free[:-1]))


def _runs(pool: Pool, shown: Shown = lambda _name: True) -> Iterator[Run]:
    """Yields every run of the namespaces that the caller may see, parents before children."""
    for number, manager in enumerate(pool.managers):
        if isinstance(manager, FullAttentionManager):
            for space in pool.blocks.namespaces.values():
                if shown(space.name):
                    yield from manager.tree.runs(cast(RunScope, space.scopes[number]).root)


def _holders(pool: Pool) -> Counter[Run]:
    """Counts the sequences that hold each run."""
    parts = [part for sequence in pool.sequences.values() for part in sequence.parts]
    return holders_of_runs(_runs(pool), [part.run for part in parts if isinstance(part, RunPart)])


def _use(run: Run, holders: int) -> PrefixUse:
    return PrefixUse(run.scope.namespace.name, run.last_digest, run.token_count(), run.block_count, holders)
