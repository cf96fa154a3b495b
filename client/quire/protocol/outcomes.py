"""What a step of a Session stream did, operation by operation, as `read_reply` finds it in the columns of the reply."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from quire.protocol.packing import unpack_uint32, unpack_uint64
from quire.v1 import allocator_pb2 as pb

NULL_BLOCK: Final = 0xFFFFFFFF  # a table entry without a block: it fell out of a window


class Result(enum.IntEnum):
    """What one operation did; all but OK change nothing. Numbers of `quire.v1.Result`; only OK is true."""

    OK = 0
    NO_SPACE = 1
    NOT_FOUND = 2
    EXISTS = 3  # a live sequence has the id of the new one
    TOO_LONG = 4
    PENDING = 5  # asked to be deferred, and others are computing its prefix
    QUOTA = 6  # the namespace would hold too many blocks
    UNCOMMITTED = 7  # a fork of a recurrent state that may be beyond the committed tokens
    FORBIDDEN = 8  # a new sequence in a namespace that the caller's certificate does not permit
    PASS_TOO_LONG = 9  # it would fit, computed in smaller passes
    ID_TOO_LOW = 10  # the id of a new sequence is not higher than every earlier one, and no live one has it

    def __bool__(self) -> bool:
        return self is Result.OK

    def __str__(self) -> str:
        return self.name


class Swap(NamedTuple):
    """The table entry of a sequence that now names the block which was published first; in an append-only pool it does
    not, and that block is held beside it, as its twin."""

    sequence_id: int
    group: int
    position: int
    block: int


class Takeover(NamedTuple):
    """From a position on, what a sequence keeps in a group is published in the place of its twins, which are empty."""

    sequence_id: int
    group: int
    position: int


class CacheDrop(NamedTuple):
    """What was to be forgotten of the cache: of a namespace (None: of all), behind the kept ones of some digests."""

    namespace: str | None
    digests: bytes
    kept_digest_count: int


class Removed(NamedTuple):
    """Digests that left the index, concatenated, in the groups of one specification."""

    namespace: str
    groups: tuple[int, ...]
    digests: bytes


class Copy(NamedTuple):
    """A whole block to copy, all layers of its group, before any write of the step."""

    source: int
    destination: int


class Victim(NamedTuple):
    """The live sequence that is cheapest to preempt, and the tokens that it would have to compute again."""

    sequence_id: int
    token_count: int


class GrowOutcome(NamedTuple):
    """What a grow did.

    Attributes:
        sequence_id: the sequence.
        result: OK, NO_SPACE, NOT_FOUND, EXISTS, TOO_LONG, PASS_TOO_LONG, PENDING, QUOTA or FORBIDDEN.
        matched_token_count: leading tokens that need not be computed (new sequences only).
        blocks: per group the last entries of its table, replacing what stood there; of a new sequence all of them.
            `NULL_BLOCK` where a windowed group holds none.
        shortfall: blocks that were missing (NO_SPACE), too many for the namespace (QUOTA), or for the pool at once
            (PASS_TOO_LONG).
        pending_token_count: tokens after the matched ones that others are computing (new sequences only).
        victim: whom to preempt (NO_SPACE only), if preempting anybody helps.
        token_count: tokens that were asked for, or that matched, if those are more: with OK there is room for them, and
            the last entries of the tables are for the last of them.
        junction_token_count: leading tokens that would have matched, had there been a checkpoint: a commit that ends
            there makes one. 0 where nothing would be gained (new sequences only).
        early_end_token_count: where a commit makes one more checkpoint, some tokens before the end of a long prompt; 0
            where it has none (new sequences only).
    """

    sequence_id: int
    result: Result
    matched_token_count: int
    blocks: tuple[Sequence[int], ...]
    shortfall: int
    pending_token_count: int = 0
    victim: Victim | None = None
    token_count: int = 0
    junction_token_count: int = 0
    early_end_token_count: int = 0


class StepOutcome(NamedTuple):
    """What a step did; the lists run parallel to the operations as they were added.

    Attributes:
        free_block_count: blocks that can be granted after it, empty and cached.
        expired_holds: sequences that were held for a time which had passed; they were freed before the first phase.
        takeovers: what was taken over before the grows (append-only pools only).
        dropped: of each drop, how many blocks it forgot.
        outside_drops: what others have dropped since the step before.
        removed: what could be hit before or was published by it, and cannot be hit after it (where the pool says
            `tells_removed`); with `is_removed_cut` a part of that.
        emptied: blocks that became empty and were granted to nobody (where a quota limits what is cached only).
    """

    commits: list[Result]
    frees: list[Result]
    forks: list[Result]
    grows: list[GrowOutcome]
    swaps: list[Swap]
    copies: list[Copy]
    free_block_count: int
    expired_holds: Sequence[int] = ()
    takeovers: Sequence[Takeover] = ()
    emptied: Sequence[int] = ()
    dropped: Sequence[int] = ()
    outside_drops: Sequence[CacheDrop] = ()
    removed: Sequence[Removed] = ()
    is_removed_cut: bool = False


def read_reply(step: pb.Step, reply: pb.StepReply, group_count: int) -> StepOutcome:
    """Returns what `step` did, from its reply.

    Raises:
        ValueError: the reply does not fit the step.
    """
    commits = unpack_uint64(step.commits.sequences) if step.HasField("commits") else ()
    swaps = list[Swap]()
    if reply.swap_operations:
        if max(reply.swap_operations) >= len(commits):
            raise ValueError("a swap of a commit that the step does not have")
        rows = zip(reply.swap_operations, reply.swap_groups, reply.swap_indices, reply.swap_blocks, strict=True)
        swaps = [Swap(commits[operation], *rest) for operation, *rest in rows]
    # What a step does not have must not cost what its columns do: most steps have one phase or two.
    return StepOutcome(
        commits=_results(reply.commit_results, len(commits)),
        frees=_results(reply.free_results, len(step.frees.sequences) // 8),
        forks=_results(reply.fork_results, len(step.forks.parents) // 8),
        grows=_grows(step, reply, group_count) if step.HasField("grows") or reply.granted_grows else [],
        swaps=swaps,
        copies=[Copy(*pair) for pair in zip(reply.copy_sources, reply.copy_destinations, strict=True)],
        free_block_count=reply.free_block_count,
        expired_holds=list(reply.expired_holds),
        takeovers=[
            Takeover(*row)
            for row in zip(reply.takeover_sequences, reply.takeover_groups, reply.takeover_indices, strict=True)
        ],
        emptied=unpack_uint32(reply.emptied_blocks),
        dropped=_dropped(step, reply) if step.drops else (),
        outside_drops=tuple(map(read_drop, reply.outside_drops)),
        removed=tuple(Removed(each.namespace, tuple(each.groups), each.digests) for each in reply.removed),
        is_removed_cut=reply.is_removed_cut,
    )


def read_drop(drop: pb.CacheDrop) -> CacheDrop:
    """Returns what was to be forgotten."""
    namespace = drop.namespace if drop.HasField("namespace") else None
    return CacheDrop(namespace, drop.digests, drop.kept_digest_count)


def _dropped(step: pb.Step, reply: pb.StepReply) -> Sequence[int]:
    counts = list(reply.dropped_block_counts)
    if counts and len(counts) != len(step.drops):
        raise ValueError(f"{len(counts)} numbers for {len(step.drops)} drops")
    return counts or [0] * len(step.drops)


def _results(values: Sequence[int], count: int) -> list[Result]:
    """Reads a column of results; an empty one means that every operation was OK."""
    if values and len(values) != count:
        raise ValueError(f"{len(values)} results for {count} operations")
    return [Result(value) for value in values] if values else [Result.OK] * count


def _optional(values: Sequence[int], count: int) -> Iterable[int]:
    """Reads a column of numbers; an empty one means that every number is 0."""
    if values and len(values) != count:
        raise ValueError(f"{len(values)} numbers for {count} grows")
    return values or repeat(0, count)


def _grows(step: pb.Step, reply: pb.StepReply, group_count: int) -> list[GrowOutcome]:
    """Most grows of a step change nothing: what is not in the reply must not cost more than its outcome."""
    sequences = unpack_uint64(step.grows.sequences)
    count = len(sequences)
    token_counts: Iterable[int] = unpack_uint32(step.grows.token_counts)
    if reply.matched_token_counts:
        token_counts = map(max, token_counts, reply.matched_token_counts)
    victims: Iterable[Victim | None] = repeat(None, count)
    if reply.victim_sequences:
        lost = zip(_optional(reply.victim_sequences, count), _optional(reply.victim_token_counts, count), strict=True)
        victims = [Victim(*victim) if victim[0] else None for victim in lost]
    columns = zip(
        sequences,
        _results(reply.grow_results, count),
        _optional(reply.matched_token_counts, count),
        _tables(reply, count, group_count),
        _optional(reply.grow_shortfalls, count),
        _optional(reply.pending_token_counts, count),
        victims,
        token_counts,
        _optional(reply.junction_token_counts, count),
        _optional(reply.early_end_token_counts, count),
        strict=True,
    )
    return list(map(GrowOutcome._make, columns))


def _tables(reply: pb.StepReply, count: int, group_count: int) -> list[tuple[Sequence[int], ...]]:
    """Returns for each grow and group the table's last entries; empty where the reply does not name the grow."""
    tables: list[tuple[Sequence[int], ...]] = [((),) * group_count] * count
    rows, sizes, blocks = map(unpack_uint32, (reply.granted_grows, reply.block_counts, reply.blocks))
    if len(sizes) != len(rows) * group_count or sum(sizes) != len(blocks):
        raise ValueError("the granted grows, their block counts and blocks do not fit together")
    if rows and max(rows) >= count:
        raise ValueError("a grant to a grow that the step does not have")
    first, entry = 0, 0
    for row in rows:
        own = []
        for size in sizes[entry : entry + group_count]:
            own.append(blocks[first : first + size])
            first += size
        tables[row] = tuple(own)
        entry += group_count
    return tables
