"""The pool against its twin and against a model of the memory behind it, over seeded random events.

After every event each observable of the pool is compared with the twin's, the pool checks its own invariants, and every
live sequence and every published block is read back from the modelled memory. Replay a seed, or look for new ones:

    QUIRE_TWIN_SEED=17 QUIRE_TWIN_EVENTS=1000000 pytest tests/allocator/test_pool_twin.py
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from quire_allocator.core.pool import GroupKind, GroupSpec, Pool, PoolSpec

from tests.allocator.twin import TwinPool

EVENTS = int(os.environ.get("QUIRE_TWIN_EVENTS", "6000"))  # per seed and shape
FIRST_SEED = int(os.environ.get("QUIRE_TWIN_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + (1 if "QUIRE_TWIN_SEED" in os.environ else 3))
NAMESPACES = ("", "blue")
LIVE_MAX = 7  # sequences; more would leave no room to grow in

# (block size, groups, blocks): so small that evictions and NO_SPACE are daily business
SHAPES = [(1, 1, 12), (1, 2, 18), (4, 1, 9), (4, 2, 14), (16, 1, 8), (16, 2, 12)]

Cell = tuple[str, int, int]  # namespace, group, number of a text: what attention over it caches


@dataclass(slots=True)
class Writer:
    """What the owner knows of one sequence: its text, and how much of it has been written to memory."""

    namespace: str
    text: list[int]
    written: int
    numbers: list[int] = field(default_factory=list)  # of each prefix of `text`


class Memory:
    """The owner's physical blocks. A cell names the whole prefix that it was computed from, so no mix-up can hide."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[list[Cell | None]] = [[None] * block_size for _ in range(block_count)]
        self._number_of: dict[tuple[int, int], int] = {}  # (number of the prefix, next token) -> number

    def numbers(self, text: list[int]) -> list[int]:
        """A number for each prefix of a text, equal only for equal prefixes."""
        numbers, last = [], 0
        for token in text:
            last = self._number_of.setdefault((last, token), len(self._number_of) + 1)
            numbers.append(last)
        return numbers

    def digest(self, number: int) -> bytes:
        """A digest that collides never."""
        return number.to_bytes(32, "big")

    def write(self, writer: Writer, tables: list[list[int]], until: int) -> None:
        """A forward pass over `[written, until)`."""
        for position in range(writer.written, until):
            index, offset = divmod(position, self.block_size)
            for group, table in enumerate(tables):
                self.blocks[table[index]][offset] = (writer.namespace, group, writer.numbers[position])
        writer.written = max(writer.written, until)

    def copy(self, source: int, destination: int) -> None:
        """One copy that a reply asked for."""
        self.blocks[destination] = list(self.blocks[source])


class Simulation:
    """Random events on a pool, its twin and the memory behind both."""

    def __init__(self, shape: tuple[int, int, int], seed: int) -> None:
        self.block_size, self.group_count, self.block_count = shape
        self.random = random.Random(f"{shape} {seed}")
        groups = (GroupSpec(GroupKind.FULL_ATTENTION, self.block_size),) * self.group_count
        self.pool = Pool(PoolSpec(self.block_count, groups))
        self.twin = TwinPool(self.block_count, self.group_count, self.block_size)
        self.memory = Memory(self.block_count, self.block_size)
        self.writers: dict[int, Writer] = {}
        self.tokens_max = self.block_count // self.group_count * self.block_size
        self.texts = [self._some_text(self.tokens_max) for _ in range(4)]
        self.next_id = 1
        self.seen: Counter[str] = Counter()
        self.trace: deque[str] = deque(maxlen=25)

    def run(self, event_count: int) -> None:
        """Applies events, comparing everything after each."""
        events = [self.allocate, self.grow, self.commit, self.fork, self.free, self.forward, self.wrong]
        for number in range(event_count):
            event = self.random.choices(events, (5, 6, 6, 2, 3, 2, 1))[0]
            event()
            self.compare()
            if number % 8 == 0:
                self.compare_free_order()

    # -- events --------------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """A prompt: often the beginning of a known text, now and then longer than the pool."""
        if len(self.writers) >= LIVE_MAX:
            self.free()
            return
        length = self.random.randint(1, self.tokens_max)
        if self.random.random() < 0.05:
            length = self.tokens_max + self.random.randint(1, self.block_size)
        text = self.random.choice(self.texts)[:length]
        if self.random.random() < 0.4:
            text = text[: self.random.randint(0, len(text))]
        text = text + self._some_text(length - len(text))
        namespace = self.random.choice(NAMESPACES)
        sequence_id, self.next_id = self.next_id, self.next_id + self.random.randint(1, 3)
        writer = Writer(namespace, text, 0, self.memory.numbers(text))
        digests = self._digests(writer, 0, length)
        if self.random.random() < 0.1:
            digests = digests[: self.random.randint(0, len(digests))]
        ours = self.pool.allocate(sequence_id, length, digests, namespace)
        theirs = self.twin.allocate(sequence_id, length, digests, namespace)
        self._same("allocate", (sequence_id, length, namespace), _plain(ours), theirs)
        if theirs[0] == "OK":
            writer.written = theirs[1]
            self.writers[sequence_id] = writer
            self._forward_some(sequence_id)
        elif theirs[0] == "NO_SPACE":
            self.next_id = sequence_id  # the id was not used up

    def grow(self) -> None:
        """By a token, by many, by none, or beyond the pool."""
        if not self.writers:
            return
        sequence_id = self.random.choice(list(self.writers))
        granted = self.twin.sequences[sequence_id].token_count
        by = self.random.choice((1, 1, self.block_size, self.random.randint(-2, 3 * self.block_size), self.tokens_max))
        token_count = max(1, granted + by)
        ours = self.pool.grow(sequence_id, token_count)
        theirs = self.twin.grow(sequence_id, token_count)
        self._same("grow", (sequence_id, token_count), _plain(ours), theirs)
        for source, destination in theirs[3]:
            self.memory.copy(source, destination)
        if theirs[0] == "OK" and token_count > granted:
            writer = self.writers[sequence_id]
            missing = token_count - len(writer.text)
            known = self.random.choice(self.texts)
            # Sometimes goes on as a known text does, so that equal blocks meet at commit.
            follows = known[: len(writer.text)] == writer.text and self.random.random() < 0.5
            writer.text += known[len(writer.text) : token_count] if follows else []
            writer.text += self._some_text(token_count - len(writer.text)) if missing > 0 else []
            writer.numbers = self.memory.numbers(writer.text)
            self._forward_some(sequence_id)

    def forward(self) -> None:
        """Writes what has been granted, without asking the pool."""
        if self.writers:
            self._forward_some(self.random.choice(list(self.writers)))

    def commit(self) -> None:
        """All that was written, or a part of it."""
        if not self.writers:
            return
        sequence_id = self.random.choice(list(self.writers))
        writer, committed = self.writers[sequence_id], self.twin.sequences[sequence_id].committed
        until = writer.written if self.random.random() < 0.6 else self.random.randint(committed, writer.written)
        digests = self._digests(writer, committed, until)
        assert self.pool.filled_block_count(sequence_id, until) == len(digests) == self.twin.filled(sequence_id, until)
        ours = self.pool.commit(sequence_id, until, digests)
        theirs = self.twin.commit(sequence_id, until, digests)
        self._same("commit", (sequence_id, until), (ours.result.name, [tuple(swap) for swap in ours.swaps]), theirs)
        self.seen["swap"] += len(theirs[1])

    def fork(self) -> None:
        """Of any live sequence; now and then with an id that was used."""
        if not self.writers or len(self.writers) >= LIVE_MAX:
            return
        parent_id = self.random.choice(list(self.writers))
        child_id = self.next_id if self.random.random() < 0.95 else self.random.randint(0, self.next_id - 1)
        theirs = self.twin.fork(parent_id, child_id)
        self._same("fork", (parent_id, child_id), self.pool.fork(parent_id, child_id).name, theirs)
        if theirs == "OK":
            parent, committed = self.writers[parent_id], self.twin.sequences[parent_id].committed
            self.writers[child_id] = Writer(
                parent.namespace, parent.text[:committed], committed, parent.numbers[:committed]
            )
            self.next_id = child_id + 1

    def free(self) -> None:
        """Any live sequence."""
        if self.writers:
            sequence_id = self.random.choice(list(self.writers))
            self._same("free", (sequence_id,), self.pool.free(sequence_id).name, self.twin.free(sequence_id))
            del self.writers[sequence_id]

    def wrong(self) -> None:
        """Ids that are unknown, freed or used, and more tokens than were granted."""
        dead = self.random.choice([i for i in range(self.next_id + 2) if i not in self.writers])
        used = self.random.randint(0, self.twin.highest_id)
        self._same("free", (dead,), self.pool.free(dead).name, self.twin.free(dead))
        self._same("grow", (dead, 1), _plain(self.pool.grow(dead, 1)), self.twin.grow(dead, 1))
        self._same("fork", (dead, dead), self.pool.fork(dead, dead).name, self.twin.fork(dead, dead))
        again = _plain(self.pool.allocate(used, 1, [], ""))
        self._same("allocate", (used,), again, self.twin.allocate(used, 1, [], ""))
        committed = self.pool.commit(dead, 1, [])
        self._same("commit", (dead,), (committed.result.name, list(committed.swaps)), self.twin.commit(dead, 1, []))
        for sequence_id in self.writers:
            beyond = self.twin.sequences[sequence_id].token_count + 1
            assert self.pool.filled_block_count(sequence_id, beyond) is None
            committed = self.pool.commit(sequence_id, beyond, [])
            self._same("commit", (sequence_id, beyond), (committed.result.name, []), ("TOO_LONG", []))
            lower = self.twin.sequences[sequence_id].committed - 1
            assert lower < 0 or self.pool.filled_block_count(sequence_id, lower) == -1

    # -- comparison ----------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Everything that can be seen, the pool's own invariants, and the memory."""
        pool, twin = self.pool, self.twin
        pool.check_invariants()
        assert pool.blocks.states() == twin.states()
        assert [pool.blocks.empty_count, pool.blocks.cached_count, pool.blocks.free_count] == [
            len(twin.empty_blocks()),
            len(twin.cached_blocks()),
            len(twin.free_order()),
        ]
        assert list(pool.sequences) == list(twin.sequences)
        for ours, theirs in zip(pool.sequences.values(), twin.sequences.values(), strict=True):
            assert (ours.namespace, ours.token_count) == (theirs.namespace, theirs.token_count)
            assert ours.committed_token_count == theirs.committed
            assert [list(table) for table in ours.tables] == theirs.tables
        assert pool.table_entry_count() == sum(len(t) for s in twin.sequences.values() for t in s.tables)
        assert pool.last_sequence_id == twin.highest_id
        counters = (pool.granted_block_count, pool.copy_count, pool.queried_token_count, pool.matched_token_count)
        assert (*counters, pool.blocks.evicted_count) == (
            twin.granted,
            twin.copied,
            twin.queried,
            twin.hit,
            twin.evicted,
        )
        self._read_back()

    def compare_free_order(self) -> None:
        """What a probe would match, and in which order all free blocks would be granted."""
        probe = Writer("", self.random.choice(self.texts), 0)
        probe.numbers = self.memory.numbers(probe.text)
        for namespace in NAMESPACES:
            digests = self._digests(probe, 0, len(probe.text))
            assert self.pool.match(namespace, digests) == self.twin.match(namespace, digests)
        blocks = copy.deepcopy(self.pool.blocks)
        assert blocks.take(blocks.free_count) == self.twin.free_order()

    def _read_back(self) -> None:
        """I1: each sequence reads its own text, each digest names what it says. I2: shared blocks have one place."""
        size = self.block_size
        for sequence_id, writer in self.writers.items():
            for group, table in enumerate(self.twin.sequences[sequence_id].tables):
                cells = [(writer.namespace, group, number) for number in writer.numbers[: writer.written]]
                for index in range(0, writer.written, size):
                    expected = cells[index : index + size]
                    block = table[index // size]
                    assert self.memory.blocks[block][: len(expected)] == expected, f"{sequence_id} lost its content"
        for block, (group, namespace, _, digest) in self.twin.keys.items():
            cell = (namespace, group, int.from_bytes(digest, "big"))
            assert self.memory.blocks[block][-1] == cell, f"block {block} is not what it was published as"

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _some_text(self, length: int) -> list[int]:
        """Half of the time one token over and over, so that equal blocks come up again and again."""
        if self.random.random() < 0.5:
            return [0] * length
        return [self.random.randint(0, 1) for _ in range(length)]

    def _digests(self, writer: Writer, start: int, end: int) -> list[bytes]:
        """Of the blocks that become full between two counts of tokens."""
        blocks = range(start // self.block_size, end // self.block_size)
        return [self.memory.digest(writer.numbers[(block + 1) * self.block_size - 1]) for block in blocks]

    def _forward_some(self, sequence_id: int) -> None:
        writer, sequence = self.writers[sequence_id], self.twin.sequences[sequence_id]
        until = sequence.token_count if self.random.random() < 0.7 else self.random.randint(0, sequence.token_count)
        self.memory.write(writer, sequence.tables, until)

    def _same(self, event: str, arguments: tuple[Any, ...], ours: Any, theirs: Any) -> None:
        result = theirs if isinstance(theirs, str) else theirs[0]
        self.seen[f"{event} {result}"] += 1
        if event == "grow":
            self.seen["copy"] += len(theirs[3])
        if event == "allocate":
            self.seen["hit"] += theirs[1]
        self.trace.append(f"{event}{arguments} -> {theirs}")
        assert ours == theirs, f"{event}{arguments}"


def _plain(grown: Any) -> Any:
    """A GrowResult as the twin would say it."""
    return (
        grown.result.name,
        grown.matched_token_count,
        [list(blocks) for blocks in grown.blocks],
        [tuple(pair) for pair in grown.copies],
        grown.shortfall,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "size{}-groups{}-blocks{}".format(*shape))
def test_the_pool_does_what_its_twin_does(shape: tuple[int, int, int], seed: int) -> None:
    simulation = Simulation(shape, seed)
    print(f"replay with QUIRE_TWIN_SEED={seed} QUIRE_TWIN_EVENTS={EVENTS}, shape {shape}")
    try:
        simulation.run(EVENTS)
    except Exception:
        print("\n".join(simulation.trace))
        raise
    wanted = {"allocate OK", "allocate NO_SPACE", "allocate TOO_LONG", "allocate EXISTS"}
    wanted |= {"grow OK", "grow NO_SPACE", "grow NOT_FOUND", "grow TOO_LONG", "commit OK", "commit TOO_LONG"}
    wanted |= {"fork OK", "fork EXISTS", "fork NOT_FOUND", "free OK", "free NOT_FOUND", "swap", "hit"}
    wanted |= {"copy"} if simulation.block_size > 1 else set()  # blocks of one token are never half full
    rare = {what: simulation.seen[what] for what in wanted if simulation.seen[what] < EVENTS // 1000}
    assert not rare, "these events hardly occurred, so the run shows less than it claims"
