"""Chooses the worker for a prompt while no allocator does: the rule of `Route` over mirrors of the pools.

The gateway knows three facts about a worker: its own prompts there that have no first token, the worker's sequences at
the last poll, and the worker's rate, as an allocator last gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire._serving.routing_rule import Candidate, usual_rate
from quire.hashing import prompt_digests

from quire_gateway import routing
from quire_gateway.backend import Backend, ChosenWorker, Model


class RoutedPrompt(NamedTuple):
    """A prompt, and what its request says about caches."""

    model: Model
    tokens: Sequence[int]
    namespace: str
    cache_salt: str
    cache_key: str  # the caller's `prompt_cache_key`


def choose(
    candidates: Sequence[Backend], prompt: RoutedPrompt, rate_of: Callable[[Backend], int]
) -> ChosenWorker | None:
    """Returns the best of these workers, which serve the model; None if there are no workers.

    `rate_of` returns a worker's measured tokens per second; 0 before the first measurement.
    """
    if len(candidates) < 2:
        return ChosenWorker(candidates[0]) if candidates else None
    rates = [rate_of(backend) for backend in candidates]
    usual = usual_rate(rates)
    standings, joined = list[routing.Standing](), list[bytes]()
    hashed: dict[tuple[bytes, int], tuple[list[bytes], bytes]] = {}
    for backend, rate in zip(candidates, rates, strict=True):
        # Workers of one model usually share root and block size. For all of these, the prompt is hashed only once.
        key = backend.root(prompt.namespace, prompt.model.adapter, prompt.cache_salt), backend.block_size
        if key not in hashed:
            found = prompt_digests(key[0], prompt.tokens, backend.block_size) if backend.block_size else []
            hashed[key] = found, b"".join(found)
        candidate = _candidate(backend, *hashed[key], prompt, rate or usual)
        preference = routing.preference_of(prompt.cache_key, prompt.namespace, backend.client.address)
        joined.append(hashed[key][1])
        standings.append(routing.Standing(candidate, preference))
    place = routing.best(standings)
    uncached = standings[place].candidate.uncached_token_count
    return ChosenWorker(candidates[place], uncached_token_count=uncached, digests=joined[place])


def _candidate(backend: Backend, digests: list[bytes], joined: bytes, prompt: RoutedPrompt, rate: float) -> Candidate:
    hit = backend.matched_token_count(digests, prompt.namespace)
    shared = max(hit, backend.underway.shared_block_count(joined) * backend.block_size)
    uncached, backlog = len(prompt.tokens) - shared, backend.underway.uncached_token_count
    return Candidate(hit, shared - hit, uncached, backlog, rate, backend.load)
