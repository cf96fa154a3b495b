"""The history of a request, for its log line and for `ListRequests`; without its prompt and text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

ENTRIES_MAX = 64  # of each list


class Stage(enum.StrEnum):
    """Something that happens to a request; these may happen again and again."""

    ADMITTED = "admitted"
    PREEMPTED = "preempted"


@dataclass(slots=True)
class Trace:
    """The history of one request.

    Attributes:
        sequence_ids: its sequences at the allocator, the first `ENTRIES_MAX` that it had.
        stages: what happened, in order, and when by the engine's clock; the first `ENTRIES_MAX`.
        block_count_max: distinct blocks in its samples' tables, at most. Tables only grow between two admissions, so
            they are counted whenever a sample ends or loses its blocks.
        error: name of the `Reason` that the request failed with, or "CANCELLED".
    """

    sequence_ids: list[int] = field(default_factory=list)
    stages: list[tuple[Stage, float]] = field(default_factory=list)
    block_count_max: int = 0
    error: str = ""

    def note_sequence(self, sequence_id: int) -> None:
        """Notes a sequence that a sample has from now on."""
        if len(self.sequence_ids) < ENTRIES_MAX:
            self.sequence_ids.append(sequence_id)

    def note_stage(self, stage: Stage, now_s: float) -> None:
        """Notes that something happened now."""
        if len(self.stages) < ENTRIES_MAX:
            self.stages.append((stage, now_s))

    def note_blocks(self, block_count: int) -> None:
        """Notes how many distinct blocks the request holds now."""
        self.block_count_max = max(self.block_count_max, block_count)
