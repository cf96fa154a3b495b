"""The owner's record of its pool: block tables of live sequences, and the digests of its pages.

The owner has the pages, so this ledger is the truth. An allocator that has lost its state rebuilds it from the ledger
(`block_report.py`). Everything here, and in `pages.py`, follows from steps and their replies:

    published    a commit filled the block and had its digest. Ends when the block is granted again
    released     the last free (or the last grow or commit that let go of the block) of a published block

A block that the allocator has evicted, but not granted again, still counts as published: its page is unchanged. If a
quota limits the cached blocks, it does not count, because the allocator then reports which blocks became empty.

Pure: no call, clock or lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final

from quire.hashing import DIGEST_BYTES
from quire.protocol.features import APPEND_ONLY
from quire.protocol.outcomes import NULL_BLOCK, Copy, GrowOutcome, Result, StepOutcome, Swap, Takeover, read_drop
from quire.protocol.packing import entry_int32, entry_uint32, unpack_uint32, unpack_uint64
from quire.protocol.state_digest import STATE_DIGEST_ENTRIES_MAX, SequenceRow, in_turn, state_digest
from quire.session.pages import DigestSpace, Pages
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

_FULL, _STATE = pb.GROUP_KIND_FULL_ATTENTION, pb.GROUP_KIND_STATE
_SLIDING, _CHUNKED = pb.GROUP_KIND_SLIDING_WINDOW, pb.GROUP_KIND_CHUNKED_LOCAL
KIND_ORDER: Final = (_FULL, _SLIDING, _CHUNKED, _STATE)  # order in which an allocator frees the groups of a sequence


class LedgerSequence:
    """One live sequence.

    Attributes:
        prompt_token_count, chunk_token_count: the values of its first grow; 0 for a fork.
        stops: rising token counts. At each such count, states make a checkpoint and windows keep the blocks before it.
        twins: in an append-only pool, the published blocks that it holds in addition to its own, by group and position.
    """

    __slots__ = (
        *("chunk_token_count", "committed_token_count", "namespace"),
        *("priority", "prompt_token_count", "stops", "tables", "token_count", "twins"),
    )

    def __init__(self, namespace: str, token_count: int, committed_token_count: int, priority: int) -> None:
        self.namespace = namespace
        self.token_count = token_count
        self.committed_token_count = committed_token_count
        self.priority = priority
        self.prompt_token_count = self.chunk_token_count = 0
        self.stops: tuple[int, ...] = ()
        self.tables: list[array[int]] = []
        self.twins: dict[tuple[int, int], int] = {}

    def path(self, group: int) -> array[int]:
        """Returns a group's table, with twins in place of the sequence's own blocks."""
        table = self.tables[group]
        if self.twins:
            table = table[:]
            for (of, position), twin in self.twins.items():
                if of == group:
                    table[position] = twin
        return table


class Ledger:
    """The record of one pool.

    Attributes:
        sequences: live sequences, by rising id.
        pages: the published contents of the pages.
        free_block_count: empty and cached blocks that could be granted after the last answer.
        last_sequence_id: the highest id so far.
    """

    def __init__(self, spec: pb.PoolSpec) -> None:
        self.groups = list(spec.groups)
        self.sequences: dict[int, LedgerSequence] = {}
        self.pages = Pages()
        self.free_block_count = spec.block_count
        self.last_sequence_id = 0
        self._digest_tokens = min(group.block_size for group in spec.groups)
        self._full_groups = frozenset(number for number, group in enumerate(spec.groups) if group.kind == _FULL)
        self._states = [number for number, group in enumerate(spec.groups) if group.kind == _STATE]
        self._managed = _groups_alike(self.groups)
        self._append_only = APPEND_ONLY in spec.features
        self._step = self._operation = self._rank = 0

    def apply(self, step: packed.Step, outcome: StepOutcome) -> None:
        """Applies a step's outcome. Call it once for every step, in order."""
        self._step, self._operation = step.number, -1
        self.free_block_count = outcome.free_block_count
        for drop in outcome.outside_drops:
            self.pages.drop(drop, self.held_blocks(), self._full_groups)
        if outcome.commits:
            self._apply_commits(step.commits, outcome)
        if outcome.frees:
            self._apply_frees(step.frees, outcome)
        if outcome.dropped:
            for each in step.drops:
                self.pages.drop(read_drop(each), self.held_blocks(), self._full_groups)
        if outcome.forks:
            self._apply_forks(step.forks, outcome)
        if outcome.takeovers:
            self._apply_takeovers(outcome.takeovers)
        if outcome.grows:
            self._apply_grows(step.grows, outcome)
        if outcome.emptied:
            self.pages.grant(outcome.emptied)

    def digest(self) -> bytes:
        """Returns the digest of the whole state, as defined in `protocol/state_digest.py`."""
        return state_digest(self.rows())

    def digest_after(self, number: int) -> bytes:
        """Returns the digest that the answer to step `number` must have."""
        return state_digest(self.rows(in_turn(list(self.sequences), number)), STATE_DIGEST_ENTRIES_MAX)

    def rows(self, sequence_ids: Iterable[int] | None = None) -> Iterator[SequenceRow]:
        """Yields rows of live sequences: the sequences in `sequence_ids`, or all by rising id."""
        for sequence_id in self.sequences if sequence_ids is None else sequence_ids:
            sequence = self.sequences[sequence_id]
            yield (
                sequence_id,
                sequence.token_count,
                sequence.committed_token_count,
                sequence.namespace,
                sequence.tables,
            )

    def held_blocks(self) -> set[int]:
        """Returns the blocks in at least one table."""
        held = {block for sequence in self.sequences.values() for table in sequence.tables for block in table}
        held.discard(NULL_BLOCK)
        if self._append_only:
            held.update(twin for sequence in self.sequences.values() for twin in sequence.twins.values())
        return held

    def _apply_forks(self, forks: packed.ForkPhase, outcome: StepOutcome) -> None:
        parents, children = unpack_uint64(forks.parents), unpack_uint64(forks.children)
        for parent, child, result in zip(parents, children, outcome.forks, strict=True):
            self._next_operation()
            if result is Result.OK:
                self._fork(self.sequences[parent], child)

    # -- commits -------------------------------------------------------------------------------------------------------

    def _apply_commits(self, commits: packed.CommitPhase, outcome: StepOutcome) -> None:
        swaps: dict[int, list[Swap]] = {}
        for swap in outcome.swaps:
            swaps.setdefault(swap.sequence_id, []).append(swap)
        counts, digests, first = unpack_uint32(commits.digest_counts) or repeat(0), commits.digests, 0
        kept = unpack_uint32(commits.keep_token_counts) or repeat(0)
        ids, token_counts = unpack_uint64(commits.sequences), unpack_uint32(commits.token_counts)
        rows = zip(ids, token_counts, counts, kept, outcome.commits, strict=False)
        for sequence_id, token_count, count, keep, result in rows:
            end = first + count * DIGEST_BYTES
            self._next_operation()
            if result is Result.OK:
                sequence = self.sequences[sequence_id]
                for swap in swaps.get(sequence_id, ()):
                    if self._append_only:
                        sequence.twins[swap.group, swap.position] = swap.block
                        continue
                    sequence.tables[swap.group][0 if self._is_state(swap.group) else swap.position] = swap.block
                self._commit(sequence, token_count, digests[first:end], keep)
            first = end

    def _commit(self, sequence: LedgerSequence, token_count: int, digests: bytes, keep: int) -> None:
        granted = min(sequence.token_count, max(keep or sequence.token_count, token_count))
        if digests:
            for group, spec in enumerate(self.groups):
                if spec.kind == _STATE:
                    if granted == token_count:
                        self._publish_state(sequence, group, token_count, digests)
                else:
                    self._publish(sequence, group, spec.block_size, token_count, digests)
        sequence.committed_token_count = token_count
        if granted < sequence.token_count:
            sequence.token_count = granted
            for group, spec in enumerate(self.groups):
                if spec.kind != _STATE:
                    del sequence.tables[group][-(-granted // spec.block_size) :]
        for alike in self._managed:
            spec = self.groups[alike[0]]
            if spec.kind in (_SLIDING, _CHUNKED):
                self._settle(sequence, alike, first_needed(spec, token_count) // spec.block_size)

    def _publish(self, sequence: LedgerSequence, group: int, size: int, token_count: int, digests: bytes) -> None:
        table, before = sequence.path(group), sequence.committed_token_count
        first, end = before // size, token_count // size
        if first == end:
            return
        stride = size // self._digest_tokens
        if stride > 1:
            begin = (first + 1) * stride - 1 - before // self._digest_tokens
            starts = range(begin * DIGEST_BYTES, len(digests), stride * DIGEST_BYTES)
            digests = b"".join([digests[start : start + DIGEST_BYTES] for start in starts])
        earlier = table[first - 1] if first else None
        self.pages.publish(DigestSpace(sequence.namespace, group), first, earlier, digests, table[first:end])

    def _publish_state(self, sequence: LedgerSequence, group: int, token_count: int, digests: bytes) -> None:
        """Publishes the running block as a checkpoint, if one is due here and no other sequence has the block."""
        block = sequence.tables[group][0]
        if token_count % self.groups[group].block_size and token_count not in sequence.stops:
            return
        if block in self.pages.published or self._holder_count(group, block) > 1:
            return
        digest = self._digest_at(digests, token_count, sequence.committed_token_count)
        position = token_count // self._digest_tokens
        self.pages.publish(DigestSpace(sequence.namespace, group), position, None, digest, array("I", [block]))

    def _digest_at(self, digests: bytes, token_count: int, committed: int) -> bytes:
        start = (token_count // self._digest_tokens - 1 - committed // self._digest_tokens) * DIGEST_BYTES
        return digests[start : start + DIGEST_BYTES]

    def _settle(self, sequence: LedgerSequence, alike: Sequence[int], first: int) -> None:
        """Releases the blocks that fell out of a window, deepest first."""
        table = sequence.tables[alike[0]]
        end = begin = min(first, len(table))
        while begin and table[begin - 1] != NULL_BLOCK:
            begin -= 1
        if begin == end:
            return
        self._release([sequence.path(group) for group in alike], begin, end)
        nulls = array("I", [NULL_BLOCK]) * (end - begin)
        for group in alike:
            sequence.tables[group][begin:end] = nulls
        if sequence.twins:
            sequence.twins = {at: twin for at, twin in sequence.twins.items() if at[0] not in alike or at[1] >= end}

    def _apply_takeovers(self, takeovers: Sequence[Takeover]) -> None:
        """Notes that sequences' own blocks now have the digests of their twins, and that the twins are empty."""
        for sequence_id, group, first in takeovers:
            sequence = self.sequences[sequence_id]
            for position in sorted(at for of, at in sequence.twins if of == group and at >= first):
                twin = sequence.twins.pop((group, position))
                digest = self.pages.digest_of(twin)
                before = sequence.path(group)[position - 1] if position else None
                self.pages.grant([twin])
                own = sequence.tables[group][position : position + 1]
                self.pages.publish(DigestSpace(sequence.namespace, group), position, before, digest, own)

    # -- frees and forks -----------------------------------------------------------------------------------------------

    def _apply_frees(self, frees: packed.FreePhase, outcome: StepOutcome) -> None:
        for sequence_id, result in zip(unpack_uint64(frees.sequences), outcome.frees, strict=True):
            self._next_operation()
            if result is Result.OK:
                self._free(self.sequences.pop(sequence_id))

    def _free(self, sequence: LedgerSequence) -> None:
        """Releases a sequence's blocks, tail first, with groups of equal specification together."""
        if not self.pages.published:
            return
        for alike in self._managed:
            tables = [sequence.path(group) for group in alike]
            self._release(tables, _first_held(tables[0]), len(tables[0]))

    def _fork(self, parent: LedgerSequence, child_id: int) -> None:
        length = parent.committed_token_count
        child = LedgerSequence(parent.namespace, length, length, parent.priority)
        if parent.prompt_token_count:  # After a fork, neither parent nor child keeps the answer's stops.
            parent.stops = tuple([stop for stop in parent.stops if stop < parent.prompt_token_count])
        child.stops = parent.stops
        for group, spec in enumerate(self.groups):
            table = parent.path(group)
            child.tables.append(table[:] if spec.kind == _STATE else table[: -(-length // spec.block_size)])
        self.sequences[child_id] = child
        self.last_sequence_id = child_id

    # -- grows ---------------------------------------------------------------------------------------------------------

    def _apply_grows(self, grows: packed.GrowPhase, outcome: StepOutcome) -> None:
        copies, before, sequences = list(reversed(outcome.copies)), self._operation + 1, self.sequences
        self._operation += len(outcome.grows)
        ok, is_plain = Result.OK, not self._states
        for row, (grown, wanted) in enumerate(zip(outcome.grows, unpack_uint32(grows.token_counts), strict=True)):
            if grown[1] is not ok:
                continue
            sequence, blocks = sequences.get(grown[0]), grown[3]
            if is_plain and sequence is not None and not any(blocks):  # In decoding, most grows change no table.
                sequence.token_count = max(sequence.token_count, wanted)
                continue
            self._operation, self._rank = before + row, 0
            if sequence is None:
                self._open(grown, grows, row, wanted)
            else:
                self._grow(sequence, blocks, wanted)
            if copies:
                self._let_go_of_sources(copies, grown)

    def _open(self, grown: GrowOutcome, grows: packed.GrowPhase, row: int, chunk: int) -> None:
        matched = grown.matched_token_count
        namespace = ""
        if grows.namespaces:
            namespace = grows.namespaces[entry_uint32(grows.namespace_indices, row)]
        priority = entry_int32(grows.priorities, row)
        sequence = LedgerSequence(namespace, max(chunk, matched), matched, priority)
        sequence.chunk_token_count = chunk
        sequence.prompt_token_count = max(chunk, entry_uint32(grows.prompt_token_counts, row))
        sequence.stops = grown.stops
        sequence.tables = [array("I", table) for table in grown.blocks]
        self.sequences[grown.sequence_id] = sequence
        self.last_sequence_id = grown.sequence_id
        for spec, table in zip(self.groups, sequence.tables, strict=True):
            self.pages.grant(table if spec.kind == _STATE else table[matched // spec.block_size :])

    def _grow(self, sequence: LedgerSequence, blocks: Sequence[Sequence[int]], wanted: int) -> None:
        for group, added in enumerate(blocks):
            if added:
                table = sequence.tables[group]
                size = self.groups[group].block_size
                end = 1 if self._is_state(group) else -(-wanted // size)
                table[end - len(added) :] = array("I", added)
                self.pages.grant(added)
        if wanted > sequence.token_count:
            sequence.token_count = wanted
            for group in self._states:  # A grow without a new block overwrites the state's checkpoint.
                if not blocks[group]:
                    self.pages.grant(sequence.tables[group])

    def _let_go_of_sources(self, copies: list[Copy], grown: GrowOutcome) -> None:
        """Releases the sources of one grow's copies, and removes these from the end of `copies`."""
        own = {block for table in grown.blocks for block in table}
        while copies and copies[-1].destination in own:
            self._release([array("I", [copies.pop().source])], 0, 1)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _next_operation(self) -> None:
        self._operation += 1
        self._rank = 0

    def _release(self, tables: Sequence[array[int]], begin: int, end: int) -> None:
        """Releases the blocks at positions [begin, end) in tables of groups with equal specifications. The order is
        deepest first, and at each position group by group."""
        width = len(tables)
        for number, table in enumerate(tables):
            rank = self._rank + number
            self.pages.release(self._step, self._operation, rank, table, begin=begin, end=end, stride=width)
        self._rank += width * (end - begin)

    def _is_state(self, group: int) -> bool:
        return bool(self.groups[group].kind == _STATE)

    def _holder_count(self, group: int, block: int) -> int:
        return sum(sequence.tables[group][0] == block for sequence in self.sequences.values())


def _first_held(table: array[int]) -> int:
    """Returns the position of a table's first block. Entries before it fell out of a window."""
    return 0 if table and table[0] != NULL_BLOCK else bisect_left(table, True, key=_is_there)


def _is_there(block: int) -> bool:
    return block != NULL_BLOCK


def first_needed(spec: pb.GroupSpec, token_count: int) -> int:
    """Returns the first position that the token after `token_count` others reads in a windowed group."""
    if spec.kind == _CHUNKED:
        return token_count // spec.window * spec.window
    return max(0, token_count - spec.window + 1)


def _groups_alike(groups: Sequence[pb.GroupSpec]) -> list[list[int]]:
    """Returns lists of groups with equal specifications, in the order that a free releases them."""
    alike: dict[bytes, list[int]] = {}
    for number, group in enumerate(groups):
        alike.setdefault(group.SerializeToString(deterministic=True), []).append(number)
    return sorted(alike.values(), key=lambda numbers: KIND_ORDER.index(groups[numbers[0]].kind))
