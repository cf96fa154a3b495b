"""The rule that chooses a worker: the longest prefix, until that worker is saturated; then the shortest time.

Example, at 10,000 tokens/s and a tolerated delay of 1 s: a worker that shares most of a prompt gets it while it has at
most 10,000 tokens to compute that this prompt does not share. Beyond those, the prompt goes where backlog and prompt
together take the least time, even if its prefix is computed there once more.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Basis(enum.StrEnum):
    """Why a worker was chosen."""

    PREFIX = "prefix"  # no worker has a longer prefix of the prompt cached
    LOAD = "load"  # no worker has a prefix of it cached, so the shortest time decides
    SPREAD = "spread"  # the worker with the longest cached prefix is saturated, so the shortest time decides


class Candidate(NamedTuple):
    """A worker, as far as it matters for one prompt.

    Attributes:
        hit_token_count: leading tokens of the prompt that are published there.
        promised_token_count: tokens after those that the worker computes for others.
        uncached_token_count: the rest of the prompt.
        backlog_token_count: tokens that the worker has still to compute for others, promised ones included.
        prefill_tokens_per_s: its measured rate, above 0.
    """

    hit_token_count: int
    promised_token_count: int
    uncached_token_count: int
    backlog_token_count: int
    prefill_tokens_per_s: float

    @property
    def shared_token_count(self) -> int:
        """Returns the tokens that the worker need not compute for this prompt."""
        return self.hit_token_count + self.promised_token_count

    @property
    def wait_s(self) -> float:
        """Returns the seconds that the prompt waits for work that it does not share."""
        return max(0, self.backlog_token_count - self.promised_token_count) / self.prefill_tokens_per_s

    @property
    def prefill_s(self) -> float:
        """Returns the seconds until the whole prompt is computed."""
        return (self.backlog_token_count + self.uncached_token_count) / self.prefill_tokens_per_s


class WorkerChoice(NamedTuple):
    """The place of the chosen candidate, and why it was chosen."""

    place: int
    basis: Basis


def choose(candidates: Sequence[Candidate], tolerated_s: float) -> WorkerChoice:
    """Returns the best worker for a prompt; the first one of equals.

    Args:
        candidates: at least one.
        tolerated_s: seconds that a prompt waits at the worker that shares most of it, before it goes elsewhere.
    """
    most = max(candidate.shared_token_count for candidate in candidates)
    indices = range(len(candidates))
    if most:
        sharing = [index for index in indices if candidates[index].shared_token_count == most]
        best = min(sharing, key=lambda index: candidates[index].prefill_s)
        if candidates[best].wait_s <= tolerated_s:
            return WorkerChoice(best, Basis.PREFIX)
    fastest = min(indices, key=lambda index: (candidates[index].prefill_s, -candidates[index].shared_token_count))
    is_spread = candidates[fastest].shared_token_count < most
    return WorkerChoice(fastest, Basis.SPREAD if is_spread else Basis.PREFIX if most else Basis.LOAD)
