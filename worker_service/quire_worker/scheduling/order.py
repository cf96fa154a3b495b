"""Who comes before whom: between namespaces whoever was served least, inside each the most urgent request.

    urgency = min(deadline, arrival + 600 s) - 60 s * priority        the smaller, the sooner

Every request is due at some time, and the earliest is first: at its deadline, or 600 s after it came, where it has none
or a later one. Each step of priority puts that 60 s forward (Jackson's urgency number, 1960). So among requests that
come at about the same time priorities alone decide, and nobody waits for ever: what comes more than 20 minutes and
600 s after a request, whatever its priority and deadline, is behind it.

The same order, which never changes for a sample, says who of those that run is asked for first and preempted last,
whatever the namespace. Therefore the first of them always gets on, and so everybody does in the end. Behind all others
are those that were backfilled (`backfill.py`), as long as the one that they passed is still waiting.

Between namespaces virtual token counters decide (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
a namespace's counter rises by 1 for each token of its prompts that is computed, and by 2 for each token that is
generated for it. Who waits in the namespace with the smallest counter is considered next. A namespace that comes when
nobody of it waits is lifted to the smallest counter of those that wait, or to where the last one stood: time without
requests is nothing that can be saved up. So between two namespaces that both have somebody waiting, what they get
differs by a bound that no length of time changes: the tokens that may run at a time.

Other than in the paper, what is found in the cache is not charged, because it costs nobody anything; and what a
preempted sample computes again is not, because the preemption was not its wish.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

from quire_worker.scheduling.request import Request, Sample

DUE_S_MAX = 600.0  # also what clients give a request unless they are told otherwise
PRIORITY_S = 60.0
PRIORITY_MAX = 10  # and least -10

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
    """Returns the key by which samples that run are sorted: whoever is asked for last is preempted first."""
    return sample.passed is not None, *order_of(sample)


class Shares:
    """The counters of all namespaces.

    1. join     a namespace has somebody waiting, and had nobody
    2. charge   it is served
    3. leave    nobody of it waits any more; its counter stays
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._floor = 0  # where a namespace begins that is unknown and meets nobody

    def __len__(self) -> int:
        return len(self._counters)

    def counter(self, namespace: str) -> int:
        """Returns how much a namespace has been served, with what it was lifted by."""
        return self._counters.get(namespace, self._floor)

    def join(self, namespace: str, waiting: Iterable[str]) -> None:
        """Lets a namespace begin where the others are; `waiting` are those that have somebody waiting."""
        least = min((self.counter(each) for each in waiting), default=self._floor)
        self._counters[namespace] = max(self.counter(namespace), least)
        if len(self._counters) > NAMESPACES_MAX:
            self._forget({namespace, *waiting})

    def leave(self, namespace: str) -> None:
        """Notes that nobody of a namespace waits any more: who comes next to an empty queue begins no lower."""
        self._floor = max(self._floor, self.counter(namespace))

    def charge(self, namespace: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Counts what a namespace was served."""
        cost = PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens
        self._counters[namespace] = self.counter(namespace) + cost

    def _forget(self, kept: set[str]) -> None:
        """Drops half of the counters, the smallest first; nobody gains by that, because the floor rises to them."""
        idle = sorted((counter, each) for each, counter in self._counters.items() if each not in kept)
        for counter, namespace in idle[: NAMESPACES_MAX // 2]:
            self._floor = max(self._floor, counter)
            del self._counters[namespace]


class WaitingQueue:
    """Samples that hold no block, in the order in which they are considered.

    Args:
        shares: what each namespace has been served.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._by_namespace: dict[str, list[Sample]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_namespace.values()))

    def __contains__(self, sample: object) -> bool:
        return isinstance(sample, Sample) and sample in self._by_namespace.get(sample.request.namespace, ())

    def __iter__(self) -> Iterator[Sample]:
        """Goes through everybody by urgency, whatever the namespace."""
        return iter(sorted(self.in_any_order(), key=order_of))

    def in_any_order(self) -> Iterator[Sample]:
        """Goes through everybody, in no order."""
        for own in self._by_namespace.values():
            yield from own

    def of_namespace(self, namespace: str) -> Sequence[Sample]:
        """Returns those of a namespace, by urgency."""
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
        """Goes through everybody in the order in which they are let in, if each is. Nobody may come or leave
        meanwhile."""
        if len(self._by_namespace) == 1:  # nobody to be fair to
            (own,) = self._by_namespace.values()
            yield from own
            return
        # A namespace counts as served with the prompt of each that was considered before.
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
