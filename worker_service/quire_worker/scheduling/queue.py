"""Samples that wait, in the order in which they are considered: fair between namespaces, by urgency inside each."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence

from quire_worker.scheduling.order import order_of
from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.shares import Shares


class WaitingQueue:
    """Samples that hold no block.

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
