"""Explains to operators why samples wait, with the same code that decides about their admission."""

from __future__ import annotations

from collections.abc import Collection

from quire.views import WaitReason

from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.scheduler import Scheduler
from quire_worker.scheduling.waiting import Wait


def waits_of(scheduler: Scheduler, asked: Collection[Sample] = (), *, is_connected: bool = True) -> dict[Request, Wait]:
    """Returns for each request with a waiting sample why it waits, as the next plan would decide.

    Changes nothing except caches of digests.

    Args:
        scheduler: the worker's scheduler.
        asked: samples whose blocks were requested from the allocator.
        is_connected: whether there is a session with the allocator.
    """
    roster = scheduler.roster
    left = sum(max(1, len(sample.tokens) - sample.computed) for sample in roster.running)
    found: dict[Sample, Wait] = {}
    applicants = scheduler.applicants(scheduler.batch_tokens_max - left, scheduler.room())
    applicants.consider(roster.waiting.in_turn(), may_preempt=True, waits=found)
    waits: dict[Request, Wait] = {}
    head: Request | None = None
    for sample in roster.waiting.in_turn():
        request = sample.request
        if sample in asked:
            wait = Wait(WaitReason.ALLOCATOR)
        elif not is_connected:
            wait = Wait(WaitReason.NO_SESSION)
        else:
            wait = found.get(sample) or _behind(request, head)
        if wait.reason in (WaitReason.BLOCKS, WaitReason.PLACES, WaitReason.PASS_FULL) and head is None:
            head = request
        waits.setdefault(request, wait)
    return waits


def _behind(request: Request, head: Request | None) -> Wait:
    """Returns the reason of a request that waits behind the head."""
    if head is None or head is request:
        return Wait(WaitReason.NEXT_PASS)
    is_own = head.namespace == request.namespace
    return Wait(WaitReason.ORDER if is_own else WaitReason.FAIRNESS, behind=head)
