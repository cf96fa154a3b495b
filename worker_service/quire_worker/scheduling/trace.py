"""The history of a request, without its texts, for its log line and for `ListRequests`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

ENTRIES_MAX = 64  # the most entries in each list


class Stage(enum.StrEnum):
    """An event in the life of a request; it may happen several times."""

    ADMITTED = "admitted"
    PREEMPTED = "preempted"


@dataclass(slots=True)
class Trace:
    """The history of one request.

    Attributes:
        sequence_ids: the first `ENTRIES_MAX` of its sequences at the allocator.
        stages: the first `ENTRIES_MAX` events in order, with their times by the engine's clock.
        block_count_max: the most distinct blocks in its samples' tables. Tables only grow between two admissions, so
            counting is needed only when a sample ends or loses its blocks.
        error: name of the `Reason` that the request failed with, or "CANCELLED".
    """

    sequence_ids: list[int] = field(default_factory=list)
    stages: list[tuple[Stage, float]] = field(default_factory=list)
    block_count_max: int = 0
    error: str = ""

    def note_sequence(self, sequence_id: int) -> None:
        """Adds a new sequence of one of its samples."""
        if len(self.sequence_ids) < ENTRIES_MAX:
            self.sequence_ids.append(sequence_id)

    def note_stage(self, stage: Stage, now_s: float) -> None:
        """Adds an event that happens now."""
        if len(self.stages) < ENTRIES_MAX:
            self.stages.append((stage, now_s))

    def note_blocks(self, block_count: int) -> None:
        """Records how many distinct blocks the request holds now."""
        self.block_count_max = max(self.block_count_max, block_count)
