"""Chooses the worker for a request. Pure: the facts about workers come in as numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

# A worker may have this many requests more than the least busy one, and still be chosen for a cached prefix.
SLACK: Final = 2
SLACK_SHARE: Final = 0.25  # or this share of the least busy worker's requests, if that is more


class Standing(NamedTuple):
    """The state of one worker, as far as it matters for a request."""

    load: int  # requests that the worker runs or queues
    matched_token_count: int  # tokens of the prompt that its pool has cached
    preference: int = 0  # see `preference_of`


def preference_of(cache_key: str, namespace: str, address: str) -> int:
    """Returns how much the requests of a `prompt_cache_key` prefer a worker; 0 without a key.

    Each key orders the workers differently. If a worker is added or removed, only its own keys move.
    """
    if not cache_key:
        return 0
    named = "\0".join((namespace, cache_key, address)).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(named).digest()[:8]) + 1


def best(standings: Sequence[Standing]) -> int:
    """Returns the index of the best worker; the first one of equals.

    It is the worker with the longest cached prefix among those that are not much busier than the least busy one. A
    cached prefix saves a prefill, but a longer queue delays every request in it. Among equal prefixes the preference
    decides, then the load.

    Args:
        standings: the state of each worker, at least one.
    """
    least = min(standing.load for standing in standings)
    busiest = least + max(SLACK, int(least * SLACK_SHARE))
    eligible = [index for index, standing in enumerate(standings) if standing.load <= busiest]
    return max(eligible, key=lambda index: (*standings[index][1:], -standings[index].load))
