"""The owner's memory in a simulation: texts, and physical blocks with cells that name the tokens they were computed
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.allocator.twin.pool_twin import Slot, TwinPool, TwinSequence

Cell = tuple[str, int, int]  # (namespace, group, number of a text): identifies the text's keys and values, or its state


@dataclass(slots=True)
class Writer:
    """One sequence as its owner knows it: its text, and how much of it is written to memory."""

    namespace: str
    text: list[int]
    written: int
    plan: list[int] = field(default_factory=list)  # the whole prompt, if `text` is only its first chunks
    numbers: list[int] = field(default_factory=list)  # the number of each prefix of `text`


class Memory:
    """Physical blocks. A cell names the whole prefix that it was computed from, so no mix-up can hide."""

    def __init__(self, block_count: int, twin: TwinPool) -> None:
        self.twin = twin
        size = max(kind.block_size for kind in twin.kinds)
        self.blocks: list[list[Cell | None]] = [[None] * size for _ in range(block_count)]
        self._number_of: dict[tuple[int, int], int] = {}  # (number of the prefix, next token) -> number

    def numbers(self, text: Sequence[int]) -> list[int]:
        """Returns a number for each prefix of a text; only equal prefixes have equal numbers."""
        numbers, last = [], 0
        for token in text:
            last = self._number_of.setdefault((last, token), len(self._number_of) + 1)
            numbers.append(last)
        return numbers

    def text(self, number: int) -> list[int]:
        """Returns the text that has this number."""
        before = {own: last_token for last_token, own in self._number_of.items()}
        tokens = []
        while number:
            number, token = before[number]
            tokens.append(token)
        return tokens[::-1]

    def digests(self, numbers: Sequence[int], start: int, end: int) -> list[bytes]:
        """Returns the digests of the digest blocks that become full between two counts of tokens. They never
        collide."""
        size = self.twin.digest_tokens
        ends = range((start // size + 1) * size, end + 1, size)
        return [numbers[end - 1].to_bytes(32, "big") for end in ends]

    def write(self, writer: Writer, sequence: TwinSequence, until: int) -> None:
        """Simulates a forward pass over `[written, until)`; a state is overwritten in place."""
        for kind, table in zip(self.twin.kinds, sequence.tables, strict=True):
            for token in range(writer.written, until):
                index, offset = (0, 0) if kind.name == "state" else divmod(token, kind.block_size)
                slot = table[index]
                assert slot is not None
                assert slot.key is None, f"token {token} goes into a published block"
                assert kind.name != "state" or self.twin.holders(slot) == 1, "a state that others share is overwritten"
                for group, block in zip(kind.groups, slot.blocks, strict=True):
                    self.blocks[block][offset] = (writer.namespace, group, writer.numbers[token])
        writer.written = max(writer.written, until)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Makes the copies that an answer asked for, in their order."""
        for source, destination in copies:
            self.blocks[destination] = list(self.blocks[source])

    def check_sequence(self, writer: Writer, sequence: TwinSequence) -> None:
        """Checks that a sequence reads its own text: every token that the next token reads, and the state after the
        written ones."""
        for kind, table in zip(self.twin.kinds, sequence.tables, strict=True):
            if kind.name == "state":
                if writer.written:
                    self._check_slot(kind.groups, table[0], 0, writer, [writer.written - 1])
                continue
            for index, slot in enumerate(table):
                tokens = range(index * kind.block_size, min((index + 1) * kind.block_size, writer.written))
                if slot is None:
                    assert kind.has_fallen_out(index, sequence.committed)
                elif tokens:
                    self._check_slot(kind.groups, slot, 0, writer, tokens)

    def _check_slot(
        self, groups: Sequence[int], slot: Slot | None, offset: int, writer: Writer, tokens: Sequence[int]
    ) -> None:
        assert slot is not None
        for group, block in zip(groups, slot.blocks, strict=True):
            expected = [(writer.namespace, group, number) for number in writer.numbers[tokens[0] : tokens[-1] + 1]]
            assert self.blocks[block][offset : offset + len(expected)] == expected, (
                f"{tokens} of group {group} are lost"
            )

    def check_published(self) -> None:
        """Checks that each digest names the block's contents."""
        for slot in self.twin.published:
            kind = self.twin.kinds[slot.kind]
            assert slot.key is not None
            number = int.from_bytes(slot.key[3][-1], "big")
            for group, block in zip(kind.groups, slot.blocks, strict=True):
                cell = self.blocks[block][0 if kind.name == "state" else kind.block_size - 1]
                assert cell == (slot.namespace, group, number), f"block {block} is not what it was published as"
