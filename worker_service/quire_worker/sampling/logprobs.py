"""Log probabilities (natural logarithm) of tokens, from the model's unchanged logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class TokenLogprobs(NamedTuple):
    """Logprobs of one token and of its alternatives.

    Attributes:
        token_id: the token.
        logprob: the token's logprob.
        top_token_ids: the alternatives to the token, the likeliest first.
        top_logprobs: the logprobs of `top_token_ids`.
    """

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Likeliest(NamedTuple):
    """The likeliest tokens after a text.

    Attributes:
        token_ids: int64 `[tokens]`, the likeliest first.
        logprobs: float32 `[tokens]`.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray


class Ranking(NamedTuple):
    """The likeliest tokens of rows of logits, found before the rows' tokens are chosen.

    Attributes:
        logits: float32 `[rows, vocabulary]`.
        normalisers: float32 `[rows]`, the logarithm of each row's sum of exponentials.
        top_token_ids: int64 `[rows, most]`.
        top_logprobs: float32 `[rows, most]`.
        counts: how many of the top tokens each row's caller wants.
    """

    logits: torch.Tensor
    normalisers: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor
    counts: Sequence[int]

    def of(self, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Returns the logprobs of one token per row."""
        index = torch.tensor(tokens, device=self.logits.device)
        own = (self.logits.gather(1, index.unsqueeze(1)).squeeze(1) - self.normalisers).tolist()
        ids, logprobs = self.top_token_ids.tolist(), self.top_logprobs.tolist()
        return [
            TokenLogprobs(token, own[row], tuple(ids[row][:count]), tuple(logprobs[row][:count]))
            for row, (token, count) in enumerate(zip(tokens, self.counts, strict=True))
        ]


def likeliest(row: torch.Tensor, count: int) -> Likeliest:
    """Returns the `count` likeliest tokens, or all if the vocabulary has fewer.

    Args:
        row: float32 `[vocabulary]`, logits.
        count: number of tokens.
    """
    logprobs, ids = row.log_softmax(dim=-1).topk(min(count, len(row)))
    return Likeliest(ids.cpu().numpy(), logprobs.cpu().numpy())


def rank(logits: torch.Tensor, counts: Sequence[int]) -> Ranking:
    """Finds the likeliest tokens of each row.

    Args:
        logits: float32 `[rows, vocabulary]`, at least one row; -inf rules out a token.
        counts: number of likeliest tokens wanted for each row.
    """
    normalisers = logits.logsumexp(dim=-1)
    values, ids = logits.topk(min(max(counts), logits.shape[1]), dim=-1)
    return Ranking(logits, normalisers, ids, values - normalisers.unsqueeze(1), counts)
