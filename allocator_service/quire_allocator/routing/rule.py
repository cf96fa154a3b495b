"""The rule that chooses a worker: the longest prefix, until that worker is saturated; then the shortest time.

Example, at 10,000 tokens/s and a tolerated delay of 1 s: the worker with the longest cached prefix gets the prompt
while it has at most 10,000 other tokens to compute. Beyond that, the prompt goes to the worker that computes backlog
and prompt soonest, even if it recomputes the prefix.
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
    """A worker's numbers for one prompt.

    Attributes:
        hit_token_count: leading tokens of the prompt that are published there.
        promised_token_count: tokens after those that the worker computes for others.
        uncached_token_count: the rest of the prompt.
        backlog_token_count: tokens that the worker must still compute for others, including promised ones.
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
        """Returns the seconds that the prompt waits for tokens of other prompts."""
        return max(0, self.backlog_token_count - self.promised_token_count) / self.prefill_tokens_per_s

    @property
    def prefill_s(self) -> float:
        """Returns the seconds until the whole prompt is computed."""
        return (self.backlog_token_count + self.uncached_token_count) / self.prefill_tokens_per_s


class WorkerChoice(NamedTuple):
    """The index of the chosen candidate, and the reason."""

    place: int
    basis: Basis


def choose(candidates: Sequence[Candidate], tolerated_s: float) -> WorkerChoice:
    """Returns the best worker for a prompt; among equals, the first.

    Args:
        candidates: at least one.
        tolerated_s: longest wait of a prompt, in seconds, at the worker with its longest prefix.
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
