"""The queue time of requests by reason. Its sum over all reasons is the sum of the queue times.

`look` finds the reasons several times a second. The time since the look before counts for the reason found. The last
part, from sending the step that admits a request to its answer, counts for the allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from quire.views import WaitReason

from quire_worker.scheduling.request import Request
from quire_worker.scheduling.waiting import Wait

SHARE: Final = 200  # Looking at every waiting request may take at most 1/200 of the time.


class QueueTimes:
    """Adds up how long requests waited for their first blocks.

    Args:
        seconds: the sums by reason, which this object increases.
        clock: returns the time in seconds.
    """

    def __init__(self, seconds: dict[WaitReason, float], clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._next_s = 0.0

    def look(self, now_s: float, waits: Callable[[], Mapping[Request, Wait]]) -> None:
        """Counts the time that requests have waited since the look before. Does nothing right after a look."""
        if now_s < self._next_s:
            return
        for request, wait in waits().items():
            if request.admitted_s is None:
                trace = request.trace
                since_s = request.arrived_s if trace.waited_until_s is None else trace.waited_until_s
                self._seconds[wait.reason] += now_s - since_s
                trace.waited_until_s, trace.waits_for = now_s, wait.reason
        self._next_s = now_s + SHARE * (self._clock() - now_s)

    def end(self, request: Request, now_s: float) -> None:
        """Counts the rest of the queue time of a request that is admitted now. The reason is the one found by the
        last look, or the next pass if the request was admitted before any look."""
        trace = request.trace
        since_s = request.arrived_s if trace.waited_until_s is None else trace.waited_until_s
        sent_s = max(since_s, trace.steps[-1][0]) if trace.steps else now_s
        self._seconds[trace.waits_for] += sent_s - since_s
        self._seconds[WaitReason.ALLOCATOR] += now_s - sent_s
