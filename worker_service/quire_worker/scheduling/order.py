"""Who comes before whom among the requests of one namespace; between namespaces `shares.py` decides.

    urgency = min(deadline, arrival + 600 s) - 60 s * priority        the smaller, the sooner

Every request is due at some time, and the earliest is first: at its deadline, or 600 s after it came, where it has none
or a later one. Each step of priority puts that 60 s forward (Jackson's urgency number, 1960). So among requests that
come at about the same time priorities alone decide, and nobody waits for ever: what comes more than 20 minutes and
600 s after a request, whatever its priority and deadline, is behind it.

The same order, which never changes for a sample, says who of those that run is asked for first and preempted last.
Therefore the first of them always gets on, and so everybody does in the end. Behind all others are those that were
backfilled (`backfill.py`), as long as the one that they passed is still waiting.
"""

from __future__ import annotations

from quire_worker.scheduling.request import Request, Sample

DUE_S_MAX = 600.0  # also what clients give a request unless they are told otherwise
PRIORITY_S = 60.0
PRIORITY_MAX = 10  # and least -10


def urgency_of(request: Request) -> float:
    """Returns the time by which requests of one namespace are sorted: the most urgent has the least."""
    return min(request.deadline_s, request.arrived_s + DUE_S_MAX) - PRIORITY_S * request.priority


def order_of(sample: Sample) -> tuple[float, int, int]:
    """Returns the key by which samples that wait are sorted; it never changes."""
    request = sample.request
    return urgency_of(request), request.number, sample.index


def rank_of(sample: Sample) -> tuple[bool, float, int, int]:
    """Returns the key by which samples that run are sorted: whoever is asked for last is preempted first."""
    return sample.passed is not None, *order_of(sample)
