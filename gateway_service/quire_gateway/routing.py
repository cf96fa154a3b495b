"""Chooses the worker for a prompt by the rule of `Route`, from what one gateway knows. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from quire._serving.routing_rule import SEQUENCE_TOKENS, Candidate, choose, cost_s

# A cache key's preferred worker is chosen although its cost is higher than the best worker's: by at most this many
# sequences, plus the tokens that the best worker has to compute for the prompt.
SLACK: Final = 2
DIGEST_BYTES: Final = 32


class Standing(NamedTuple):
    """The state of one worker, as far as it matters for a prompt."""

    candidate: Candidate
    preference: int = 0  # see `preference_of`


class Underway:
    """The prompts that this gateway sent to one worker, until their first tokens.

    A gateway knows only its own prompts. It does not estimate those of other gateways: multiplied by the number of
    gateways, each prompt would drive all of them to the same other worker (docs/gateway.md).

    Attributes:
        uncached_token_count: tokens that the worker must compute for them.
    """

    def __init__(self) -> None:
        self.uncached_token_count = 0
        self._prompts: dict[Hashable, tuple[int, bytes]] = {}

    def add(self, prompt: Hashable, uncached_token_count: int, digests: bytes = b"") -> None:
        """Adds a prompt, with its concatenated digests. Later prompts count its prefix as shared."""
        self.remove(prompt)
        self._prompts[prompt] = uncached_token_count, digests
        self.uncached_token_count += uncached_token_count

    def remove(self, prompt: Hashable) -> None:
        """Removes a prompt, unless it was removed before."""
        count, _ = self._prompts.pop(prompt, (0, b""))
        self.uncached_token_count -= count

    def shared_block_count(self, digests: bytes) -> int:
        """Returns how many leading blocks of a prompt the worker computes for one of these prompts, or has cached."""
        return max((_shared_block_count(digests, others) for _, others in self._prompts.values()), default=0)


def _shared_block_count(digests: bytes, others: bytes) -> int:
    """Returns the number of equal leading digests. A digest stands for all before it, so bisection finds their end."""
    low, high = 0, min(len(digests), len(others)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        last = slice((middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES)
        if digests[last] == others[last]:
            low = middle
        else:
            high = middle - 1
    return low


def preference_of(cache_key: str, namespace: str, address: str) -> int:
    """Returns how much the requests of a `prompt_cache_key` prefer a worker; 0 without a key.

    Each key orders the workers differently. If a worker is added or removed, only its own keys move.
    """
    if not cache_key:
        return 0
    named = "\0".join((namespace, cache_key, address)).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(named).digest()[:8]) + 1


def best(standings: Sequence[Standing]) -> int:
    """Returns the index of the best of at least one worker; the first one of equals.

    The best worker is the one that `Route` would choose, unless the caller's cache key prefers another worker that has
    as much of the prompt cached, and little more to do. The key's prompts probably share a prefix that no worker has
    cached yet. So the preferred worker may have more tokens to compute: as many as the prompt lacks at the best one.
    """
    found = choose([standing.candidate for standing in standings]).place
    chosen = standings[found].candidate
    slack = chosen.uncached_token_count + SLACK * SEQUENCE_TOKENS
    most_s = cost_s(chosen) + slack / chosen.prefill_tokens_per_s

    def preference(place: int) -> tuple[int, bool]:
        candidate, wish = standings[place]
        is_eligible = candidate.shared_token_count >= chosen.shared_token_count and cost_s(candidate) <= most_s
        return wish if is_eligible else -1, place == found

    return max(range(len(standings)), key=preference)
