"""The sequences of the latest batch of grows: an engine that decodes names the same ones step after step."""

from __future__ import annotations

from array import array

from quire_allocator.core.sequence import SequenceState


class Batch:
    """Keeps what was found for one array of ids, until a sequence is freed."""

    __slots__ = ("_ids", "_sequences")

    def __init__(self) -> None:
        self._ids = array("Q")
        self._sequences: list[SequenceState | None] = []

    def has(self, ids: array[int]) -> bool:
        """Tells whether these are the ids of the latest batch, all of them live."""
        return ids == self._ids

    def look_up(self, ids: array[int], sequences: dict[int, SequenceState]) -> list[SequenceState | None]:
        """Returns the sequence of each id, None where it is not live, and keeps them where all are."""
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
