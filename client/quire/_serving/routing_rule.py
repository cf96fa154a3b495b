"""The rule by which allocators and gateways choose a prompt's worker.

The worker with the least to compute gets the prompt. Tokens of the prompt itself count 1.5 times.

A worker that lacks a prefix would compute the prefix once more. The copy delays later prompts and evicts other
prefixes, so the prompt's own tokens have this weight. Example: worker A has published a prefix of 6,000 tokens. A
prompt of 7,200 tokens goes to A until A's backlog is 9,000 tokens longer than the backlog of another busy worker.

At a worker that has nothing to do and enough empty blocks, a copy delays no request and evicts nothing. There, the
prompt's own tokens count only 1.1 times. So a second worker soon takes a part of a burst.

Decoding sequences have no backlog, but slow each other. So each sequence counts as `SEQUENCE_TOKENS` tokens. Otherwise
chats with one short system prompt would all go to one worker.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

# Weight of a token that the worker must compute. With a lower weight, a busy fleet computes too many prefixes at more
# than one worker; with a higher weight, prompts queue at the worker that has their prefix (benchmarks/fleet.py).
UNCACHED_WEIGHT: Final = 1.5
# The weight at an idle worker with enough empty blocks. With 1.0, a burst of prompts would copy a prefix to every idle
# worker.
FREE_WEIGHT: Final = 1.1
SEQUENCE_TOKENS: Final = 50  # A live sequence counts as this many tokens to compute.
PREFILL_TOKENS_PER_S: Final = 8_000  # assumed while no worker of a model has measured its rate


class Basis(enum.StrEnum):
    """How the chosen worker compares with the others."""

    PREFIX = "prefix"  # no other worker has a longer prefix of the prompt cached
    LOAD = "load"  # no worker has a prefix of the prompt cached
    SPREAD = "spread"  # another worker has a longer prefix cached, but has too much to do


class Candidate(NamedTuple):
    """A worker's numbers for one prompt.

    Attributes:
        hit_token_count: leading tokens of the prompt that the worker has published.
        promised_token_count: the next tokens of the prompt, which the worker computes for other requests.
        uncached_token_count: the rest of the prompt.
        backlog_token_count: tokens that the worker must still compute for other requests, including promised tokens.
        prefill_tokens_per_s: the worker's measured rate of computing prompts, above 0.
        sequence_count: the worker's live sequences, and the prompts that were routed to it.
        has_room: whether the worker's empty blocks can hold the rest of the prompt; False if unknown.
    """

    hit_token_count: int
    promised_token_count: int
    uncached_token_count: int
    backlog_token_count: int
    prefill_tokens_per_s: float
    sequence_count: int = 0
    has_room: bool = False

    @property
    def shared_token_count(self) -> int:
        """Returns the tokens that the worker need not compute for this prompt."""
        return self.hit_token_count + self.promised_token_count


class WorkerChoice(NamedTuple):
    """The index of the chosen candidate, and how it compares with the others."""

    place: int
    basis: Basis


def usual_rate(rates: Sequence[float]) -> float:
    """Returns the mean of the measured rates, for workers whose own rate is 0 because it was not measured yet."""
    measured = [rate for rate in rates if rate]
    return sum(measured) / len(measured) if measured else PREFILL_TOKENS_PER_S


def cost_s(
    worker: Candidate, uncached_weight: float = UNCACHED_WEIGHT, sequence_tokens: int = SEQUENCE_TOKENS
) -> float:
    """Returns the time in seconds that the rule minimizes: for the backlog, the prompt, and the live sequences."""
    if worker.has_room and not worker.backlog_token_count and not worker.sequence_count:
        uncached_weight = min(uncached_weight, FREE_WEIGHT)
    token_count = worker.backlog_token_count + uncached_weight * worker.uncached_token_count
    return (token_count + sequence_tokens * worker.sequence_count) / worker.prefill_tokens_per_s


def choose(
    candidates: Sequence[Candidate], uncached_weight: float = UNCACHED_WEIGHT, sequence_tokens: int = SEQUENCE_TOKENS
) -> WorkerChoice:
    """Returns the best of at least one worker for a prompt. If several are equally good, the first one is returned."""

    def cost(place: int) -> tuple[float, int]:
        worker = candidates[place]
        return cost_s(worker, uncached_weight, sequence_tokens), -worker.shared_token_count

    best = min(range(len(candidates)), key=cost)
    most = max(candidate.shared_token_count for candidate in candidates)
    is_spread = candidates[best].shared_token_count < most
    return WorkerChoice(best, Basis.SPREAD if is_spread else Basis.PREFIX if most else Basis.LOAD)
