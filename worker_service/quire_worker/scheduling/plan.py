"""What one turn of the engine asks of the allocator, and what it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.protocol.outcomes import Copy
from quire.protocol.steps import StepBuilder

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.swap import SwapOut


class Work(NamedTuple):
    """Tokens `[start, start + token_count)` of one sample.

    A pass is planned while the one before it is computed. The token that this one samples has a place already, behind
    the last of `sample.tokens`, and work that begins there gets it when it is known.

    Attributes:
        is_complete: the next token can be sampled after it.
        is_restored: its pages are copied from host memory, and nothing is computed.
        draft: tokens that are computed behind them, and may turn out not to follow; see `drafts.py`.
    """

    sample: Sample
    start: int
    token_count: int
    is_complete: bool
    is_restored: bool = False
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Returns how many tokens of the sample are computed when it is done, without those that are drafted."""
        return self.start + self.token_count


def is_for_first_tokens(work: Sequence[Work]) -> bool:
    """Tells whether a pass brings first tokens of answers, and does nothing for anybody else. Those of a branch do not
    count: what its request pays for depends on the room that is asked for while it is computed."""
    is_complete = any(item.is_complete for item in work)
    return is_complete and all(item.sample.request.first_token_s is None and not item.sample.rests for item in work)


class Draw(NamedTuple):
    """One token to sample: for `sample`, from the logits after `parent`'s last token (itself, unless it is a fork), or
    after so many drafted ones."""

    sample: Sample
    parent: Sample
    drafted_count: int = 0


class Batch(NamedTuple):
    """What to run: the moves first, in order, then what is restored, then one forward pass."""

    moves: list[Copy | SwapOut]
    work: list[Work]

    def draws(self) -> list[Draw]:
        """Returns the tokens to sample after it; when a prompt's prefill ends, the first of all its samples."""
        draws = []
        for item in self.work:
            if item.is_complete and item.sample.draws and not item.sample.is_beam:
                first = item.sample
                draws.append(Draw(first, first))
                if first.has_forks_to_come:
                    draws += [Draw(fork, first) for fork in first.request.samples[1:]]
        return draws


@dataclass(slots=True)
class Plan:
    """One turn before the allocator has answered.

    Attributes:
        step: what to ask for; nothing may be needed.
        wanted: how many tokens of whom, if granted, in their order.
        commits: who commits in the step.
        forks: parent and child of each fork of the step.
        grows: who each grow of the step is for, and how many tokens it asks room for.
        admitted: those of them that waited.
        passed: which head those of them that are backfilled pass.
        victims: backfilled samples that are freed in the step, for others to have their blocks.
        is_unfair: the head of the queue found no place or no blocks, and nobody of its namespace runs.
        is_whole: nobody who runs is left out of it for want of room.
        tokens_left: in the turn's forward pass, beside those of samples that were not backfilled.
    """

    step: StepBuilder = field(default_factory=StepBuilder)
    wanted: list[tuple[Sample, int]] = field(default_factory=list)
    commits: list[Sample] = field(default_factory=list)
    forks: list[tuple[Sample, Sample]] = field(default_factory=list)
    grows: list[tuple[Sample, int]] = field(default_factory=list)
    admitted: set[Sample] = field(default_factory=set)
    passed: dict[Sample, Sample] = field(default_factory=dict)
    victims: list[Sample] = field(default_factory=list)
    is_unfair: bool = False
    is_whole: bool = True
    tokens_left: int = 0
