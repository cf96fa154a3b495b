"""Building a step of a Session stream, and reading what it did.

The wire carries structs of arrays; `StepBuilder` and `read_reply` are the only places where an owner deals with them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from quire.hashing import DIGEST_BYTES
from quire.protocol import turn_ends as ends_of_turns
from quire.protocol.packing import pack_uint32, pack_uint64, unpack_uint32, unpack_uint64
from quire.v1 import allocator_pb2 as pb

NULL_BLOCK: Final = 0xFFFFFFFF  # a table entry without a block: it fell out of a window


class Result(enum.IntEnum):
    """What one operation did; all but OK change nothing. Numbers of `quire.v1.Result`."""

    OK = 0
    NO_SPACE = 1
    NOT_FOUND = 2
    EXISTS = 3
    TOO_LONG = 4
    PENDING = 5  # asked to be deferred, and others are computing its prefix
    QUOTA = 6  # the namespace would hold too many blocks
    UNCOMMITTED = 7  # a fork of a recurrent state that may be beyond the committed tokens
    FORBIDDEN = 8  # a new sequence in a namespace that the caller's certificate does not permit
    PASS_TOO_LONG = 9  # it would fit, computed in smaller passes


class Swap(NamedTuple):
    """The table entry of a sequence that now names the block which was published first."""

    sequence_id: int
    group: int
    position: int
    block: int


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


class StepOutcome(NamedTuple):
    """What a step did; the lists run parallel to the operations as they were added.

    Attributes:
        free_block_count: blocks that can be granted after it, empty and cached.
        expired_holds: sequences that were held for a time which had passed; they were freed before the first phase.
    """

    commits: list[Result]
    frees: list[Result]
    forks: list[Result]
    grows: list[GrowOutcome]
    swaps: list[Swap]
    copies: list[Copy]
    free_block_count: int
    expired_holds: Sequence[int] = ()


class _New(NamedTuple):
    """Holds what a grow of a new sequence says beyond one of a live sequence: a column each."""

    row: int
    digest_count: int
    namespace: int
    prompt_token_count: int
    priority: int
    defer_token_count: int
    is_return: bool
    turn_end_count: int


class StepBuilder:
    """Collects the operations of one step. They are applied phase by phase: commits, frees, forks, grows.

    Digests are given concatenated, or as a sequence of 32 bytes each. Numbers are checked when the message is made.
    """

    def __init__(self) -> None:
        self._commits: list[int] = []
        self._commit_token_counts: list[int] = []
        self._commit_digests: list[bytes] = []  # of each commit, concatenated
        self._keep_token_counts: list[int] = []
        self._frees: list[int] = []
        self._parents: list[int] = []
        self._children: list[int] = []
        self._hold_ms: list[int] = []
        self._grows: list[int] = []
        self._grow_token_counts: list[int] = []
        self._new: list[_New] = []
        self._new_digests: list[bytes] = []
        self._turn_ends: list[int] = []  # of all new sequences
        self._namespaces: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._commits or self._frees or self._parents or self._grows)

    @property
    def operation_count(self) -> int:
        """Counts the operations of all phases."""
        return len(self._commits) + len(self._frees) + len(self._parents) + len(self._grows)

    def commit(
        self, sequence_id: int, token_count: int, digests: bytes | Sequence[bytes] = b"", keep_token_count: int = 0
    ) -> None:
        """Notes that tokens up to `token_count` are computed; one digest for each digest block that this fills.

        With `keep_token_count`, blocks that are not needed to hold so many tokens, nor `token_count`, are given back:
        those granted ahead for draft tokens that were not accepted.
        """
        self._commits.append(sequence_id)
        self._commit_token_counts.append(token_count)
        self._commit_digests.append(concatenated(digests))
        self._keep_token_counts.append(keep_token_count)

    def free(self, sequence_id: int) -> None:
        """Drops a sequence and all that it holds."""
        self._frees.append(sequence_id)

    def fork(self, parent_id: int, child_id: int, hold_ms: int = 0) -> None:
        """Creates a sequence that shares what its parent has committed; ids only rise. It may grow in the same step, or
        once it was answered that it exists; a grow of what could not be forked answers NOT_FOUND.

        With `hold_ms`, up to a day, it is a hold: nobody writes to it, and the first step after so many milliseconds
        frees it before anything else, which its outcome's `expired_holds` tells.
        """
        self._parents.append(parent_id)
        self._children.append(child_id)
        self._hold_ms.append(hold_ms)

    def allocate(
        self,
        sequence_id: int,
        token_count: int,
        digests: bytes | Sequence[bytes] = b"",
        namespace: str = "",
        *,
        prompt_token_count: int = 0,
        priority: int = 0,
        defer_token_count: int = 0,
        is_return: bool = False,
        turn_ends: Sequence[int] = (),
    ) -> None:
        """Creates a sequence for `token_count` tokens that shares the published part of `digests`; ids only rise.

        Args:
            sequence_id: higher than every earlier one. It may be grown once it was answered that it exists.
            token_count: tokens to hold: the prompt, or its first chunk. It holds more where more is shared.
            digests: of the prompt's blocks, as many as may be shared.
            namespace: prefixes are shared inside it.
            prompt_token_count: length of the whole prompt, where `token_count` is only its first chunk: it is let in
                only if all of it would fit, and the rest is kept free from later admissions.
            priority: for a sequence of one priority none of a higher one is ever named as a victim.
            defer_token_count: answer PENDING if others are computing at least so many tokens of its prefix; 0: never.
            is_return: a preempted request returns: its tokens are counted as returned, not as queried.
            turn_ends: token counts, rising, at most 16, after which later prompts may go on otherwise.
        """
        ends_of_turns.check(turn_ends)
        data = concatenated(digests)
        index = self._namespaces.setdefault(namespace, len(self._namespaces))
        row, count = len(self._grows), len(data) // DIGEST_BYTES
        self._new.append(
            _New(row, count, index, prompt_token_count, priority, defer_token_count, is_return, len(turn_ends))
        )
        self._turn_ends += turn_ends
        self._new_digests.append(data)
        self.grow(sequence_id, token_count)

    def grow(self, sequence_id: int, token_count: int) -> None:
        """Makes room for `token_count` tokens of a live sequence."""
        self._grows.append(sequence_id)
        self._grow_token_counts.append(token_count)

    def names_no_newer(self, created: int) -> bool:
        """Tells whether nothing is to be created, and no sequence grows whose id is higher than the highest so far."""
        return not (self._new or self._parents) and max(self._grows, default=0) <= created

    def check_ids(self, created: int, highest: int) -> None:
        """Whether ids are new, or known, as the operations say.

        Args:
            created: the highest id of a sequence that was created.
            highest: the highest that any unanswered step may create; at least that.

        Raises:
            ValueError: one is not.
        """
        highest, children = max(highest, *self._children, 0), frozenset(self._children)
        new = {each.row for each in self._new}
        for row, sequence_id in enumerate(self._grows):
            if row not in new:
                if sequence_id > created and sequence_id not in children:
                    raise ValueError(f"sequence {sequence_id} is not known to exist: an answer says so, or a fork here")
            elif sequence_id <= highest:
                raise ValueError(f"sequence {sequence_id} is not new: ids only rise, and {highest} was given already")
            else:
                highest = sequence_id

    @property
    def message(self) -> pb.Step:
        """Returns all that was collected so far, as a new message. Raises as `fill` does."""
        step = pb.Step()
        self.fill(step)
        return step

    def fill(self, step: pb.Step) -> None:
        """Puts all that was collected so far into an empty message; arrays of zeros are left out.

        Raises:
            ValueError: a number does not fit its field.
            TypeError: something is no number, or a digest no bytes.
        """
        if self._commits:
            commits = step.commits
            commits.sequences = pack_uint64(self._commits)
            commits.token_counts = pack_uint32(self._commit_token_counts)
            commits.digests = b"".join(self._commit_digests)
            commits.keep_token_counts = _pack_unless_zero(self._keep_token_counts)
            commits.digest_counts = _pack_unless_zero([len(data) // DIGEST_BYTES for data in self._commit_digests])
        if self._frees:
            step.frees.sequences = pack_uint64(self._frees)
        if self._parents:
            step.forks.parents = pack_uint64(self._parents)
            step.forks.children = pack_uint64(self._children)
            step.forks.hold_ms = _pack_unless_zero(self._hold_ms)
        if self._grows:
            step.grows.sequences = pack_uint64(self._grows)
            step.grows.token_counts = pack_uint32(self._grow_token_counts)
        if self._new:
            self._fill_new(step.grows)

    def _fill_new(self, grows: pb.GrowPhase) -> None:
        """Fills the columns that only new sequences have, in a phase that has the others."""

        def column(name: str) -> bytes:
            values = [getattr(new, name) for new in self._new]
            if not any(values):
                return b""
            rows = [0] * len(self._grows)
            for new, value in zip(self._new, values, strict=True):
                rows[new.row] = value
            return pack_uint32(rows)

        grows.digest_counts = column("digest_count")
        grows.namespace_indices = column("namespace")
        grows.prompt_token_counts = column("prompt_token_count")
        grows.priorities = column("priority")
        grows.defer_token_counts = column("defer_token_count")
        grows.returns = column("is_return")
        grows.turn_end_counts = column("turn_end_count")
        grows.turn_ends = pack_uint32(self._turn_ends)
        grows.digests = b"".join(self._new_digests)
        if any(self._namespaces):  # without any, all are in the one that has no name
            grows.namespaces.extend(self._namespaces)


def concatenated(digests: bytes | Iterable[bytes]) -> bytes:
    """Returns the digests as they travel, from either form.

    Raises:
        ValueError: one has not 32 bytes.
    """
    if isinstance(digests, bytes):
        if len(digests) % DIGEST_BYTES:
            raise ValueError(f"{len(digests)} bytes are no digests of {DIGEST_BYTES}")
        return digests
    parts = list(digests)
    if any(len(digest) != DIGEST_BYTES for digest in parts):
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes")
    return b"".join(parts)


def read_reply(step: pb.Step, reply: pb.StepReply, group_count: int) -> StepOutcome:
    """Returns what `step` did, from its reply.

    Raises:
        ValueError: the reply does not fit the step.
    """
    commits = unpack_uint64(step.commits.sequences)
    if reply.swap_operations and max(reply.swap_operations) >= len(commits):
        raise ValueError("a swap of a commit that the step does not have")
    swap_rows = zip(reply.swap_operations, reply.swap_groups, reply.swap_indices, reply.swap_blocks, strict=True)
    return StepOutcome(
        commits=_results(reply.commit_results, len(commits)),
        frees=_results(reply.free_results, len(step.frees.sequences) // 8),
        forks=_results(reply.fork_results, len(step.forks.parents) // 8),
        grows=_grows(step, reply, group_count),
        swaps=[Swap(commits[operation], *rest) for operation, *rest in swap_rows],
        copies=[Copy(*pair) for pair in zip(reply.copy_sources, reply.copy_destinations, strict=True)],
        free_block_count=reply.free_block_count,
        expired_holds=list(reply.expired_holds),
    )


def _pack_unless_zero(values: list[int]) -> bytes:
    """Packs a column; one of zeros is sent empty."""
    return pack_uint32(values) if any(values) else b""


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
