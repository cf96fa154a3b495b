"""The memory use of a pool: states of all blocks, and the largest users. Looked at on request, never kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import nlargest
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.groups.full import FullAttentionManager, RunPart
from quire_allocator.core.groups.run_tree import RunTree, holders_of_runs
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.retention.stop import Run
from quire_allocator.core.spec import GroupKind, GroupSpec

if TYPE_CHECKING:
    from quire_allocator.core.pool import Pool

LISTED_MAX: Final = 32
SPECIFICATIONS_MAX: Final = 16  # that a metric has a label for
Shown = Callable[[str], bool]  # tells whether a namespace may be named to the caller


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


class RetentionUse(NamedTuple):
    """Block counts of the groups of one specification.

    Attributes:
        name: the kind of the group, and the sizes of blocks and windows: `sliding_window 16 1024`.
        held: in tables.
        kept: cached, as something that a prompt is likely to hit.
        spare: cached, and evicted first.
    """

    name: str
    held: int
    kept: int
    spare: int


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


def retention(pool: Pool) -> list[RetentionUse]:
    """Returns the kept blocks of each specification's groups, in the order of search. Where there are more than
    `SPECIFICATIONS_MAX`, all that are left are one, `others`."""
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
    return f"{spec.kind.value} {sizes}"


def namespaces(pool: Pool, shown: Shown) -> list[NamespaceUse]:
    """Returns the largest namespaces that may be named, by blocks held and cached; at most `LISTED_MAX`."""
    uses = (
        NamespaceUse(space.name, space.held_count, space.cached_count, space.sequence_count)
        for space in pool.blocks.namespaces.values()
        if shown(space.name)
    )
    return nlargest(LISTED_MAX, uses, key=lambda use: (use.held_block_count + use.cached_block_count, use.namespace))


def unwritten_slot_count(pool: Pool) -> int:
    """Counts the tokens of room that sequences were granted and have not committed: lookahead, and the rest of a last
    block.

    It looks at the first group that holds tokens, and at each table by itself: a half-filled block that forks share
    counts for each of them.
    """
    size = next((group.block_size for group in pool.spec.groups if group.kind is not GroupKind.STATE), 0)
    if not size:
        return 0
    return sum(
        -(-sequence.token_count // size) * size - sequence.committed_token_count for sequence in pool.sequences.values()
    )


def longest_prefixes(pool: Pool, shown: Shown) -> list[PrefixUse]:
    """Returns the deepest leaves of all trees, at most `LISTED_MAX`."""
    leaves = ((run, tree) for run, tree in _runs(pool, shown) if not run.children)
    deepest = nlargest(LISTED_MAX, leaves, key=lambda leaf: leaf[0].first_position + len(leaf[0].blocks))
    holders = _holders(pool)
    return [_use(run, tree, holders[run], pool) for run, tree in deepest]


def most_shared_prefixes(pool: Pool, shown: Shown) -> list[PrefixUse]:
    """Returns the runs that most sequences hold, at least two each; at most `LISTED_MAX`."""
    holders = _holders(pool)
    shared = ((run, tree) for run, tree in _runs(pool, shown) if holders[run] > 1)
    most = nlargest(LISTED_MAX, shared, key=lambda item: (holders[item[0]], len(item[0].blocks)))
    return [_use(run, tree, holders[run], pool) for run, tree in most]


def table_entry_count(pool: Pool) -> int:
    """Counts the blocks in all tables, shared ones each time, as separate caches would hold them."""
    return sum(
        manager.footprint(part, sequence.token_count)
        for sequence in pool.sequences.values()
        for manager, part in zip(pool.managers, sequence.parts)
    )


def run_counts(pool: Pool) -> tuple[int, int]:
    """Counts the runs of the pool, and the blocks in them."""
    sizes = [len(run.blocks) for run, _ in _runs(pool)]
    return len(sizes), sum(sizes)


def free_stretch_count(states: BlockStates) -> int:
    """Counts the stretches of consecutive ids that the free blocks form."""
    import numpy as np

    free = np.concatenate(([False], states.holders[states.first_id :] == 0))
    return int(np.count_nonzero(free[1:] & ~free[:-1]))


def _trees(pool: Pool) -> Iterator[tuple[int, RunTree]]:
    """Yields the number of each manager of full attention, and its trees."""
    for number, manager in enumerate(pool.managers):
        if manager.spec.kind is GroupKind.FULL_ATTENTION:
            yield number, cast(FullAttentionManager, manager).tree


def _runs(pool: Pool, shown: Shown = lambda _name: True) -> Iterator[tuple[Run, int]]:
    """Yields every run of the namespaces that may be named, with the number of its manager."""
    for number, tree in _trees(pool):
        for space in filter(lambda space: shown(space.name), pool.blocks.namespaces.values()):
            for run in tree.runs(cast(RunScope, space.scopes[number]).root):
                yield run, number


def _holders(pool: Pool) -> Counter[Run]:
    """Counts the sequences that hold each run."""
    holders: Counter[Run] = Counter()
    for number, _ in _trees(pool):
        ends = [cast(RunPart, sequence.parts[number]).run for sequence in pool.sequences.values()]
        holders += holders_of_runs([run for run, n in _runs(pool) if n == number], ends)
    return holders


def _use(run: Run, number: int, holders: int, pool: Pool) -> PrefixUse:
    manager = pool.managers[number]
    width, size = len(manager.groups), manager.spec.block_size
    end = run.first_position + len(run.blocks) // width
    return PrefixUse(run.scope.namespace.name, run.last_digest, end * size, len(run.blocks), holders)
