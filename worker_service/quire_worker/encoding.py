"""Encoding of the scheduler's plan as a step of the session with the allocator."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder

from quire_worker.scheduling.plan import Plan


class Asked(NamedTuple):
    """A plan whose step was sent to the allocator, the task that awaits the answer, and the time of sending."""

    plan: Plan
    answer: asyncio.Task[StepOutcome]
    sent_s: float


def step_of(plan: Plan) -> StepBuilder:
    """Returns the step that carries everything a plan asks for, phase by phase."""
    step = StepBuilder()
    for commit in plan.commits:
        step.commit(commit.sequence_id, commit.token_count, commit.digests, commit.keep_token_count)
    for sequence_id in plan.frees:
        keep_ms, keep_token_count = plan.keeps.get(sequence_id, (0, 0))
        step.free(sequence_id, keep_ms=keep_ms, keep_token_count=keep_token_count)
    for fork in plan.forks:
        step.fork(fork.parent_id, fork.child_id)
    for sample, sequence_id, token_count, entering in plan.grows:
        if entering is None:
            step.grow(sequence_id, token_count)
        else:
            step.allocate(
                sequence_id,
                token_count,
                entering.digests,
                sample.request.namespace,
                prompt_token_count=entering.prompt_token_count,
                is_return=entering.is_return,
            )
    return step
