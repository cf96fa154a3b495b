"""Choice of tokens from logits: greedy, or by a draw.

A draw has the steps of transformers' logits warpers: divide by the temperature, keep the `top_k` likeliest tokens (ties
with the k-th token stay), keep the likeliest tokens that together reach `top_p`, keep the tokens with at least `min_p`
times the largest probability, draw.

A draw takes one number u in [0, 1) from the sample's own generator and picks the first token whose cumulative
probability exceeds u. So a generator advances by exactly one number per token, whatever the vocabulary and the other
samples of the batch. The same logits and seed give the same text in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from quire_worker.sampling.params import TEMPERATURE_MIN, SamplingParams

# Takes logits, parameters, and a function that draws a number in [0, 1) for each row that is not greedy. Returns a
# token for each row, int32 or int64 `[rows]` on the device of the logits.
Choose: TypeAlias = Callable[[torch.Tensor, Sequence[SamplingParams], Callable[[], torch.Tensor]], torch.Tensor]


# For each row of logits, on the host: the greedy choice, and 1 if the row is finite or 0 if not. A plain tuple, because
# it is created between two passes, where each microsecond counts.
Look: TypeAlias = tuple[list[int], bytes]

FINITE_MAX = torch.finfo(torch.float32).max * TEMPERATURE_MIN  # smaller logits stay finite at any temperature


def are_finite(logits: torch.Tensor) -> torch.Tensor:
    """Returns which rows can be sampled from, bool `[rows]`: their largest logit is finite at any temperature.

    Args:
        logits: float32 `[rows, vocabulary]`; -inf rules out a token, and a row may have it for all tokens but one.
    """
    return logits.amax(dim=-1).abs() <= FINITE_MAX  # amax returns NaN if any entry is NaN, and NaN <= x is False


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    choose: Choose | None = None,
) -> torch.Tensor:
    """Returns one token per row, int32 or int64 `[rows]`, on the device of the logits, without waiting for it.

    Random numbers are drawn last, so no generator has advanced if memory runs out.

    Args:
        logits: float32 `[rows, vocabulary]`; if a row is not `are_finite`, its token is meaningless.
        params: valid parameters of each row.
        generators: each row's generator from `new_generator`; greedy rows do not use theirs, and may have None.
        choose: the device's implementation (`PagedAttention.choose_tokens`); default `choose_by_sorting`.

    Raises:
        ValueError: `logits`, `params` and `generators` differ in length.
    """
    if not logits.shape[0] == len(params) == len(generators):
        raise ValueError(
            f"there must be as many rows of logits ({logits.shape[0]}) as params ({len(params)}) and generators "
            f"({len(generators)})"
        )
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64)

    def draw() -> torch.Tensor:
        drawn = [generator for generator, row in zip(generators, params, strict=True) if not row.is_greedy]
        return torch.cat([torch.rand(1, dtype=torch.float64, generator=generator) for generator in drawn])

    return (choose or choose_by_sorting)(logits, params, draw)


def choose_by_sorting(
    logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Returns one token per row, in plain torch; see `PagedAttention.choose_tokens`."""
    tokens = logits.argmax(dim=-1)
    rows = [row for row, row_params in enumerate(params) if not row_params.is_greedy]
    if rows:
        probabilities = probabilities_of(logits[rows], [params[row] for row in rows])
        cumulative = probabilities.to(torch.float64).cumsum(dim=-1)
        threshold = draw().to(logits.device).unsqueeze(1) * cumulative[:, -1:]  # [rows, 1]
        drawn = torch.searchsorted(cumulative, threshold, right=True)  # never chooses a token of probability 0
        tokens[rows] = drawn.flatten()
    return tokens


def probabilities_of(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Returns the probabilities that each row's token is drawn by.

    Args:
        logits: float32 `[rows, vocabulary]`.
        params: valid parameters of each row, none of them greedy.

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
    best = scores.topk(max(counts), dim=-1).values  # shape [rows, largest count], descending
    index = torch.tensor(counts, device=scores.device).unsqueeze(1) - 1
    return scores.masked_fill(scores < best.gather(1, index), float("-inf"))


def _keep_top_p(scores: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    ascending, order = scores.sort(dim=-1)
    cumulative = ascending.softmax(dim=-1).cumsum(dim=-1)
    dropped = cumulative <= _column(scores, [1 - p if p < 1 else -1.0 for p in top_p])
    dropped[:, -1] = False  # the likeliest token always stays
    return scores.masked_fill(dropped.scatter(1, order, dropped), float("-inf"))


def _keep_min_p(scores: torch.Tensor, min_p: Sequence[float]) -> torch.Tensor:
    shares = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return scores.masked_fill(shares < _column(scores, min_p), float("-inf"))


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Returns the values as `[rows, 1]`, with the dtype and device of `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
