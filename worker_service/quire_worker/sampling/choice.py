"""Probabilities to tokens.

Greedy, or the usual chain, each step as in transformers' logits warpers: divide by the temperature, keep the `top_k`
likeliest (ties with the last one stay), keep the likeliest that together reach `top_p`, keep those with at least
`min_p` of the likeliest one's probability, draw.

A draw takes one number u in [0, 1) from the sample's own generator and picks the first token whose cumulative
probability exceeds u. So a sample's generator moves by exactly one number per token, whatever the vocabulary and the
other samples of the batch: the same logits and seed give the same text in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from quire_worker.sampling.params import TEMPERATURE_MIN, SamplingParams

# Takes logits, parameters and a source of numbers in [0, 1) for the rows that are not greedy; returns a token for each,
# int32 or int64 `[rows]` on the device of the logits.
Choose: TypeAlias = Callable[[torch.Tensor, Sequence[SamplingParams], Callable[[], torch.Tensor]], torch.Tensor]


# What one look at logits tells of each row, on the host: the greedy choice, and 1 or 0, whether it is finite. A plain
# pair, for it is made between two passes.
Look: TypeAlias = tuple[list[int], bytes]

FINITE_MAX = torch.finfo(torch.float32).max * TEMPERATURE_MIN  # of a largest logit: a number at any temperature


def are_finite(logits: torch.Tensor) -> torch.Tensor:
    """Returns which rows can be sampled from, bool `[rows]`: their largest logit is a number, and stays one at any
    temperature.

    Args:
        logits: float32 `[rows, vocabulary]`; -inf rules out a token, and does no harm unless it rules out all.
    """
    return logits.amax(dim=-1).abs() <= FINITE_MAX  # NaN is the largest, and below nothing


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    choose: Choose | None = None,
) -> torch.Tensor:
    """Returns one token per row, int32 or int64 `[rows]`, on the device of the logits, without waiting for it. Random
    numbers are drawn last: if memory runs out, the generators have not moved.

    Args:
        logits: float32 `[rows, vocabulary]`; of rows that are not `are_finite` the token is of no use.
        params: per row, valid.
        generators: per row, from `new_generator`; greedy rows leave theirs untouched, and need none.
        choose: the device's way (`PagedAttention.choose`); `choose_by_sorting` if not given.

    Raises:
        ValueError: `logits`, `params` and `generators` differ in length.
    """
    if not logits.shape[0] == len(params) == len(generators):
        raise ValueError(f"{logits.shape[0]} rows of logits, {len(params)} params and {len(generators)} generators")
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64)

    def draw() -> torch.Tensor:
        drawn = [generator for generator, row in zip(generators, params, strict=True) if not row.is_greedy]
        return torch.cat([torch.rand(1, dtype=torch.float64, generator=generator) for generator in drawn])

    return (choose or choose_by_sorting)(logits, params, draw)


def choose_by_sorting(
    logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Returns one token per row, in plain torch; see `PagedAttention.choose`."""
    tokens = logits.argmax(dim=-1)
    rows = [row for row, row_params in enumerate(params) if not row_params.is_greedy]
    if rows:
        probabilities = probabilities_of(logits[rows], [params[row] for row in rows])
        cumulative = probabilities.to(torch.float64).cumsum(dim=-1)
        threshold = draw().to(logits.device).unsqueeze(1) * cumulative[:, -1:]  # [rows, 1]
        drawn = torch.searchsorted(cumulative, threshold, right=True)  # never a token of probability 0
        tokens[rows] = drawn.flatten()
    return tokens


def probabilities_of(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Returns what each row is drawn from.

    Args:
        logits: float32 `[rows, vocabulary]`.
        params: per row, valid, none of them greedy.

    Returns:
        float32 `[rows, vocabulary]`; each row adds up to 1.
    """
    scores = logits / _column(logits, [row.temperature for row in params])
    if any(row.top_k for row in params):
        scores = _keep_top_k(scores, [row.top_k for row in params])
    if any(row.top_p < 1 for row in params):
        scores = _keep_top_p(scores, [row.top_p for row in params])
    if any(row.min_p for row in params):
        scores = _keep_min_p(scores, [row.min_p for row in params])
    return scores.softmax(dim=-1)


def _keep_top_k(scores: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    vocabulary = scores.shape[1]
    counts = [min(k, vocabulary) or vocabulary for k in top_k]
    best = scores.topk(max(counts), dim=-1).values  # [rows, largest count], descending
    index = torch.tensor(counts, device=scores.device).unsqueeze(1) - 1
    return scores.masked_fill(scores < best.gather(1, index), float("-inf"))


def _keep_top_p(scores: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    ascending, order = scores.sort(dim=-1)
    cumulative = ascending.softmax(dim=-1).cumsum(dim=-1)
    dropped = cumulative <= _column(scores, [1 - p if p < 1 else -1.0 for p in top_p])
    dropped[:, -1] = False  # the likeliest always stays
    return scores.masked_fill(dropped.scatter(1, order, dropped), float("-inf"))


def _keep_min_p(scores: torch.Tensor, min_p: Sequence[float]) -> torch.Tensor:
    shares = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return scores.masked_fill(shares < _column(scores, min_p), float("-inf"))


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """`[rows, 1]`, of the same dtype and device."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
