"""The rule that chooses a worker: the longest prefix, until that worker is saturated; then the shortest time.

Example, at 10,000 tokens/s and a tolerated delay of 1 s: the worker with the longest cached prefix gets the prompt
while it has at most 10,000 other tokens to compute. Beyond that, the prompt goes to the worker that computes backlog
and prompt soonest, even if it recomputes the prefix.

Sequences that decode slow each other. So each sequence that the worker has more than the least busy one, beyond
`SEQUENCES_ALIKE`, counts as `SEQUENCE_S` of a prefill: a prefix of 5,000 tokens, which take 0.5 s, is worth 10 of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from quire_allocator.limits import SEQUENCE_S, SEQUENCES_ALIKE


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
        sequence_count: its live sequences, and those of prompts that were routed there.
    """

    hit_token_count: int
    promised_token_count: int
    uncached_token_count: int
    backlog_token_count: int
    prefill_tokens_per_s: float
    sequence_count: int = 0

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

    @property
    def cost_s(self) -> float:
        """Returns `prefill_s`, with an allowance for each sequence that decodes beside the prompt."""
        return self.prefill_s + SEQUENCE_S * self.sequence_count


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
        best = min(sharing, key=lambda index: candidates[index].cost_s)
        chosen, least = candidates[best], min(candidate.sequence_count for candidate in candidates)
        extra_s = SEQUENCE_S * (chosen.sequence_count - least - SEQUENCES_ALIKE)
        is_worth = extra_s <= most / chosen.prefill_tokens_per_s
        if chosen.wait_s <= tolerated_s and is_worth:
            return WorkerChoice(best, Basis.PREFIX)
    fastest = min(indices, key=lambda index: (candidates[index].cost_s, -candidates[index].shared_token_count))
    is_spread = candidates[fastest].shared_token_count < most
    return WorkerChoice(fastest, Basis.SPREAD if is_spread else Basis.PREFIX if most else Basis.LOAD)
