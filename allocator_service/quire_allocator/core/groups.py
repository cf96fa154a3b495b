"""One manager per specification of group, behind one interface; the pool knows none of them by name.

A pool of many layers has several groups of one specification (say five of sliding windows): they need, share and give
back blocks at the same positions, so one manager decides once for all of them. Its `width` is their number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from quire_allocator.core.blocks import Blocks, Namespace, Scope, Scoped
from quire_allocator.core.events import EventLog
from quire_allocator.core.full import FullAttentionManager
from quire_allocator.core.spec import Copy, GroupKind, GroupSpec, PoolSpec, Swap
from quire_allocator.core.states import StateManager
from quire_allocator.core.usage import BlockStates
from quire_allocator.core.windows import WindowManager


class Hit(Protocol):
    """What one manager found of a prefix. Valid until the pool changes.

    Attributes:
        token_count: tokens that it can serve.
        block_count: blocks that a sequence holds by taking it.
        cached_block_count: blocks of it that nobody holds: taking it leaves so many fewer to grant.
    """

    @property
    def token_count(self) -> int:
        """See above."""

    @property
    def block_count(self) -> int:
        """See above."""

    @property
    def cached_block_count(self) -> int:
        """See above."""


class Manager(Protocol):
    """Tables and published blocks of all groups of one specification.

    `hit` and `part` are its own: what `find` found, and what one sequence has here. Block counts include all its
    groups. A prefix that is served always ends at a block edge of every manager but those of states.

    Attributes:
        groups: their numbers in the pool.
        in_place: forward passes overwrite what was committed before, so that a fork needs everything committed.
        settles: `settle` may have something to give back.
    """

    spec: GroupSpec
    groups: tuple[int, ...]
    in_place: bool
    settles: bool

    def new_scope(self, namespace: Namespace) -> Scope:
        """What a new namespace has here: nothing."""

    def find(self, scope: Any, digests: bytes, token_limit: int) -> Hit:
        """The hit rule: the longest published prefix of at most so many tokens. Changes nothing."""

    def needed_after(self, hit: Any, token_count: int) -> int:
        """Blocks to grant beside a hit, for a new sequence of so many tokens."""

    def open(self, scope: Any, hit: Any, prompt_token_count: int) -> Any:
        """Takes references on a hit; what a new sequence has here."""

    def needed(self, part: Any, token_count: int, until: int) -> int:
        """Blocks to grant so that a sequence of `token_count` tokens can hold `until`, copies included."""

    def footprint(self, part: Any, token_count: int) -> int:
        """Blocks in its tables when it holds so many tokens, and no more has fallen out."""

    def peak(self, token_count: int, pass_token_count: int) -> int:
        """The admission bound: most blocks of a sequence of so many tokens, computed so many at a time."""

    def room(self, part: Any, token_count: int) -> int:
        """Tokens up to which it can grow without anything being granted or copied."""

    def grow(self, part: Any, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        """Adds the `needed` blocks, just granted, which are the manager's to keep; the first ones may replace what is
        not the sequence's alone. Returns the tokens up to which nothing has to be granted or copied from now on."""

    def let_go(self, part: Any, token_count: int) -> int:
        """Blocks that the next grow replaces by copies and that nobody else holds."""

    def give_up(self, part: Any) -> None:
        """Takes back what was published of a block that forward passes overwrite, if nobody else holds it."""

    def added(self, part: Any, blocks: array[int]) -> list[array[int]]:
        """Per group, in order, the last entries of its table, where `blocks` were just granted."""

    def commit(self, part: Any, committed: int, until: int, digests: bytes, swaps: list[Swap]) -> None:
        """Publishes what became full; `digests` are those of the digest blocks in [committed, until)."""

    def settle(self, part: Any, committed: int) -> int:
        """The skip rule: gives back what no token from `committed` on reads. Returns `settled_until`."""

    def settled_until(self, part: Any, committed: int) -> int:
        """Committed tokens before which nothing more falls out."""

    def fork(self, part: Any, committed: int) -> Any:
        """What another sequence has that shares what is committed."""

    def shrink(self, part: Any, until: int) -> None:
        """Gives back blocks beyond `until` tokens, none of them written or shared."""

    def free(self, part: Any) -> None:
        """Drops everything, tail first."""

    def tables(self, part: Any) -> list[array[int]]:
        """One table per group, in order."""

    def shared_token_count(self, part: Any) -> int:
        """Leading tokens that need not be computed again if the sequence is freed, since others hold them too."""

    def mark(self, states: BlockStates, scopes: Sequence[Any], parts: Sequence[Any]) -> None:
        """Says which blocks, of all namespaces and all live sequences, are in how many tables."""

    def evict(self, entry: Scoped, wanted: int) -> int:
        """Empties at least `wanted` blocks of a candidate, or all it has; returns how many."""


# Groups that find prefixes from the left come first: they bound the search of those that look from the right.
MANAGERS: dict[GroupKind, Any] = {
    GroupKind.FULL_ATTENTION: FullAttentionManager,
    GroupKind.SLIDING_WINDOW: WindowManager,
    GroupKind.CHUNKED_LOCAL: WindowManager,
    GroupKind.STATE: StateManager,
}


def make_managers(spec: PoolSpec, blocks: Blocks, log: EventLog) -> tuple[Manager, ...]:
    """The managers of a pool, in the order in which prefixes are searched."""
    members: dict[GroupSpec, list[int]] = {}
    for number, group in enumerate(spec.groups):
        members.setdefault(group, []).append(number)
    order = list(MANAGERS)
    ordered: Sequence[GroupSpec] = sorted(members, key=lambda group: order.index(group.kind))
    return tuple(MANAGERS[g.kind](g, members[g], spec, blocks, log) for g in ordered)
