"""How much each namespace has been served, so that one cannot keep the others waiting.

These are the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a
namespace's counter rises by 1 for each token of its prompts that is computed, and by 2 for each token that is generated
for it. Who waits in the namespace with the smallest counter is considered next. A namespace that comes when nobody of
it waits is lifted to the smallest counter of those that wait, or to where the last one stood: time without requests is
nothing that can be saved up. So between two namespaces that both have somebody waiting, what they get differs by a
bound that no length of time changes: the tokens that may run at a time.

Other than in the paper, what is found in the cache is not charged, because it costs nobody anything; and what a
preempted sample computes again is not, because the preemption was not its wish.
"""

from __future__ import annotations

from collections.abc import Iterable

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
NAMESPACES_MAX = 4_096  # whose counters are kept


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
