"""Specification of a pool, and results of its operations. `scripts/shared_values.py` copies some to the client."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 32
NULL_BLOCK: Final = 0xFFFFFFFF  # table entry for a block that has left the window and was given back
RETENTIONS: Final = ("auto", "dense")
OTHERS: Final = "*"  # as a quota's namespace: every namespace without its own quota
NEVER: Final = 1 << 62  # a token count above that of every sequence
NO_BLOCKS: Final = array("I")  # an empty array to copy; copying it costs half as much as making a new one


class Result(enum.IntEnum):
    """The result of an operation, numbered as in `quire.v1.Result`. With any other than OK, nothing has changed."""

    OK = 0
    NO_SPACE = 1
    NOT_FOUND = 2
    EXISTS = 3  # A live sequence has the new sequence's id.
    TOO_LONG = 4
    PENDING = 5  # The caller asked to defer, and another sequence is computing the prefix.
    QUOTA = 6  # The namespace would exceed its quota of blocks.
    UNCOMMITTED = 7  # A recurrent state cannot be forked beyond the committed tokens.
    FORBIDDEN = 8  # The caller's certificate does not permit the namespace. The core itself permits everything.
    PASS_TOO_LONG = 9  # The sequence would fit in smaller passes.
    ID_TOO_LOW = 10  # The new sequence's id is not above all earlier ids, and no live sequence has this id.


class GroupKind(enum.Enum):
    """How the layers of a group use their blocks, numbered as in `quire.v1.GroupKind`."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2  # Tokens attend to the last `window` tokens, including themselves.
    CHUNKED_LOCAL = 3  # Tokens attend only inside their own chunk of `window` tokens.
    STATE = 4  # recurrent layers: a block has a state instead of tokens, and a table has one entry


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group. Every `block_size` of a pool is a multiple of the smallest one.

    Attributes:
        kind: kind of all its layers.
        block_size: tokens per block; for STATE, tokens between two checkpoints.
        window: tokens, for SLIDING_WINDOW and CHUNKED_LOCAL; else 0.
    """

    kind: GroupKind
    block_size: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one namespace in a pool, in blocks of all groups; None means no limit.

    Attributes:
        namespace: its name. "*" means every namespace without its own quota.
        held_blocks_max: the most blocks that its sequences may hold; a shared block counts once. Beyond this limit,
            operations get Result.QUOTA.
        cached_blocks_max: the most blocks that it may leave cached. Beyond this limit, its blocks are evicted first.
    """

    namespace: str
    held_blocks_max: int | None = None
    cached_blocks_max: int | None = None


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool's specification, which its owner declares once. Layout and fingerprint are part of each digest's root.

    Attributes:
        block_count: physical blocks. Blocks have one size in bytes, and all groups share them.
        watermark_block_count: free blocks that a new sequence must leave for running sequences.
        quotas: at most one per namespace.
        eviction_policy: name of the policy that chooses the cached blocks to evict first; empty for the default.
        retention: windows and states that stay cached: `dense` or `auto`; empty for the default, auto.
        chunk_token_count_max: the largest chunk of a prompt that is computed in one pass; 0 if unknown.
        append_only: tables change only at their end. A commit swaps no blocks: a sequence keeps its own. An append-only
            pool has no groups of states. Blocks that fell out of a window are given back; an engine may keep their
            entries.
        first_block_id: the lowest block id, for engines that use lower ids themselves; at most 65,536.
        tells_removed: whether each step's outcome names the digests that were removed from the index.
        block_bytes: bytes of a block, only for the allocator's metrics; 0 if unknown.
    """

    block_count: int
    groups: tuple[GroupSpec, ...]
    cache_layout: str = ""
    model_fingerprint: bytes = b""
    watermark_block_count: int = 0
    quotas: tuple[Quota, ...] = ()
    eviction_policy: str = ""
    retention: str = ""
    chunk_token_count_max: int = 0
    append_only: bool = False
    first_block_id: int = 0
    tells_removed: bool = False
    block_bytes: int = 0

    @property
    def block_id_end(self) -> int:
        """Returns the exclusive upper bound of block ids."""
        return self.first_block_id + self.block_count

    @property
    def block_size(self) -> int:
        """Returns the tokens per digest: the smallest block size of all groups."""
        return min(group.block_size for group in self.groups)

    @property
    def edge_tokens(self) -> int:
        """Returns the unit of prefix hits in tokens: block edges of all groups but those of states."""
        sizes = [group.block_size for group in self.groups if group.kind is not GroupKind.STATE]
        return math.lcm(*sizes) if sizes else self.block_size


class Match(NamedTuple):
    """The published part of a prompt, in leading tokens.

    Attributes:
        matched_token_count: tokens that every group can serve.
        attended_token_count: tokens that full attention alone would serve, if more; else 0. A checkpoint of the
            states there, and the window before it, would have made them a hit.
    """

    matched_token_count: int
    attended_token_count: int


class Copy(NamedTuple):
    """A whole block to copy, with all layers of its group, before the engine writes to the step's blocks."""

    source: int
    destination: int


class Swap(NamedTuple):
    """A table entry that now names the block which was published first. In an append-only pool the entry keeps its
    block, and the sequence also holds the published block, the *twin* of its own."""

    group: int
    position: int
    block: int


class Takeover(NamedTuple):
    """From a position on, a sequence's own blocks in a group are published. They replace its twins, now empty."""

    sequence_id: int
    group: int
    position: int


class Victim(NamedTuple):
    """The live sequence that is cheapest to preempt, and the tokens that it would then recompute."""

    sequence_id: int
    token_count: int


class Grants:
    """The blocks granted to a batch of grows, in columns.

    Attributes:
        rows: numbers of the grows that were granted blocks, rising.
        counts: block counts: for each row, one number per group.
        blocks: the granted blocks, one array after the other.
    """

    __slots__ = ("blocks", "counts", "rows")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.counts: list[int] = []
        self.blocks: list[array[int]] = []

    def add(self, row: int, tables: tuple[array[int], ...]) -> None:
        """Adds the grant of one grow, one array for each group."""
        self.rows.append(row)
        for table in tables:
            self.counts.append(len(table))
            self.blocks.append(table)

    def tables(self) -> tuple[array[int], ...]:
        """Returns the blocks granted to the only grow of a batch, one array for each group."""
        blocks, first = NO_BLOCKS[:], 0
        tables: list[array[int]] = []
        for granted in self.blocks:
            blocks.extend(granted)
        for count in self.counts:
            tables.append(blocks[first : first + count])
            first += count
        return tuple(tables)

    def extend(self, other: Grants, first: int) -> None:
        """Adds the grants of a part of the batch. The part's first grow has number `first`."""
        self.rows += [first + row for row in other.rows]
        self.counts += other.counts
        self.blocks += other.blocks

    def add_rows(self, rows: list[int], blocks: array[int]) -> None:
        """Adds one block of each group for each of these grows, row by row, as most of a decoding batch take."""
        self.rows += rows
        self.counts += [1] * len(blocks)
        self.blocks.append(blocks)


class GrowResult:  # noqa: PLW1641 - answers are never keys of a dict
    """The answer to allocate and grow. Not a named tuple, because making a named tuple costs as much as an append.

    Attributes:
        result: OK, NO_SPACE, NOT_FOUND, EXISTS, ID_TOO_LOW, TOO_LONG, PASS_TOO_LONG, PENDING or QUOTA.
        matched_token_count: leading tokens shared with published blocks (allocate only).
        attended_token_count: as in `Match` (allocate only, OK and PENDING).
        stops: token counts at which hits are to end, rising (`retention/stop_rules.py`; allocate only, OK).
        pending_token_count: tokens after the matched ones that another sequence is computing (allocate only).
        blocks: per group the last entries of the table, replacing the previous ones; after allocate the whole table.
            Empty if nothing changed in any group.
        copies: copies to run before any write of this step.
        shortfall: blocks missing (NO_SPACE), too many for the namespace (QUOTA), or too many for the pool at once
            (PASS_TOO_LONG).
        victim: the sequence to preempt (NO_SPACE only), if preempting any helps.
    """

    __slots__ = (
        *("attended_token_count", "blocks", "copies", "matched_token_count", "pending_token_count", "result"),
        *("shortfall", "stops", "victim"),
    )

    def __init__(
        self,
        result: Result,
        matched_token_count: int = 0,
        pending_token_count: int = 0,
        blocks: tuple[array[int], ...] = (),
        copies: Sequence[Copy] = (),
        *,
        shortfall: int = 0,
        victim: Victim | None = None,
    ) -> None:
        self.result = result
        self.matched_token_count = matched_token_count
        self.pending_token_count = pending_token_count
        self.attended_token_count = 0
        self.stops: tuple[int, ...] = ()
        self.blocks = blocks
        self.copies = copies
        self.shortfall = shortfall
        self.victim = victim

    def of_new(self, matched_token_count: int, attended_token_count: int, stops: tuple[int, ...] = ()) -> GrowResult:
        """Adds the fields that only a new sequence gets, and returns this answer."""
        self.matched_token_count = matched_token_count
        self.attended_token_count = attended_token_count
        self.stops = stops
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GrowResult) and self._values() == other._values()

    def __repr__(self) -> str:
        return f"GrowResult{self._values()!r}"

    def _values(self) -> tuple[object, ...]:
        counts = (self.matched_token_count, self.pending_token_count, self.attended_token_count)
        return (self.result, *counts, self.stops, self.blocks, list(self.copies), self.shortfall, self.victim)


class CommitResult(NamedTuple):
    """The result of a commit, or the reason of its refusal."""

    result: Result
    swaps: Sequence[Swap] = ()
