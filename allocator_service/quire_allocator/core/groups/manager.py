"""What the pool asks of the groups of one specification: one interface, whatever the type of attention.

A pool of many layers has several groups of one specification (say five of sliding windows): they need, share and give
back blocks at the same positions, so one manager decides once for all of them. Its `width` is their number.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.blocks import Evictor, Namespace, Scope
from quire_allocator.core.spec import Copy, Swap


class Hit:
    """What one manager found of a prefix. Valid until the pool changes.

    Attributes:
        token_count: tokens that it can serve.
        block_count: blocks that a sequence holds by taking it.
        cached_block_count: blocks of it that nobody holds: taking it leaves so many fewer to grant.
    """

    __slots__ = ("block_count", "cached_block_count", "token_count")

    def __init__(self, token_count: int, block_count: int, cached_block_count: int) -> None:
        self.token_count = token_count
        self.block_count = block_count
        self.cached_block_count = cached_block_count


class Manager(Evictor):
    """Tables and published blocks of all groups of one specification.

    `hit` and `part` are its own: what `find` found, and what one sequence has here. Block counts include all its
    groups. A prefix that is served always ends at a block edge of every manager but those of states.

    Attributes:
        groups: their numbers in the pool.
        in_place: forward passes overwrite what was committed before, so that a fork needs everything committed.
        settles: `settle` may have something to give back.
    """

    in_place = False
    settles = False

    @abstractmethod
    def new_scope(self, namespace: Namespace) -> Scope:
        """What a new namespace has here: nothing."""

    @abstractmethod
    def find(self, scope: Any, digests: bytes, token_limit: int) -> Hit:
        """The hit rule: the longest published prefix of at most so many tokens. Changes nothing."""

    @abstractmethod
    def needed_after(self, hit: Any, token_count: int) -> int:
        """Blocks to grant beside a hit, for a new sequence of so many tokens."""

    @abstractmethod
    def open(self, scope: Any, hit: Any, prompt_token_count: int) -> Any:
        """Takes references on a hit; what a new sequence has here."""

    @abstractmethod
    def needed(self, part: Any, token_count: int, until: int) -> int:
        """Blocks to grant so that a sequence of `token_count` tokens can hold `until`, copies included."""

    @abstractmethod
    def footprint(self, part: Any, token_count: int) -> int:
        """Blocks in its tables when it holds so many tokens, and no more has fallen out."""

    @abstractmethod
    def peak(self, token_count: int, pass_token_count: int) -> int:
        """The admission bound: most blocks of a sequence of so many tokens, computed so many at a time."""

    @abstractmethod
    def room(self, part: Any, token_count: int) -> int:
        """Tokens up to which it can grow without anything being granted or copied."""

    @abstractmethod
    def grow(self, part: Any, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        """Adds the `needed` blocks, just granted; the first ones may replace what is not the sequence's alone, and only
        then the array is the manager's to keep. Returns the tokens up to which nothing has to be granted or copied from
        now on."""

    def append(self, part: Any, block: int) -> None:
        """The same of one block at a block edge, where nothing is shared, for a manager of one group."""
        self.grow(part, 0, 0, array("I", [block]), [])

    @abstractmethod
    def let_go(self, part: Any, token_count: int) -> int:
        """Blocks that the next grow replaces by copies and that nobody else holds."""

    @abstractmethod
    def give_up(self, part: Any) -> None:
        """Takes back what was published of a block that forward passes overwrite, if nobody else holds it."""

    @abstractmethod
    def added(self, part: Any, blocks: array[int]) -> list[array[int]]:
        """Per group, in order, the last entries of its table, where `blocks` were just granted."""

    @abstractmethod
    def commit(self, part: Any, committed: int, until: int, digests: bytes, swaps: list[Swap]) -> None:
        """Publishes what became full; `digests` are those of the digest blocks in [committed, until)."""

    @abstractmethod
    def settle(self, part: Any, committed: int) -> int:
        """The skip rule: gives back what no token from `committed` on reads. Returns `settled_until`."""

    @abstractmethod
    def settled_until(self, part: Any, committed: int) -> int:
        """Committed tokens before which nothing more falls out."""

    @abstractmethod
    def fork(self, part: Any, committed: int) -> Any:
        """What another sequence has that shares what is committed."""

    @abstractmethod
    def shrink(self, part: Any, until: int) -> None:
        """Gives back blocks beyond `until` tokens, none of them written or shared."""

    @abstractmethod
    def free(self, part: Any) -> None:
        """Drops everything, tail first."""

    @abstractmethod
    def tables(self, part: Any) -> list[array[int]]:
        """One table per group, in order."""

    @abstractmethod
    def shared_token_count(self, part: Any) -> int:
        """Leading tokens that need not be computed again if the sequence is freed, since others hold them too."""

    @abstractmethod
    def mark(self, states: BlockStates, scopes: Sequence[Any], parts: Sequence[Any]) -> None:
        """Says which blocks, of all namespaces and all live sequences, are in how many tables."""
