"""Limits of API keys: requests and tokens a minute, and requests at a time. Pure: the time is an argument.

A minute's requests are a bucket that holds as many as the limit and refills steadily. Tokens are counted when a request
ends, because nobody knows before how many it takes: a request is admitted while anything is left, and what it took
beyond that is made up for before the next one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from quire_gateway.keys import ApiKey

MINUTE_S: Final = 60.0
PLACE_S: Final = 1.0  # after which to ask again for a place of another request


class Refusal(NamedTuple):
    """A limit that a request would break.

    Attributes:
        limit: its name, as the key file has it.
        value: what it is set to.
        retry_after_s: after which one more request is admitted, if no other comes before.
    """

    limit: str
    value: int
    retry_after_s: float


class _Bucket:
    """The rest of a minute's limit, which refills steadily."""

    def __init__(self, capacity: int, now_s: float) -> None:
        self.capacity = capacity
        self._left = float(capacity)
        self._since_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Returns the seconds until there is one."""
        self._left = min(self.capacity, self._left + (now_s - self._since_s) * self.capacity / MINUTE_S)
        self._since_s = now_s
        return max(0.0, 1.0 - self._left) * MINUTE_S / self.capacity

    def take(self, count: int) -> None:
        """Takes some, perhaps more than there are."""
        self._left -= count


class _Use:
    """The use that one key has made of its limits."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: _Bucket | None = None
        self.tokens: _Bucket | None = None


class KeyLimits:
    """Counts what keys use. A key keeps its counts when the file is read again, unless the limit is another."""

    def __init__(self) -> None:
        self._uses: dict[bytes, _Use] = {}

    def begin(self, key: ApiKey, now_s: float) -> Refusal | None:
        """Counts a request that begins, unless a limit of its key refuses it."""
        use = self._uses.setdefault(key.digest, _Use())
        use.requests = _bucket(use.requests, key.requests_per_minute, now_s)
        use.tokens = _bucket(use.tokens, key.tokens_per_minute, now_s)
        if key.concurrent_max is not None and use.in_flight >= key.concurrent_max:
            return Refusal("concurrent", key.concurrent_max, PLACE_S)
        for name, bucket in (("requests", use.requests), ("tokens", use.tokens)):
            if bucket is not None and (wait_s := bucket.wait_s(now_s)) > 1e-9:
                return Refusal(name, bucket.capacity, wait_s)
        use.in_flight += 1
        if use.requests is not None:
            use.requests.take(1)
        return None

    def end(self, key: ApiKey, token_count: int) -> None:
        """Counts what a request took that had begun."""
        use = self._uses[key.digest]
        use.in_flight -= 1
        if use.tokens is not None:
            use.tokens.take(token_count)

    def keep(self, digests: frozenset[bytes]) -> None:
        """Forgets keys that there are no more, except those with requests."""
        self._uses = {each: use for each, use in self._uses.items() if each in digests or use.in_flight}


def _bucket(before: _Bucket | None, capacity: int | None, now_s: float) -> _Bucket | None:
    if capacity is None or (before is not None and before.capacity == capacity):
        return before if capacity is not None else None
    return _Bucket(capacity, now_s)
