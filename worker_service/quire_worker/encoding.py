"""Encoding of the scheduler's plan as a step of the session with the allocator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession

from quire_worker.scheduling.plan import Plan
from quire_worker.scheduling.slots import NO_WISH

DROPS_MAX: Final = 64  # most drops in a step: an allocator takes no more
DROP_DIGESTS_MAX: Final = 8_192  # most digests in a step. Blocks of further drops stay cached, and nothing hits them.


class Asked:
    """A plan. Its step is sent to the allocator when this object is made.

    Attributes:
        sent_s: when the step was sent, by the engine's clock.
        answer: the task that awaits the answer.
    """

    def __init__(self, plan: Plan, session: AsyncSession, clock: Callable[[], float]) -> None:
        self.plan, self.sent_s = plan, clock()
        self.answer = asyncio.create_task(self._send(session, step_of(plan), clock))

    async def _send(self, session: AsyncSession, step: StepBuilder, clock: Callable[[], float]) -> StepOutcome:
        outcome = await session.step(step)
        answered_s = clock()
        for sample, _, _, entering in self.plan.grows:
            sample.request.trace.note_step(self.sent_s, answered_s, admits=entering is not None)
        return outcome


def step_of(plan: Plan) -> StepBuilder:
    """Returns the step that carries everything a plan asks for, phase by phase."""
    step = StepBuilder()
    for commit in plan.commits:
        step.commit(commit.sequence_id, commit.token_count, commit.digests, commit.keep_token_count)
    for sequence_id in plan.frees:
        wish = plan.keeps.get(sequence_id, NO_WISH)
        step.free(sequence_id, keep_ms=wish.keep_ms, keep_token_count=wish.keep_token_count)
    digest_count = 0
    for drop in plan.drops[:DROPS_MAX]:
        digest_count += len(drop.digests)
        if digest_count <= DROP_DIGESTS_MAX:
            step.drop(drop.namespace, drop.digests, drop.kept_digest_count)
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
                breakpoints=sample.request.wish.breakpoints,
            )
    return step
