"""A slow, obvious model of a pool: dicts and lists, every question answered by looking at everything.

It shares no code with the core. A block is free when no table names it; the free order is a sort by release stamps; the
prefix index is a search through all published blocks. Results are plain tuples, results of operations plain strings.
"""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[int, str, int, bytes]  # group, namespace, position, digest
Grown = tuple[str, int, list[list[int]], list[tuple[int, int]], int]  # result, matched, blocks, copies, shortfall
Committed = tuple[str, list[tuple[int, int, int]]]  # result, swaps as (group, position, block)


@dataclass(slots=True)
class TwinSequence:
    """One live sequence; `tables` has one list of blocks per group."""

    namespace: str
    token_count: int
    committed: int
    tables: list[list[int]]


class TwinPool:
    """What a pool must do, written to be read and not to be fast."""

    def __init__(self, block_count: int, group_count: int, block_size: int) -> None:
        self.block_count = block_count
        self.group_count = group_count
        self.block_size = block_size
        self.sequences: dict[int, TwinSequence] = {}
        self.highest_id = 0
        self.keys: dict[int, Key] = {}  # block -> what it is published as
        self.stamp = 0
        # When each block was released last. Never used counts as released before all, high ids first.
        self.released_at = {block: -1 - block for block in range(block_count)}
        self.evicted = self.granted = self.copied = self.queried = self.hit = 0

    # -- what can be observed ------------------------------------------------------------------------------------------

    def holders(self, block: int) -> int:
        """How many tables name the block."""
        return sum(table.count(block) for sequence in self.sequences.values() for table in sequence.tables)

    def empty_blocks(self) -> list[int]:
        """Free blocks without a digest, next one to be granted first: the one released last."""
        free = [b for b in range(self.block_count) if self.holders(b) == 0 and b not in self.keys]
        return sorted(free, key=lambda block: -self.released_at[block])

    def cached_blocks(self) -> list[int]:
        """Free blocks with a digest, next one to be evicted first: the one released first."""
        free = [b for b in range(self.block_count) if self.holders(b) == 0 and b in self.keys]
        return sorted(free, key=lambda block: self.released_at[block])

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they would be granted."""
        return self.empty_blocks() + self.cached_blocks()

    def states(self) -> bytes:
        """As `BlockPool.states`."""
        return bytes(
            min(255, self.holders(block) + 1) if self.holders(block) else int(block in self.keys)
            for block in range(self.block_count)
        )

    def match(self, namespace: str, digests: list[bytes]) -> list[list[int]]:
        """Per group the blocks of the longest prefix that every group has."""
        by_key = {key: block for block, key in self.keys.items()}
        assert len(by_key) == len(self.keys), "two blocks are published as the same thing"
        for length in range(len(digests), -1, -1):
            wanted = [[(g, namespace, i, digests[i]) for i in range(length)] for g in range(self.group_count)]
            if all(key in by_key for keys in wanted for key in keys):
                return [[by_key[key] for key in keys] for keys in wanted]
        raise AssertionError("the empty prefix always matches")

    def filled(self, sequence_id: int, token_count: int) -> int | None:
        """As `Pool.filled_block_count`."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None or token_count > sequence.token_count:
            return None
        if token_count < sequence.committed:
            return -1
        ends = range(self.block_size, token_count + 1, self.block_size)
        return sum(end > sequence.committed for end in ends)

    # -- operations ----------------------------------------------------------------------------------------------------

    def allocate(self, sequence_id: int, token_count: int, digests: list[bytes], namespace: str) -> Grown:
        """A new sequence."""
        if sequence_id <= self.highest_id:
            return ("EXISTS", 0, [], [], 0)
        if self._blocks(token_count) * self.group_count > self.block_count:
            return ("TOO_LONG", 0, [], [], 0)
        shareable = [d for i, d in enumerate(digests) if (i + 1) * self.block_size < token_count]
        hits = self.match(namespace, shareable)
        wanted = sum(self._blocks(token_count) - len(table) for table in hits)
        available = [block for block in self.free_order() if not any(block in table for table in hits)]
        if wanted > len(available):
            return ("NO_SPACE", 0, [], [], wanted - len(available))
        sequence = TwinSequence(namespace, token_count, len(hits[0]) * self.block_size, hits)
        self.sequences[sequence_id] = sequence
        self.highest_id = sequence_id
        for table in sequence.tables:
            while len(table) < self._blocks(token_count):
                table.append(self._grant())
        self.queried += token_count
        self.hit += sequence.committed
        return ("OK", sequence.committed, [list(table) for table in sequence.tables], [], 0)

    def grow(self, sequence_id: int, token_count: int) -> Grown:
        """Room for more tokens."""
        if sequence_id not in self.sequences:
            return ("NOT_FOUND", 0, [], [], 0)
        sequence = self.sequences[sequence_id]
        if token_count <= sequence.token_count:
            return ("OK", 0, [[] for _ in sequence.tables], [], 0)
        if self._blocks(token_count) * self.group_count > self.block_count:
            return ("TOO_LONG", 0, [], [], 0)
        position, offset = divmod(sequence.token_count, self.block_size)
        foreign = [
            offset > 0 and (self.holders(table[position]) > 1 or table[position] in self.keys)
            for table in sequence.tables
        ]
        wanted = sum(self._blocks(token_count) - len(table) for table in sequence.tables) + foreign.count(True)
        if wanted > len(self.free_order()):
            return ("NO_SPACE", 0, [], [], wanted - len(self.free_order()))
        blocks, copies = [], []
        for table, is_foreign in zip(sequence.tables, foreign, strict=True):
            first = len(table)
            if is_foreign:
                first = position
                private = self._grant()
                copies.append((table[position], private))
                self._replace(table, position, private)
                self.copied += 1
            while len(table) < self._blocks(token_count):
                table.append(self._grant())
            blocks.append(table[first:])
        sequence.token_count = token_count
        return ("OK", 0, blocks, copies, 0)

    def commit(self, sequence_id: int, token_count: int, digests: list[bytes]) -> Committed:
        """Tokens that have been computed."""
        if sequence_id not in self.sequences:
            return ("NOT_FOUND", [])
        sequence = self.sequences[sequence_id]
        if token_count > sequence.token_count:
            return ("TOO_LONG", [])
        swaps = []
        for group, table in enumerate(sequence.tables):
            for i, digest in enumerate(digests):
                position = sequence.committed // self.block_size + i
                key = (group, sequence.namespace, position, digest)
                carriers = [block for block, published in self.keys.items() if published == key]
                if not carriers:
                    self.keys[table[position]] = key
                elif carriers[0] != table[position]:
                    self._replace(table, position, carriers[0])
                    swaps.append((group, position, carriers[0]))
        sequence.committed = token_count
        return ("OK", swaps)

    def fork(self, parent_id: int, child_id: int) -> str:
        """A sequence that shares what its parent has committed."""
        if parent_id not in self.sequences:
            return "NOT_FOUND"
        if child_id <= self.highest_id:
            return "EXISTS"
        parent = self.sequences[parent_id]
        shared = [table[: self._blocks(parent.committed)] for table in parent.tables]
        self.sequences[child_id] = TwinSequence(parent.namespace, parent.committed, parent.committed, shared)
        self.highest_id = child_id
        return "OK"

    def free(self, sequence_id: int) -> str:
        """Drops a sequence, tail first; the groups of a position leave together."""
        if sequence_id not in self.sequences:
            return "NOT_FOUND"
        sequence = self.sequences[sequence_id]
        while any(sequence.tables):
            for table in sequence.tables:
                self._released(table.pop())
        del self.sequences[sequence_id]
        return "OK"

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _blocks(self, token_count: int) -> int:
        return len(range(0, token_count, self.block_size))

    def _grant(self) -> int:
        """The next block of the free order; the caller puts it into a table at once."""
        block = self.free_order()[0]
        if block in self.keys:
            del self.keys[block]
            self.evicted += 1
        self.granted += 1
        return block

    def _replace(self, table: list[int], position: int, block: int) -> None:
        previous, table[position] = table[position], block
        self._released(previous)

    def _released(self, block: int) -> None:
        """One table fewer names the block; where it was the last, its place in the free order is decided now."""
        if self.holders(block) == 0:
            self.stamp += 1
            self.released_at[block] = self.stamp
