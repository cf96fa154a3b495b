"""Specification of a pool, and results of its operations, as values without behavior."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

DIGEST_BYTES: Final = 32
NULL_BLOCK: Final = 0xFFFFFFFF  # a table entry whose block was given back
RETENTIONS: Final = ("auto", "dense")
NEVER: Final = 1 << 62  # tokens: more than any sequence has
NO_BLOCKS: Final = array("I")  # an empty array to copy, at half the cost of making one


class Result(enum.IntEnum):
    """The result of an operation. All but OK mean that nothing changed. The numbers are those of `quire.v1.Result`."""

    OK = 0
    NO_SPACE = 1
    NOT_FOUND = 2
    EXISTS = 3
    TOO_LONG = 4
    PENDING = 5
    QUOTA = 6
    UNCOMMITTED = 7
    FORBIDDEN = 8  # the step's caller may not do it; the core itself permits everything
    PASS_TOO_LONG = 9  # it would fit if it were computed in smaller passes
    ID_TOO_LOW = 10  # an earlier sequence had this id or a higher one


class GroupKind(enum.Enum):
    """The way in which the layers of a group use their blocks."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group.

    Attributes:
        block_size: tokens per block; for STATE, tokens between two checkpoints.
        window: tokens of a window or chunk, for SLIDING_WINDOW and CHUNKED_LOCAL; else 0.
    """

    kind: GroupKind
    block_size: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one namespace in a pool, in blocks of all groups; None is no limit.

    Attributes:
        namespace: its name; `OTHERS` stands for every namespace that is not named.
        held_block_count_max: blocks in the tables of its sequences; beyond that, a grow answers QUOTA.
        cached_block_count_max: the most cached blocks; beyond that, its own are evicted at once.
    """

    namespace: str
    held_block_count_max: int | None = None
    cached_block_count_max: int | None = None


OTHERS: Final = "*"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The specification that an owner declares: `block_count` blocks of one size in bytes, which all groups draw from.

    Block sizes may differ; each is a multiple of the smallest, and one digest covers a smallest block.

    Attributes:
        watermark_block_count: free blocks that a new sequence must leave for those that run.
        quotas: at most one per namespace.
        eviction_policy: a name of `eviction.policies.POLICIES`; empty for the default.
        retention: which windows and states stay cached: `dense` or `auto`; empty for the default, auto.
        chunk_token_count_max: the largest chunk of a prompt that the owner computes in one pass; 0 if not
            announced.
        append_only: whether tables change only at their end, for engines that cannot replace an entry. A sequence keeps
            its own block if a commit finds the digest already published. No group keeps states.
        first_block_id: the lowest block id; the others follow.
        tells_removed: whether the answer to each step says which digests left the index.
        block_bytes: bytes of one block, only for metrics; 0 if unknown.
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
        """Returns how many tokens one digest covers: the smallest block size."""
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
    """A whole block to copy before any write of the step."""

    source: int
    destination: int


class Swap(NamedTuple):
    """A table entry that now names the block which was published first. In an append-only pool the entry stays as it
    is, and the published block is held beside it: its *twin*."""

    group: int
    position: int
    block: int


class Takeover(NamedTuple):
    """Says that, from a position on, the kept blocks of a sequence in one group replace their published twins."""

    sequence_id: int
    group: int
    position: int


class Victim(NamedTuple):
    """The live sequence that is cheapest to preempt, and the tokens that would be computed again."""

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


class GrowResult:  # noqa: PLW1641 - nobody files answers by their values
    """The answer to allocate and grow. It is no named tuple, because making one costs as much as an append.

    Attributes:
        result: OK, NO_SPACE, NOT_FOUND, EXISTS, ID_TOO_LOW, TOO_LONG, PASS_TOO_LONG, PENDING or QUOTA.
        matched_token_count: leading tokens shared with published blocks (allocate only).
        attended_token_count: as in `Match` (allocate only, OK and PENDING).
        stops: token counts at which hits are to end, rising (`retention/stops.py`; allocate only, OK).
        pending_token_count: tokens after those that another sequence is computing (allocate only).
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
