"""Batches of grows: remembers the latest batch, and grants one block for every group to sequences of a batch.

A decoding engine names the same sequences in step after step, and each takes its next blocks at a block edge.
"""

from __future__ import annotations

from array import array

from quire_allocator.core.groups.coordinator import Coordinator
from quire_allocator.core.sequence import SequenceState
from quire_allocator.core.spec import Grants


class Batch:
    """Keeps the sequences that were looked up for one array of ids, until a sequence is freed."""

    __slots__ = ("_ids", "_sequences")

    def __init__(self) -> None:
        self._ids = array("Q")
        self._sequences: list[SequenceState | None] = []

    def has(self, ids: array[int]) -> bool:
        """Tells whether these are the ids of the latest batch, all of them live."""
        return ids == self._ids

    def look_up(self, ids: array[int], sequences: dict[int, SequenceState]) -> list[SequenceState | None]:
        """Returns the sequence of each id, or None if it is not live. Keeps the list if all are live."""
        if ids == self._ids:
            return self._sequences
        found = [sequences.get(sequence_id) for sequence_id in ids]
        if None not in found:
            self._sequences, self._ids = found, ids[:]
        return found

    def forget(self) -> None:
        """Forgets the latest batch, because a sequence may be gone."""
        self._sequences, self._ids = [], array("Q")

    def items(self) -> list[tuple[int, SequenceState | None]]:
        """Returns the ids with the sequences that were found for them."""
        return list(zip(self._ids, self._sequences))


class DueRows:
    """Sequences of a batch that take a row (one block for every group). All sequences get their rows in one call:
    taking rows one by one costs as much as everything else in a grow."""

    __slots__ = ("_coordinator", "_grants", "_rows", "sequences")

    def __init__(self, coordinator: Coordinator, grants: Grants) -> None:
        self._coordinator = coordinator
        self._grants = grants
        self._rows: list[int] = []
        self.sequences: list[SequenceState] = []  # the sequences of `_rows`, in the same order

    def add(self, number: int, sequence: SequenceState, token_count: int) -> None:
        """Grants a row to the sequence of grow `number`, to hold `token_count` tokens."""
        self._rows.append(number)
        sequence.token_count = token_count
        sequence.limit += self._coordinator.digest_tokens
        self.sequences.append(sequence)

    def hand_out(self) -> None:
        """Takes all rows and hands them out. Called before a grow that may take other blocks, and at the end."""
        if self.sequences:
            self._grants.add_rows(self._rows, self._coordinator.append_rows(self.sequences))
            self._rows, self.sequences = [], []
