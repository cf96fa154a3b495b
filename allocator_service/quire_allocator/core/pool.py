"""One pool: sequences, their block tables, and the four operations on them.

Lifecycle of a sequence:

    1. allocate    a new id, higher than every earlier one; its longest published prefix is shared, the rest granted
    2. grow        more tokens fit; a shared or published block about to be written is replaced by a private copy
    3. commit      a forward pass has finished: tokens count as computed, full blocks are published
    4. fork        another sequence shares everything committed, the half-filled last block included
    5. free        references are dropped, tail first

Who owns which part of a sequence's table, in tokens, with `committed <= token_count`:

    [0, full)                  full = committed // block_size * block_size: published, shareable by anyone, immutable
    [full, committed)          written; shared with forks until one side grows
    [committed, token_count)   granted, being written by this sequence alone
    [token_count, end)         the rest of the last block; nobody may write it before the next grow

Every operation is all-or-nothing and answers with a `Result`: no space is an answer, not an exception. Operations of
one pool are applied by one caller at a time.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire_allocator.core.blocks import BlockKey, BlockPool


class Result(enum.IntEnum):
    """What an operation did; all but OK change nothing. Numbers of `quire.v1.Result`."""

    OK = 0
    NO_SPACE = 1
    NOT_FOUND = 2
    EXISTS = 3
    TOO_LONG = 4


class GroupKind(enum.Enum):
    """How the layers of a group use their blocks."""

    FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group."""

    kind: GroupKind
    block_size: int


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What an owner declares: `block_count` blocks that all groups draw from. All groups have one block size."""

    block_count: int
    groups: tuple[GroupSpec, ...]
    cache_layout: str = ""
    model_fingerprint: bytes = b""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.groups[0].block_size


class Copy(NamedTuple):
    """A whole block to copy before any write of the step."""

    source: int
    destination: int


class Swap(NamedTuple):
    """A table entry that now names the block which was published first."""

    group: int
    position: int
    block: int


class GrowResult(NamedTuple):
    """Answer to allocate and grow.

    Attributes:
        result: OK, NO_SPACE, NOT_FOUND, EXISTS or TOO_LONG.
        matched_token_count: leading tokens shared with published blocks (allocate only).
        blocks: per group the last entries of the table, replacing what stood there; after allocate the whole table.
        copies: to run before any write of this step.
        shortfall: blocks missing (NO_SPACE only).
    """

    result: Result
    matched_token_count: int = 0
    blocks: tuple[Sequence[int], ...] = ()
    copies: tuple[Copy, ...] = ()
    shortfall: int = 0


class CommitResult(NamedTuple):
    """Answer to commit."""

    result: Result
    swaps: tuple[Swap, ...] = ()


@dataclass(slots=True)
class SequenceState:
    """One live sequence: capacity and progress in tokens, one table per group."""

    namespace: str
    token_count: int
    committed_token_count: int
    tables: tuple[array[int], ...]


class Pool:
    """Block tables of one pool. See the module's docstring."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.blocks = BlockPool(spec.block_count)
        self.sequences: dict[int, SequenceState] = {}
        self.last_sequence_id = 0
        self.queried_token_count = 0
        self.matched_token_count = 0
        self.granted_block_count = 0
        self.copy_count = 0

    def match(self, namespace: str, digests: Sequence[bytes]) -> list[list[int]]:
        """Per group the blocks of the longest prefix of `digests` that every group has published.

        A hint unless references are taken in the same call chain. Changes nothing, not even the eviction order.
        """
        found: list[list[int]] = []
        for group in range(len(self.spec.groups)):
            keys = (BlockKey(group, namespace, position, digest) for position, digest in enumerate(digests))
            found.append(list(_leading(map(self.blocks.find, keys))))
        shortest = min(map(len, found))
        return [blocks[:shortest] for blocks in found]

    def allocate(self, sequence_id: int, token_count: int, digests: Sequence[bytes], namespace: str) -> GrowResult:
        """Creates a sequence that can hold `token_count` tokens, at least 1.

        The shared prefix is the longest published one that leaves at least one token to compute. It counts as
        committed. Answers OK, EXISTS, TOO_LONG or NO_SPACE.
        """
        if sequence_id <= self.last_sequence_id:
            return GrowResult(Result.EXISTS)
        needed = self.blocks_for(token_count)
        if needed * len(self.spec.groups) > self.spec.block_count:
            return GrowResult(Result.TOO_LONG)
        shared = self.match(namespace, digests[: (token_count - 1) // self.spec.block_size])
        matched = len(shared[0])
        reusable = self.blocks.free_count - sum(self.blocks.is_cached(block) for table in shared for block in table)
        missing = (needed - matched) * len(self.spec.groups) - reusable
        if missing > 0:
            return GrowResult(Result.NO_SPACE, shortfall=missing)

        # Hits are retained before anything is taken: taking evicts.
        for table in shared:
            for block in table:
                self.blocks.retain(block)
        tables = tuple(array("I", table + self._grant(needed - matched)) for table in shared)
        matched_token_count = matched * self.spec.block_size
        self.sequences[sequence_id] = SequenceState(namespace, token_count, matched_token_count, tables)
        self.last_sequence_id = sequence_id
        self.queried_token_count += token_count
        self.matched_token_count += matched_token_count
        return GrowResult(Result.OK, matched_token_count, tuple(table[:] for table in tables))

    def grow(self, sequence_id: int, token_count: int) -> GrowResult:
        """Makes room for `token_count` tokens; fewer than there are changes nothing.

        If the block that holds the next token is shared, or published by a sequence that filled it further, it is
        replaced by a private copy. Answers OK, NOT_FOUND, TOO_LONG or NO_SPACE.
        """
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return GrowResult(Result.NOT_FOUND)
        if token_count <= sequence.token_count:
            return GrowResult(Result.OK, blocks=tuple(() for _ in sequence.tables))
        needed = self.blocks_for(token_count)
        if needed * len(sequence.tables) > self.spec.block_count:
            return GrowResult(Result.TOO_LONG)
        copied = [self._must_copy(sequence, table) for table in sequence.tables]
        missing = sum(needed - len(table) for table in sequence.tables) + sum(copied) - self.blocks.free_count
        if missing > 0:
            return GrowResult(Result.NO_SPACE, shortfall=missing)

        copies: list[Copy] = []
        granted: list[list[int]] = []
        for table, copy in zip(sequence.tables, copied, strict=True):
            blocks = self._grant(needed - len(table) + copy)
            if copy:
                source = table.pop()
                copies.append(Copy(source, blocks[0]))
                self.blocks.release(source)
            table.extend(blocks)
            granted.append(blocks)
        sequence.token_count = token_count
        self.copy_count += len(copies)
        return GrowResult(Result.OK, blocks=tuple(granted), copies=tuple(copies))

    def commit(self, sequence_id: int, token_count: int, digests: Sequence[bytes]) -> CommitResult:
        """Counts tokens up to `token_count` as computed and publishes the blocks that became full.

        `digests` are those of the blocks in [committed, token_count) that are now full; `filled_block_count` says how
        many there must be. A digest that another block carries already keeps that block: the sequence's entry is
        swapped to it and its own is released, so that no child is ever published under a private parent. Answers OK,
        NOT_FOUND, or TOO_LONG for tokens that were never granted.
        """
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return CommitResult(Result.NOT_FOUND)
        if token_count > sequence.token_count:
            return CommitResult(Result.TOO_LONG)
        first = sequence.committed_token_count // self.spec.block_size
        swaps: list[Swap] = []
        for group, table in enumerate(sequence.tables):
            for index, digest in enumerate(digests, first):
                key = BlockKey(group, sequence.namespace, index, digest)
                canonical = self.blocks.find(key)
                if canonical is None:
                    self.blocks.publish(table[index], key)
                elif canonical != table[index]:
                    self.blocks.retain(canonical)
                    self.blocks.release(table[index])
                    table[index] = canonical
                    swaps.append(Swap(group, index, canonical))
        sequence.committed_token_count = token_count
        return CommitResult(Result.OK, tuple(swaps))

    def filled_block_count(self, sequence_id: int, token_count: int) -> int | None:
        """Blocks that a commit up to `token_count` would fill.

        None where the commit would not answer OK and no digest is looked at; negative where it would go back.
        """
        sequence = self.sequences.get(sequence_id)
        if sequence is None or token_count > sequence.token_count:
            return None
        if token_count < sequence.committed_token_count:
            return -1
        return token_count // self.spec.block_size - sequence.committed_token_count // self.spec.block_size

    def fork(self, parent_id: int, child_id: int) -> Result:
        """Creates a sequence that shares what its parent has committed. Answers OK, NOT_FOUND or EXISTS.

        Blocks that the parent was granted beyond that stay the parent's alone; in the half-filled block the parent may
        go on writing behind the child's last token, which the child never reads.
        """
        parent = self.sequences.get(parent_id)
        if parent is None:
            return Result.NOT_FOUND
        if child_id <= self.last_sequence_id:
            return Result.EXISTS
        length = parent.committed_token_count
        tables = tuple(table[: self.blocks_for(length)] for table in parent.tables)
        for table in tables:
            for block in table:
                self.blocks.retain(block)
        self.sequences[child_id] = SequenceState(parent.namespace, length, length, tables)
        self.last_sequence_id = child_id
        return Result.OK

    def free(self, sequence_id: int) -> Result:
        """Drops a sequence, its tail first and all groups of a position together, so that what eviction leaves is a
        whole prefix. Answers OK or NOT_FOUND.
        """
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return Result.NOT_FOUND
        for position in zip(*map(reversed, sequence.tables), strict=True):
            for block in position:
                self.blocks.release(block)
        return Result.OK

    def table_entry_count(self) -> int:
        """Sum of the lengths of all tables: blocks that separate caches would hold."""
        return sum(len(table) for table in self._tables())

    def blocks_for(self, token_count: int) -> int:
        """Blocks that so many tokens take in each group."""
        return -(-token_count // self.spec.block_size)

    def _grant(self, count: int) -> list[int]:
        self.granted_block_count += count
        return self.blocks.take(count)

    def _must_copy(self, sequence: SequenceState, table: array[int]) -> bool:
        """Whether the next token falls into a last block that is not this sequence's alone to write."""
        if sequence.token_count % self.spec.block_size == 0:
            return False
        tail = table[-1]
        return self.blocks.reference_counts[tail] > 1 or self.blocks.is_published(tail)

    def _tables(self) -> Iterator[array[int]]:
        for sequence in self.sequences.values():
            yield from sequence.tables

    def check_invariants(self) -> None:
        """Counts equal tables, tables have the right length, shared blocks stand at one position.

        Raises:
            AssertionError: naming what is broken.
        """
        self.blocks.check_invariants()
        counts = array("I", bytes(4 * self.spec.block_count))
        position: dict[int, int] = {}
        for sequence_id, sequence in self.sequences.items():
            assert sequence_id <= self.last_sequence_id, f"sequence {sequence_id} is above the highest id"
            assert 0 <= sequence.committed_token_count <= sequence.token_count, f"sequence {sequence_id} over-committed"
            for table in sequence.tables:
                assert len(table) == self.blocks_for(sequence.token_count), f"table of {sequence_id} has a wrong length"
                for index, block in enumerate(table):
                    counts[block] += 1
                    assert position.setdefault(block, index) == index, f"block {block} stands at two positions"
                full = sequence.committed_token_count // self.spec.block_size
                assert all(map(self.blocks.is_published, table[:full])), f"{sequence_id} has an unpublished full block"
        assert counts == self.blocks.reference_counts, "reference counts differ from the tables"


def _leading(blocks: Iterable[int | None]) -> Iterator[int]:
    """The leading blocks up to the first None."""
    for block in blocks:
        if block is None:
            return
        yield block
