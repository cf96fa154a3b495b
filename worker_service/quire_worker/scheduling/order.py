"""Order of requests: the least served namespace is first, and inside each the most urgent request.

    urgency = min(deadline, arrival + 600 s) - 60 s * priority        the smaller, the sooner

Every request is due at some time, and the earliest is first. It is due at its deadline, at the latest 600 s after its
arrival. Each step of priority puts that 60 s forward (Jackson's urgency number, 1960). So among requests that arrive at
about the same time, priorities decide. No request waits for ever: a request that arrives more than 20 minutes and 600 s
after another one is behind it, whatever their priorities and deadlines.

Running samples follow the same order, whatever their namespaces: the first is asked for first and preempted last. A
sample's place never changes. Therefore the first sample always makes progress, and so all samples do in the end.
Backfilled samples (`backfill.py`) are behind all others as long as the head that they passed is still waiting.

Virtual token counters decide between namespaces (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
A namespace's counter rises by 1 for each token of its prompts that is computed, and by 2 for each token that is
generated for it. The first sample of the namespace with the smallest counter is considered next. When a namespace
begins to wait, its counter is lifted to the smallest counter of the waiting ones, or to that of the last one that
waited: time without requests earns nothing. So the service of two waiting namespaces differs by a bound that does not
grow with time: the tokens that may run at a time.

Unlike in the paper, cached tokens are not charged, because they cost nothing. Tokens that a preempted sample computes
again are not charged either, because it did not ask for the preemption.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

from quire_worker.scheduling.request import Request, Sample

DUE_S_MAX = 600.0  # also what clients give a request unless they are told otherwise
PRIORITY_S = 60.0

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
NAMESPACES_MAX = 4_096  # whose counters are kept


def urgency_of(request: Request) -> float:
    """Returns the time by which requests of one namespace are sorted: the most urgent has the least."""
    return min(request.deadline_s, request.arrived_s + DUE_S_MAX) - PRIORITY_S * request.priority


def order_of(sample: Sample) -> tuple[float, int, int]:
    """Returns the key by which samples that wait are sorted; it never changes."""
    request = sample.request
    return urgency_of(request), request.number, sample.index


def rank_of(sample: Sample) -> tuple[bool, float, int, int]:
    """Returns the key by which running samples are sorted: the sample that is asked for last is preempted first."""
    return sample.passed is not None, *order_of(sample)


class Shares:
    """The counters of all namespaces.

    1. join     a namespace gets its first waiting sample
    2. charge   it is served
    3. leave    it has no waiting sample any more; its counter stays
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._floor = 0  # counter of a new namespace when no other one waits

    def __len__(self) -> int:
        return len(self._counters)

    def counter(self, namespace: str) -> int:
        """Returns the counter of a namespace: its service, and what it was lifted by."""
        return self._counters.get(namespace, self._floor)

    def join(self, namespace: str, waiting: Iterable[str]) -> None:
        """Lifts a namespace to the smallest counter of `waiting`, the namespaces that have waiting samples."""
        least = min((self.counter(each) for each in waiting), default=self._floor)
        self._counters[namespace] = max(self.counter(namespace), least)
        if len(self._counters) > NAMESPACES_MAX:
            self._forget({namespace, *waiting})

    def leave(self, namespace: str) -> None:
        """Notes that a namespace has no waiting sample any more. The next to join an empty queue starts no lower."""
        self._floor = max(self._floor, self.counter(namespace))

    def charge(self, namespace: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charges a namespace for the tokens that it was served."""
        cost = PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens
        self._counters[namespace] = self.counter(namespace) + cost

    def _forget(self, kept: set[str]) -> None:
        """Drops the smallest counters, up to half of them. No namespace gains, because the floor rises to them."""
        idle = sorted((counter, each) for each, counter in self._counters.items() if each not in kept)
        for counter, namespace in idle[: NAMESPACES_MAX // 2]:
            self._floor = max(self._floor, counter)
            del self._counters[namespace]


class WaitingQueue:
    """Samples that hold no block, in the order in which they are considered.

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
        """Yields all samples by urgency, whatever their namespaces."""
        return iter(sorted(self.in_any_order(), key=order_of))

    def in_any_order(self) -> Iterator[Sample]:
        """Yields all samples, in no order."""
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
        """Takes out a sample that waits no more.

        Raises:
            KeyError, ValueError: it did not wait.
        """
        namespace = sample.request.namespace
        own = self._by_namespace[namespace]
        own.remove(sample)
        if not own:
            del self._by_namespace[namespace]
            self._shares.leave(namespace)

    def in_turn(self) -> Iterator[Sample]:
        """Yields all samples in the order of admission, as if each was admitted. The queue may not change
        meanwhile."""
        if len(self._by_namespace) == 1:  # no other namespace to be fair to
            (own,) = self._by_namespace.values()
            yield from own
            return
        # A namespace counts as charged for the prompts of its samples that were yielded before.
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
