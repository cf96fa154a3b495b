"""The history of a request, without its texts, for its log line and for `ListRequests`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quire.views import WaitReason

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
        carried: the trace context that its call came with.
        steps: when the steps that admitted its samples were sent and answered, the first `ENTRIES_MAX`.
        step_count: steps that asked for the request's blocks.
        step_s: seconds from sending these steps to their answers.
        waited_until_s: when its reason for waiting was last looked for; None before the first time.
        waits_for: this reason.
    """

    sequence_ids: list[int] = field(default_factory=list)
    stages: list[tuple[Stage, float]] = field(default_factory=list)
    block_count_max: int = 0
    error: str = ""
    carried: tuple[tuple[str, str], ...] = ()
    steps: list[tuple[float, float]] = field(default_factory=list)
    step_count: int = 0
    step_s: float = 0.0
    waited_until_s: float | None = None
    waits_for: WaitReason = WaitReason.NEXT_PASS

    def note_sequence(self, sequence_id: int) -> None:
        """Adds a new sequence of one of the request's samples."""
        if len(self.sequence_ids) < ENTRIES_MAX:
            self.sequence_ids.append(sequence_id)

    def note_stage(self, stage: Stage, now_s: float) -> None:
        """Adds an event that happens now."""
        if len(self.stages) < ENTRIES_MAX:
            self.stages.append((stage, now_s))

    def note_step(self, sent_s: float, answered_s: float, *, admits: bool) -> None:
        """Adds a step that asked for blocks of one of the request's samples."""
        self.step_count += 1
        self.step_s += answered_s - sent_s
        if admits and len(self.steps) < ENTRIES_MAX:
            self.steps.append((sent_s, answered_s))

    def note_blocks(self, block_count: int) -> None:
        """Records how many distinct blocks the request holds now."""
        self.block_count_max = max(self.block_count_max, block_count)
