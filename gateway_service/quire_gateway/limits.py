"""Limits of API keys: requests and tokens per minute, and concurrent requests. Pure: the time is an argument.

The requests of a minute are a bucket: it holds as many as the limit, and refills steadily. Tokens are counted when a
request ends, because their number is unknown before. A request is admitted while any tokens are left. If a request
takes more tokens than remain, later requests wait until the bucket has refilled.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from quire_gateway.keys import ApiKey

MINUTE_S: Final = 60.0
PLACE_S: Final = 1.0  # seconds until a caller at its limit of concurrent requests should retry


class Refusal(NamedTuple):
    """A limit that a request would break.

    Attributes:
        limit: its name in the key file.
        value: its value in the key file.
        retry_after_s: seconds until one more request is admitted, if no other request comes before.
    """

    limit: str
    value: int
    retry_after_s: float


class _Bucket:
    """The remaining allowance of one minute's limit. It refills steadily."""

    def __init__(self, capacity: int, now_s: float) -> None:
        self.capacity = capacity
        self._left = float(capacity)
        self._since_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Returns the seconds until the bucket holds at least one request or token; 0 if it holds one now."""
        self._left = min(self.capacity, self._left + (now_s - self._since_s) * self.capacity / MINUTE_S)
        self._since_s = now_s
        return max(0.0, 1.0 - self._left) * MINUTE_S / self.capacity

    def take(self, count: int) -> None:
        """Takes some, possibly more than the bucket holds."""
        self._left -= count


class _Use:
    """The current use of one key's limits."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: _Bucket | None = None
        self.tokens: _Bucket | None = None


class KeyLimits:
    """Counts the use of keys. When the key file is read again, a key keeps its counts, except for changed limits."""

    def __init__(self) -> None:
        self._uses: dict[bytes, _Use] = {}

    def begin(self, key: ApiKey, now_s: float) -> Refusal | None:
        """Counts a request that begins. Returns a refusal instead if a limit of its key is reached."""
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
        """Counts the tokens of a request that has ended. The request is no longer concurrent with others."""
        use = self._uses[key.digest]
        use.in_flight -= 1
        if use.tokens is not None:
            use.tokens.take(token_count)

    def keep(self, digests: frozenset[bytes]) -> None:
        """Forgets every key that is not in `digests` and has no running requests."""
        self._uses = {each: use for each, use in self._uses.items() if each in digests or use.in_flight}


def _bucket(before: _Bucket | None, capacity: int | None, now_s: float) -> _Bucket | None:
    if capacity is None or (before is not None and before.capacity == capacity):
        return before if capacity is not None else None
    return _Bucket(capacity, now_s)
