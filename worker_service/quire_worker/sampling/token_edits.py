"""Changes to single logits of a sample: biases, penalties, and tokens that are ruled out.

    x = logit + bias                                       bias is -inf if the token is banned
    x = x / repetition_penalty if x > 0, else x * it       if the token is in the prompt or the text so far
    x = x - frequency_penalty * count - presence_penalty   if the token is in the text, `count` times

The order is vLLM's, and transformers' where it has the same steps. Only tokens that are biased or occurred before have
an entry, so the cost of a step depends on the number of entries and not on the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire_worker.sampling.params import SamplingParams


class EditColumns(NamedTuple):
    """Entries of one or several rows of logits, as columns: each column has one value per entry."""

    token: np.ndarray  # int64
    bias: np.ndarray  # float32; -inf rules the token out
    factor: np.ndarray  # float32; repetition penalty, 1 if the token did not occur
    subtrahend: np.ndarray  # float32; frequency and presence penalties


class TokenEdits:
    """The entries of one sample. `take` updates them with each token."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], stop_token_ids: Iterable[int]) -> None:
        """Creates the entries of a sample that has only its prompt.

        Args:
            params: the request's parameters, valid.
            prompt: the prompt's tokens.
            stop_token_ids: all tokens that end the sample; they are ruled out before `min_tokens`.
        """
        self._params = params
        self._stop_token_ids = np.array(sorted(set(stop_token_ids)) if params.min_tokens else [], dtype=np.int64)
        self._output_count = 0
        self._words = params.bad_word_ids
        self._recent: tuple[int, ...] = ()  # the text's last tokens; long enough for the longest bad word
        self._recent_max = max((len(word) for word in self._words), default=1) - 1
        self._is_shared = False
        biases = {**params.logit_bias, **dict.fromkeys(params.banned_token_ids, -np.inf)}
        seen = set(prompt) if params.repetition_penalty != 1 else set()
        tokens = [*biases, *(seen - biases.keys())]
        self._size, self._place = len(tokens), {token: place for place, token in enumerate(tokens)}
        self._token = np.array(tokens, dtype=np.int64)
        self._bias = np.array([biases.get(token, 0.0) for token in tokens], dtype=np.float32)
        self._is_seen = np.array([token in seen for token in tokens], dtype=bool)
        self._count = np.zeros(len(tokens), dtype=np.float32)

    @staticmethod
    def are_needed(params: SamplingParams) -> bool:
        """Returns whether a request changes any single logit."""
        return bool(
            params.has_penalties
            or params.logit_bias
            or params.banned_token_ids
            or params.min_tokens
            or params.bad_word_ids
        )

    def take(self, token: int) -> None:
        """Counts a token of the text."""
        self._output_count += 1
        if self._recent_max:
            self._recent = (*self._recent, token)[-self._recent_max :]
        if not self._params.has_penalties:
            return
        if self._is_shared:
            self._is_shared, self._place = False, dict(self._place)
            self._token, self._bias = self._token.copy(), self._bias.copy()
            self._is_seen, self._count = self._is_seen.copy(), self._count.copy()
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._size
            self._make_room()
            self._token[place] = token
            self._size += 1
        self._is_seen[place] = True
        self._count[place] += 1

    def columns(self) -> EditColumns:
        """Returns the entries as they are now."""
        params, size = self._params, self._size
        count = self._count[:size]
        factor = np.where(self._is_seen[:size], np.float32(params.repetition_penalty), np.float32(1))
        subtrahend = count * np.float32(params.frequency_penalty) + (count > 0) * np.float32(params.presence_penalty)
        columns = EditColumns(self._token[:size], self._bias[:size], factor, subtrahend.astype(np.float32))
        if self._output_count < params.min_tokens:
            columns = _without(columns, self._stop_token_ids)
        ended = {word[-1] for word in self._words if word[:-1] == self._recent[len(self._recent) - len(word) + 1 :]}
        return _without(columns, np.array(sorted(ended), dtype=np.int64)) if ended else columns

    def copy(self) -> TokenEdits:
        """Returns a copy for another sample that continues from here."""
        self._is_shared = True  # The samples share their arrays until one of them counts a token. Most never do.
        twin = object.__new__(TokenEdits)
        twin.__dict__.update(self.__dict__)
        return twin

    def _make_room(self) -> None:
        if self._size < len(self._token):
            return
        more = max(16, self._size)
        for name in ("_token", "_bias", "_is_seen", "_count"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros(more, dtype=old.dtype))))


def _without(columns: EditColumns, tokens: np.ndarray) -> EditColumns:
    """Rules out tokens, int64 `[tokens]`. Other entries of these tokens are dropped, because they would overwrite the
    -inf.
    """
    others = ~np.isin(columns.token, tokens)
    ruled_out = EditColumns(
        tokens,
        np.full(len(tokens), -np.inf, dtype=np.float32),
        np.ones(len(tokens), dtype=np.float32),
        np.zeros(len(tokens), dtype=np.float32),
    )
    return EditColumns(*(np.concatenate((old[others], new)) for old, new in zip(columns, ruled_out, strict=True)))


def apply_edits(logits: torch.Tensor, edits: Sequence[tuple[int, TokenEdits]]) -> None:
    """Applies the entries of several samples to their rows of logits, all at once.

    Args:
        logits: float32 `[rows, vocabulary]`, contiguous; written in place.
        edits: pairs of a row and its sample's entries.
    """
    columns = [each.columns() for _, each in edits]
    rows = np.repeat([row for row, _ in edits], [len(each.token) for each in columns])
    token, bias, factor, subtrahend = (
        torch.from_numpy(np.concatenate(parts)).to(logits.device) for parts in zip(*columns, strict=True)
    )
    places = torch.from_numpy(rows.astype(np.int64)).to(logits.device) * logits.shape[1] + token
    flat = logits.view(-1)
    x = flat[places] + bias
    x = torch.where(x > 0, x / factor, x * factor)
    flat[places] = x - subtrahend
