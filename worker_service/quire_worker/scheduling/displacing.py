"""Preemption between namespaces: if one has no running sample, a namespace with several may lose a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from quire_worker.scheduling.order import WaitingQueue
from quire_worker.scheduling.request import Sample


def displaced_by_head(waiting: WaitingQueue, running: Sequence[Sample]) -> Sample | None:
    """Returns the sample that is preempted for the head of the queue, if the head does not fit otherwise.

    The victim is the last sample of the namespace with the most running samples. Returns None if that namespace has
    fewer than two running samples, or the head's own namespace has any.
    """
    head = next(waiting.in_turn(), None) if len(waiting) else None
    if head is None:
        return None
    counts = Counter(sample.request.namespace for sample in running)
    if counts[head.request.namespace]:
        return None
    namespace, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count < 2:
        return None
    return _last(running, namespace, {sample.fork_of for sample in running})


def _last(running: Sequence[Sample], namespace: str, parents: Collection[Sample | None]) -> Sample | None:
    """Returns the last sample of a namespace that takes no part in a fork, and does not await a choice of beams."""
    for sample in reversed(running):
        is_forking = sample.fork_of is not None or sample in parents
        if sample.request.namespace == namespace and not is_forking and not sample.awaits_choice:
            return sample
    return None
