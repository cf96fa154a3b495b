"""Order of requests: the least served namespace comes first, and within it the most urgent request.

    urgency = min(deadline, arrival + 600 s) - 60 s * priority        smaller is sooner

Every request has a due time, and the earliest is first. The due time is the deadline, at most 600 s after the request's
arrival. Each step of priority makes it 60 s earlier (Jackson's urgency number, 1960). So priorities decide among
requests that arrive at about the same time. No request waits forever. A request that arrives more than 20 minutes and
600 s after another request is always behind that request, for all priorities and deadlines.

Running samples have the same order across namespaces: the first gets its blocks first and is preempted last. A sample's
place never changes, so the first sample always makes progress, and in the end all samples do. Backfilled samples
(`backfill.py`) are behind all other samples while the head that they passed still waits.

Virtual token counters decide between namespaces (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
A namespace's counter rises by 1 for each computed token of its prompts, and by 2 for each generated token. The first
sample of the namespace with the smallest counter is considered next. When a namespace begins to wait, its counter is
raised to the smallest counter of the waiting namespaces, or of the last namespace that waited. So time without requests
earns no credit. The service of two waiting namespaces differs by a bound that does not grow with time: the number of
tokens that may run at a time.

Unlike in the paper, cached tokens are not charged, because they cost nothing. Tokens that are computed again after a
preemption are not charged either, because the sample did not cause the preemption.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

from quire_worker.scheduling.request import Request, Sample

DUE_S_MAX = 600.0  # equals the default deadline of clients
PRIORITY_S = 60.0

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
NAMESPACES_MAX = 4_096  # number of namespaces with stored counters


def urgency_of(request: Request) -> float:
    """Returns the sort key of a namespace's requests: a time. The most urgent request has the smallest."""
    return min(request.deadline_s, request.arrived_s + DUE_S_MAX) - PRIORITY_S * request.priority


def order_of(sample: Sample) -> tuple[float, int, int]:
    """Returns the sort key of a waiting sample. The key never changes."""
    request = sample.request
    return urgency_of(request), request.number, sample.index


def rank_of(sample: Sample) -> tuple[bool, float, int, int]:
    """Returns the sort key of a running sample. The last sample gets blocks last, and is preempted first."""
    return sample.passed is not None, *order_of(sample)


class Shares:
    """The counters of all namespaces, in these states.

    1. join     a namespace gets its first waiting sample; its counter is raised
    2. charge   the namespace is served; its counter rises
    3. leave    the namespace has no waiting sample any more; its counter stays
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._floor = 0  # counter of a new namespace if no other namespace waits

    def __len__(self) -> int:
        return len(self._counters)

    def counter(self, namespace: str) -> int:
        """Returns the counter of a namespace: the cost of its service, plus raises."""
        return self._counters.get(namespace, self._floor)

    def join(self, namespace: str, waiting: Iterable[str]) -> None:
        """Raises a namespace's counter to the smallest one of `waiting`, the namespaces that have waiting samples."""
        least = min((self.counter(each) for each in waiting), default=self._floor)
        self._counters[namespace] = max(self.counter(namespace), least)
        if len(self._counters) > NAMESPACES_MAX:
            self._forget({namespace, *waiting})

    def leave(self, namespace: str) -> None:
        """Notes that a namespace has no more waiting samples.

        The next namespace to join an empty queue gets at least this namespace's counter.
        """
        self._floor = max(self._floor, self.counter(namespace))

    def charge(self, namespace: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charges a namespace for the tokens that it was served."""
        cost = PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens
        self._counters[namespace] = self.counter(namespace) + cost

    def _forget(self, kept: set[str]) -> None:
        """Drops the smallest counters, up to half of them.

        No namespace gains by this, because the floor rises to the dropped counters.
        """
        idle = sorted((counter, each) for each, counter in self._counters.items() if each not in kept)
        for counter, namespace in idle[: NAMESPACES_MAX // 2]:
            self._floor = max(self._floor, counter)
            del self._counters[namespace]


class WaitingQueue:
    """Samples that hold no block, in the order of consideration.

    Args:
        shares: the counters of the namespaces.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._by_namespace: dict[str, list[Sample]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_namespace.values()))

    def __contains__(self, sample: object) -> bool:
        return isinstance(sample, Sample) and sample in self._by_namespace.get(sample.request.namespace, ())

    def __iter__(self) -> Iterator[Sample]:
        """Yields all samples by urgency, regardless of their namespaces."""
        return iter(sorted(self.in_any_order(), key=order_of))

    def in_any_order(self) -> Iterator[Sample]:
        """Yields all samples, in any order."""
        for own in self._by_namespace.values():
            yield from own

    def of_namespace(self, namespace: str) -> Sequence[Sample]:
        """Returns the samples of a namespace, by urgency."""
        return self._by_namespace.get(namespace, ())

    def add(self, sample: Sample) -> None:
        """Adds a sample that begins to wait."""
        namespace = sample.request.namespace
        if namespace not in self._by_namespace:
            self._shares.join(namespace, self._by_namespace)
        insort(self._by_namespace.setdefault(namespace, []), sample, key=order_of)

    def remove(self, sample: Sample) -> None:
        """Removes a sample that no longer waits.

        Raises:
            KeyError, ValueError: it was not waiting.
        """
        namespace = sample.request.namespace
        own = self._by_namespace[namespace]
        own.remove(sample)
        if not own:
            del self._by_namespace[namespace]
            self._shares.leave(namespace)

    def in_turn(self) -> Iterator[Sample]:
        """Yields all samples in the order of admission, as if each were admitted.

        The queue must not change during the iteration.
        """
        if len(self._by_namespace) == 1:  # no other namespace waits
            (own,) = self._by_namespace.values()
            yield from own
            return
        # The counter of a namespace includes the prompts of its samples that were considered earlier.
        heap = [
            (self._shares.counter(namespace), order_of(own[0]), 0, namespace)
            for namespace, own in self._by_namespace.items()
        ]
        heapq.heapify(heap)
        while heap:
            counter, _, place, namespace = heap[0]
            own = self._by_namespace[namespace]
            yield own[place]
            if place + 1 < len(own):
                following = counter + len(own[place].tokens), order_of(own[place + 1]), place + 1, namespace
                heapq.heapreplace(heap, following)
            else:
                heapq.heappop(heap)
