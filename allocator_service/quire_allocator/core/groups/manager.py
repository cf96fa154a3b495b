"""The interface between the pool and the groups of one specification, the same for each type of attention.

A pool of many layers has several groups of one specification (say five of sliding windows). They need, share and give
back blocks at the same positions, so one manager decides for all of them. `width` is the number of groups.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from quire_allocator.core.block_states import BlockStates
from quire_allocator.core.events import EventLog
from quire_allocator.core.retention.partings import Behind
from quire_allocator.core.retention.retention import Retention
from quire_allocator.core.retention.stop import Run, Unit
from quire_allocator.core.scopes import Evictor, Namespace, Scope, Scoped
from quire_allocator.core.sequence import Part
from quire_allocator.core.spec import NEVER, Copy, GroupSpec, PoolSpec, Swap


class Hit:
    """A prefix that one manager found. Valid until the pool changes.

    Attributes:
        token_count: tokens that the manager can serve.
        block_count: blocks that a sequence holds by taking it.
        cached_block_count: blocks of the hit that no sequence holds; taking it leaves so many fewer to grant.
    """

    __slots__ = ("block_count", "cached_block_count", "token_count")

    def __init__(self, token_count: int, block_count: int, cached_block_count: int) -> None:
        self.token_count = token_count
        self.block_count = block_count
        self.cached_block_count = cached_block_count


class Commit:
    """The tokens that a sequence has just computed.

    Attributes:
        committed, until: its committed tokens before and after.
        digests: the digests of the blocks in [committed, until).
        ends: token counts in (committed, until] at which later hits should be able to end; rising.
        swaps: filled with replacements of blocks that other sequences published before.
    """

    __slots__ = ("committed", "digests", "ends", "swaps", "until")

    def __init__(self, committed: int, until: int, digests: bytes, ends: tuple[int, ...]) -> None:
        self.committed = committed
        self.until = until
        self.digests = digests
        self.ends = ends
        self.swaps: list[Swap] = []


class IndexedStretch(NamedTuple):
    """Consecutive published blocks of one prefix, in the groups of one specification; fields as in `events.Event`."""

    namespace: str
    groups: tuple[int, ...]
    spec: GroupSpec
    parent_digest: bytes
    digests: bytes
    first_position: int


ScopeT = TypeVar("ScopeT", bound=Scope)
HitT = TypeVar("HitT", bound=Hit)
PartT = TypeVar("PartT", bound=Part)


class Manager(Evictor, Generic[ScopeT, HitT, PartT]):
    """Tables and published blocks of all groups of one specification.

    Each manager has its own classes for the scope of a namespace, the hits of `find`, and the part of a sequence. Block
    counts include all its groups. A served prefix ends at a block edge of every manager, except managers of states.

    Attributes:
        groups: the numbers of its groups in the pool.
        in_place: whether forward passes overwrite committed state. A fork then needs all tokens committed.
        settles: whether `settle` may have something to give back.
    """

    in_place = False
    settles = False

    def __init__(
        self, spec: GroupSpec, groups: Sequence[int], pool: PoolSpec, log: EventLog, retention: Retention
    ) -> None:
        self.spec = spec
        self.groups = tuple(groups)
        self.width = len(self.groups)
        self.block_size = spec.block_size
        self._stride = spec.block_size // pool.block_size  # digests per block
        self._digest_tokens = pool.block_size
        self._edge_tokens = pool.edge_tokens
        self._append_only = pool.append_only
        self._blocks = retention.blocks
        self._log = log
        self._retention = retention

    @abstractmethod
    def new_scope(self, namespace: Namespace) -> ScopeT:
        """Returns the empty scope of a new namespace."""

    @abstractmethod
    def find(self, scope: ScopeT, digests: bytes, token_limit: int) -> HitT:
        """Returns the longest published prefix of at most `token_limit` tokens, by the hit rule. Changes nothing."""

    @abstractmethod
    def needed_after(self, hit: HitT, token_count: int) -> int:
        """Counts the blocks to grant in addition to a hit, for a new sequence of `token_count` tokens."""

    @abstractmethod
    def open(self, scope: ScopeT, hit: HitT) -> PartT:
        """Takes references on a hit, and returns the part of a new sequence."""

    @abstractmethod
    def needed(self, part: PartT, token_count: int, until: int) -> int:
        """Counts the blocks to grant, copies included, so that a sequence of `token_count` tokens can hold `until`."""

    @abstractmethod
    def footprint(self, part: PartT, token_count: int) -> int:
        """Counts the blocks in a sequence's tables at `token_count` tokens, if no more blocks leave its windows."""

    @abstractmethod
    def peak(self, token_count: int, pass_token_count: int) -> int:
        """Returns the admission bound: the most blocks that a sequence of `token_count` tokens ever holds, if each pass
        computes at most `pass_token_count` of them."""

    @abstractmethod
    def room(self, part: PartT, token_count: int) -> int:
        """Returns how far a sequence of `token_count` tokens can grow without a grant or a copy, in tokens."""

    @abstractmethod
    def grow(self, part: PartT, token_count: int, until: int, blocks: array[int], copies: list[Copy]) -> int:
        """Adds the blocks that `needed` counted, and returns the new `room`.

        If the sequence shares the block that it writes next, the first new blocks replace that block, and `copies` gets
        the copies to make. The manager may keep the array: the caller may still read it, and never changes it.
        """

    def append_row(self, part: PartT, blocks: array[int], first: int) -> None:
        """Adds one block for each group, from `blocks[first]` on, at a block edge, where nothing is shared."""
        self.grow(part, 0, 0, blocks[first : first + self.width], [])

    @abstractmethod
    def replaced_count(self, part: PartT, token_count: int) -> int:
        """Counts the blocks that the next grow replaces by copies and that no other sequence holds."""

    def give_up(self, part: PartT) -> None:
        """Unpublishes a block that the next forward pass would overwrite, if no other sequence holds it. The sequence
        continues in that block, and needs no copy. Only states are overwritten."""

    def added(self, blocks: array[int]) -> list[array[int]]:
        """Returns, for each group in order, the new last entries of its table; `blocks` were just granted."""
        return [blocks[column :: self.width] for column in range(self.width)]

    @abstractmethod
    def commit(self, part: PartT, new: Commit) -> None:
        """Publishes the blocks that became full."""

    def take_over(self, part: PartT) -> int | None:
        """Publishes kept blocks in place of their twins, and gives the twins back. Goes backward until another sequence
        holds a twin. Returns the first replaced position; None if none was replaced."""
        return None

    @abstractmethod
    def drop_path(self, scope: ScopeT, digests: bytes, kept_digest_count: int) -> None:
        """Empties the cached blocks of a path after its first `kept_digest_count` digests. Full attention empties the
        whole subtree. Held blocks stay."""

    def settle(self, part: PartT, committed: int) -> int:
        """Gives back the blocks that no token from `committed` on reads (the skip rule). Returns `settled_until`."""
        return NEVER

    def settled_until(self, part: PartT, committed: int) -> int:
        """Returns the count of committed tokens before which no further block falls out of the table."""
        return NEVER

    @abstractmethod
    def fork(self, part: PartT, committed: int) -> PartT:
        """Returns the part of another sequence that shares the committed tokens."""

    @abstractmethod
    def shrink(self, part: PartT, until: int) -> None:
        """Gives back blocks beyond `until` tokens, none of them written or shared."""

    @abstractmethod
    def free(self, part: PartT) -> None:
        """Drops everything that the sequence has, its tail first."""

    @abstractmethod
    def tables(self, part: PartT) -> list[array[int]]:
        """Returns one table for each group, in order; `NULL_BLOCK` where a block was given back."""

    @abstractmethod
    def shared_token_count(self, part: PartT) -> int:
        """Counts the leading tokens that other sequences hold, too: they need not be computed again if this sequence is
        freed."""

    # -- where hits can end -------------------------------------------------------------------------------------------

    @abstractmethod
    def digest_at(self, part: PartT, token_count: int) -> bytes:
        """Returns the digest of a sequence's first `token_count` tokens, up to an edge; empty if unknown here."""

    @abstractmethod
    def units_at(self, part: PartT, token_count: int, digest: bytes) -> list[Unit] | None:
        """Returns the units that a hit of `token_count` tokens of a sequence would take; None if one is missing."""

    def entries_at(self, part: PartT, token_count: int, digest: bytes) -> Sequence[Scoped]:
        """Returns the entries that a hit of this many tokens of a sequence needs, cut there; none if one is missing."""
        return self.units_at(part, token_count, digest) or ()

    def last_end(self, part: PartT, committed: int) -> int:
        """Returns the sequence's last edge, in tokens, where a hit can end."""
        return committed // self._edge_tokens * self._edge_tokens

    def run_at(self, part: PartT, token_count: int) -> Run | None:
        """Returns the run where a sequence's first `token_count` tokens end; None without whole prefixes."""
        return None

    def other_way_count(self, part: PartT, token_count: int) -> int:
        """Counts the continuations right after `token_count` tokens of a sequence, without its own."""
        return 0

    def behind(self, scope: ScopeT, hit: HitT, digests: bytes, token_count: int) -> Behind | None:
        """Returns the continuations after `token_count` tokens of a prompt, no fewer than its hit; None if unknown."""
        return None

    def cut_after(self, hit: HitT) -> None:
        """Cuts a run where the hit ends. The prompt continues in the run, but other groups cannot serve more of it."""

    def _give_back(self, scope: Scope, blocks: array[int]) -> None:
        """Empties blocks that one sequence held, and that no prompt can hit."""
        scope.held -= len(blocks)
        self._blocks.give_back(blocks)

    # -- for readers --------------------------------------------------------------------------------------------------

    @abstractmethod
    def walk(self, scope: ScopeT) -> Iterator[IndexedStretch]:
        """Yields the stretches of a namespace that can be hit, parents before children, while the pool keeps changing.

        Yields every block that is published throughout. A block published or evicted in the meantime may be yielded.
        """

    @abstractmethod
    def mark(self, states: BlockStates, scopes: Sequence[ScopeT], parts: Sequence[PartT]) -> None:
        """Adds to `states` the table counts of each block, over all namespaces and all live sequences."""


# A manager of any kind. The pool passes each manager only the scopes, hits and parts that this manager made.
AnyManager: TypeAlias = Manager[Scope, Hit, Part]
