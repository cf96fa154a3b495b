"""How fast this worker is, as measured in its own passes, and what follows for deadlines."""

from __future__ import annotations

from collections import deque

from quire_worker.scheduling.request import Request

PASSES = 128  # that are remembered


class Pace:
    """The latest passes: how many tokens each computed, and how long it took. Nothing is known before the first."""

    def __init__(self) -> None:
        self._passes = deque[tuple[int, float]](maxlen=PASSES)

    def observe(self, token_count: int, seconds: float) -> None:
        """Notes a pass that computed something."""
        if token_count:
            self._passes.append((token_count, seconds))

    @property
    def pass_s(self) -> float:
        """Returns the seconds of the shortest pass; no pass is expected to be shorter. 0 while nothing is known."""
        return min((seconds for _, seconds in self._passes), default=0.0)

    def seconds_for(self, token_count: int) -> float | None:
        """Says how long so many tokens of a prompt take, by the pass that computed most tokens; None while nothing is
        known."""
        most = max(self._passes, default=None)
        return None if most is None else token_count * most[1] / most[0]

    def is_hopeless(self, request: Request, now_s: float) -> bool:
        """Tells whether a request that has not begun cannot be done before its deadline, even if it is let in at once
        and all of its prompt is found in the cache: each of its tokens takes a pass, one after the other."""
        return now_s + least_token_count(request) * self.pass_s > request.deadline_s


def least_token_count(request: Request) -> int:
    """Counts the tokens that a request cannot end before."""
    sampling = request.sampling
    if sampling.ignore_eos and not sampling.stop_token_ids and not sampling.stop:
        return int(sampling.max_tokens)
    return max(1, int(sampling.min_tokens))
