"""What one turn of the engine asks of the allocator, and what it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.protocol.outcomes import Copy
from quire.protocol.steps import StepBuilder

from quire_worker.scheduling.request import Sample


class Work(NamedTuple):
    """Tokens `[sample.computed, sample.computed + token_count)` of one sample."""

    sample: Sample
    token_count: int

    @property
    def is_complete(self) -> bool:
        """Tells whether the next token can be sampled after it."""
        return self.sample.computed + self.token_count == len(self.sample.tokens)


class Batch(NamedTuple):
    """What to run: the copies first, then one forward pass."""

    copies: list[Copy]
    work: list[Work]


@dataclass(slots=True)
class Plan:
    """One turn before the allocator has answered.

    Attributes:
        step: what to ask for; nothing may be needed.
        wanted: how many tokens of whom, if granted, in the order of age.
        commits: who commits in the step.
        forks: parent and child of each fork of the step.
        grows: who each grow of the step is for, and how many tokens it asks room for.
        admitted: those of them that waited.
        is_whole: nobody who runs is left out of it for want of room.
        tokens_left: in the turn's forward pass.
    """

    step: StepBuilder = field(default_factory=StepBuilder)
    wanted: list[tuple[Sample, int]] = field(default_factory=list)
    commits: list[Sample] = field(default_factory=list)
    forks: list[tuple[Sample, Sample]] = field(default_factory=list)
    grows: list[tuple[Sample, int]] = field(default_factory=list)
    admitted: set[Sample] = field(default_factory=set)
    is_whole: bool = True
    tokens_left: int = 0
