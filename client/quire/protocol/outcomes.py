"""Outcomes of a step of a Session stream, per operation. `read_reply` reads them from a reply's columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from typing import Any, Final, NamedTuple, TypeAlias

from quire.protocol.open_enum import OpenEnum
from quire.protocol.packing import unpack_uint32, unpack_uint64
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

_Told: TypeAlias = dict[str, Any]  # a reply's non-empty fields, by name
_SELDOM_TOLD: Final = frozenset({"swaps", "copies", "takeovers", "emptied_blocks", "outside_drops", "removed"})
_NOTHING_REMOVED: Final = pb.Removed()
# Shared with the core: scripts/shared_values.py
NULL_BLOCK: Final = 0xFFFFFFFF  # table entry for a block that has left the window and was given back


# Shared with the core: scripts/shared_values.py
class Result(OpenEnum):
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

    def __bool__(self) -> bool:
        """Returns whether this is OK. Any other result, even an unknown one, is false."""
        return self is Result.OK

    def __str__(self) -> str:
        return self.name


class Swap(NamedTuple):
    """A table entry now names the earlier published block with the same digest. In an append-only pool the entry stays,
    and the sequence also holds that published block, as a twin."""

    sequence_id: int
    group: int
    position: int
    block: int


# Shared with the core: scripts/shared_values.py
class Takeover(NamedTuple):
    """From a position on, a sequence's own blocks in a group are published. They replace its twins, now empty."""

    sequence_id: int
    group: int
    position: int


# Shared with the core: scripts/shared_values.py
class CacheDrop(NamedTuple):
    """A part of the cache to drop: in one namespace (None: in all), all blocks after the kept digests of a prefix."""

    namespace: str | None
    digests: bytes
    kept_digest_count: int


class Removed(NamedTuple):
    """Digests removed from the index, concatenated, in the groups of one specification."""

    namespace: str
    groups: tuple[int, ...]
    digests: bytes


# Shared with the core: scripts/shared_values.py
class Copy(NamedTuple):
    """A whole block to copy, with all layers of its group, before the engine writes to the step's blocks."""

    source: int
    destination: int


# Shared with the core: scripts/shared_values.py
class Victim(NamedTuple):
    """The live sequence that is cheapest to preempt, and the tokens that it would then recompute."""

    sequence_id: int
    token_count: int


class GrowOutcome(NamedTuple):
    """The outcome of a grow.

    Attributes:
        sequence_id: the sequence.
        result: OK, NO_SPACE, NOT_FOUND, EXISTS, TOO_LONG, PASS_TOO_LONG, PENDING, QUOTA or FORBIDDEN.
        matched_token_count: leading tokens that need not be computed (new sequences only).
        blocks: per group, the table's last entries, which replace the old entries; for a new sequence, all entries.
            `NULL_BLOCK` if a windowed group holds no block there.
        shortfall: missing blocks (NO_SPACE), blocks above the namespace's quota (QUOTA), or blocks above the pool's
            size (PASS_TOO_LONG).
        pending_token_count: tokens after the matched ones that other sequences are computing (new sequences only).
        victim: the sequence to preempt (NO_SPACE only), if preempting one helps.
        token_count: the larger of the requested and the matched tokens. With OK the sequence has blocks for all of
            them, and the tables' last entries are for the last tokens.
        attended_token_count: leading tokens that would have matched with a checkpoint. A commit that ends there makes
            one. 0 if that would gain nothing (new sequences only).
        stops: rising token counts where a later prompt's hit may end. Commits that end there make checkpoints (new
            sequences only).
    """

    sequence_id: int
    result: Result
    matched_token_count: int
    blocks: tuple[Sequence[int], ...]
    shortfall: int
    pending_token_count: int = 0
    victim: Victim | None = None
    token_count: int = 0
    attended_token_count: int = 0
    stops: tuple[int, ...] = ()


class StepOutcome(NamedTuple):
    """The outcome of a step. Lists of results have one entry per operation, in the order of the operations.

    Attributes:
        free_block_count: empty and cached blocks that can be granted after the step.
        takeovers: twins that were replaced before the grows (append-only pools only).
        dropped: the number of blocks that each drop removed.
        outside_drops: drops by other callers since the previous step.
        removed: digests that could be hit before the step, or were published by it, but cannot be hit after it. Only if
            the pool has `tells_removed`. With `is_removed_cut`, only a part of these digests.
        emptied: blocks that became empty and were not granted (only if a quota limits the cached blocks).
    """

    commits: list[Result]
    frees: list[Result]
    forks: list[Result]
    grows: list[GrowOutcome]
    swaps: list[Swap]
    copies: list[Copy]
    free_block_count: int
    takeovers: Sequence[Takeover] = ()
    emptied: Sequence[int] = ()
    dropped: Sequence[int] = ()
    outside_drops: Sequence[CacheDrop] = ()
    removed: Sequence[Removed] = ()
    is_removed_cut: bool = False


def read_reply(step: packed.Step, reply: packed.StepReply, group_count: int) -> StepOutcome:
    """Returns the outcome of `step` from its reply.

    Raises:
        ValueError: the reply does not fit the step.
    """
    # `ListFields` returns only non-empty fields. Most fields of most replies are empty, and reading an empty field
    # costs as much as reading a full one.
    told: _Told = {field.name: value for field, value in reply.ListFields()}
    commit_ids = unpack_uint64(step.commits.sequences) if step.HasField("commits") else ()
    commits = _results(told, "commit_results", len(commit_ids))
    frees = _results(told, "free_results", len(step.frees.sequences) // 8 if step.HasField("frees") else 0)
    forks = _results(told, "fork_results", len(step.forks.parents) // 8 if step.HasField("forks") else 0)
    grows = _grows(step, told, group_count) if step.HasField("grows") or "granted_grows" in told else []
    free_block_count = told.get("free_block_count", 0)
    if told.keys().isdisjoint(_SELDOM_TOLD) and not step.drops:
        return StepOutcome(commits, frees, forks, grows, [], [], free_block_count)
    removed: pb.Removed = told.get("removed", _NOTHING_REMOVED)
    return StepOutcome(
        commits,
        frees,
        forks,
        grows,
        swaps=_swaps(told["swaps"], commit_ids) if "swaps" in told else [],
        copies=_copies(told["copies"]) if "copies" in told else [],
        free_block_count=free_block_count,
        takeovers=_takeovers(told["takeovers"]) if "takeovers" in told else (),
        emptied=_numbers(told, "emptied_blocks"),
        dropped=_dropped(step, told) if step.drops else (),
        outside_drops=tuple(map(read_drop, told.get("outside_drops", ()))),
        removed=tuple(Removed(each.namespace, tuple(each.groups), each.digests) for each in removed.blocks),
        is_removed_cut=removed.is_cut,
    )


def highest_created(step: packed.Step, outcome: StepOutcome, before: int) -> int:
    """Returns the highest id of any sequence created so far, after a step. `before` is the highest before the step."""
    forked = [child for child, done in zip(unpack_uint64(step.forks.children), outcome.forks, strict=True) if done]
    return max([before, *forked, *(grown.sequence_id for grown in outcome.grows if grown.result)])


def read_drop(drop: pb.CacheDrop) -> CacheDrop:
    """Converts a message to a drop."""
    namespace = drop.namespace if drop.HasField("namespace") else None
    return CacheDrop(namespace, drop.digests, drop.kept_digest_count)


def _numbers(told: _Told, column: str) -> array[int]:
    """Reads a column of uint32."""
    return unpack_uint32(told.get(column, b""))


def _swaps(swaps: packed.Swaps, commit_ids: Sequence[int]) -> list[Swap]:
    commits = unpack_uint32(swaps.commits)
    if commits and max(commits) >= len(commit_ids):
        raise ValueError("the reply has a swap for a commit that is not in the step")
    sequences = [commit_ids[commit] for commit in commits]
    return list(map(Swap._make, _rows(sequences, swaps.groups, swaps.indices, swaps.blocks)))


def _copies(copies: packed.Copies) -> list[Copy]:
    return list(map(Copy._make, _rows(unpack_uint32(copies.sources), copies.destinations)))


def _takeovers(takeovers: packed.Takeovers) -> list[Takeover]:
    return list(map(Takeover._make, _rows(unpack_uint64(takeovers.sequences), takeovers.groups, takeovers.indices)))


def _rows(first: Sequence[int], *columns: bytes) -> Iterable[tuple[int, ...]]:
    """Returns parallel columns row by row. Raises ValueError if their lengths differ."""
    return zip(first, *map(unpack_uint32, columns), strict=True)


def _dropped(step: packed.Step, told: _Told) -> Sequence[int]:
    counts = _numbers(told, "dropped_block_counts").tolist()
    if counts and len(counts) != len(step.drops):
        raise ValueError(f"the reply has {len(counts)} block counts for {len(step.drops)} drops")
    return counts or [0] * len(step.drops)


def _results(told: _Told, column: str, count: int) -> list[Result]:
    """Reads a column of results. An empty column means that every operation was OK."""
    values: Sequence[int] = told.get(column, ())
    if values and len(values) != count:
        raise ValueError(f"the reply has {len(values)} results for {count} operations")
    return [Result(value) for value in values] if values else [Result.OK] * count


def _optional(data: bytes, count: int) -> Iterable[int]:
    """Reads a column of uint32 with a number per grow. An empty column means that every number is 0."""
    if not data:
        return repeat(0, count)
    values = unpack_uint32(data)
    if len(values) != count:
        raise ValueError(f"a column of the reply has {len(values)} numbers for {count} grows")
    return values


def _grows(step: packed.Step, told: _Told, group_count: int) -> list[GrowOutcome]:
    """Returns the outcomes of the grows. Most grows change nothing and are not in the reply, so they must be cheap."""
    sequences = unpack_uint64(step.grows.sequences)
    count = len(sequences)
    token_counts: Iterable[int] = unpack_uint32(step.grows.token_counts)
    matched = _optional(told.get("matched_token_counts", b""), count)
    if "matched_token_counts" in told:
        token_counts = map(max, token_counts, matched)
    shortfalls: Iterable[int] = repeat(0, count)
    victims: Iterable[Victim | None] = repeat(None, count)
    if "refusals" in told:
        shortfalls, victims = _optional(told["refusals"].shortfalls, count), _victims(told["refusals"], count)
    attended: Iterable[int] = repeat(0, count)
    pending: Iterable[int] = repeat(0, count)
    if "unmatched" in told:
        attended = _optional(told["unmatched"].attended_token_counts, count)
        pending = _optional(told["unmatched"].pending_token_counts, count)
    columns = zip(
        sequences,
        _results(told, "grow_results", count),
        matched,
        _tables(told, count, group_count),
        shortfalls,
        pending,
        victims,
        token_counts,
        attended,
        _stops(told["stops"], count) if "stops" in told else repeat((), count),
        strict=True,
    )
    return list(map(GrowOutcome._make, columns))


def _victims(refusals: packed.Refusals, count: int) -> Iterable[Victim | None]:
    if not refusals.victim_sequences:
        return repeat(None, count)
    rows = zip(unpack_uint64(refusals.victim_sequences), _optional(refusals.victim_token_counts, count), strict=True)
    return [Victim(*row) if row[0] else None for row in rows]


def _stops(stops: packed.Stops, count: int) -> list[tuple[int, ...]]:
    """Reads the stops of each grow."""
    counts, token_counts = unpack_uint32(stops.counts), unpack_uint32(stops.token_counts)
    if len(counts) != count or sum(counts) != len(token_counts):
        raise ValueError(f"the reply has {len(counts)} counts and {len(token_counts)} stops for {count} grows")
    each = iter(token_counts)
    return [tuple(islice(each, number)) for number in counts]


def _tables(told: _Told, count: int, group_count: int) -> list[tuple[Sequence[int], ...]]:
    """Returns the table's last entries per grow and group. Entries are empty if the reply does not name the grow."""
    tables: list[tuple[Sequence[int], ...]] = [((),) * group_count] * count
    rows, sizes, blocks = (_numbers(told, column) for column in ("granted_grows", "block_counts", "blocks"))
    if len(sizes) != len(rows) * group_count or sum(sizes) != len(blocks):
        raise ValueError("the numbers of granted grows, block counts and blocks in the reply disagree")
    if rows and max(rows) >= count:
        raise ValueError("the reply grants a grow that is not in the step")
    first, entry = 0, 0
    for row in rows:
        own = []
        for size in sizes[entry : entry + group_count]:
            own.append(blocks[first : first + size])
            first += size
        tables[row] = tuple(own)
        entry += group_count
    return tables
