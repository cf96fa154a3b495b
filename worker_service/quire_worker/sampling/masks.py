"""Masks of the tokens that a row may choose from: token t is bit t % 32 of word t // 32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from quire_worker.sampling.words import word_count


def pack(tokens: Iterable[int], vocabulary: int) -> np.ndarray:
    """Returns the mask of these tokens, int32 `[words]`."""
    bits = np.zeros(word_count(vocabulary) * 32, dtype=np.uint8)
    bits[np.fromiter(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def contains(words: np.ndarray, token: int) -> bool:
    """Returns whether the bit of a token is set in int32 `[words]`."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def apply_masks(logits: torch.Tensor, rows: Sequence[int], words: np.ndarray) -> None:
    """Sets the logits of tokens that a mask forbids to -inf.

    Args:
        logits: float32 `[rows, vocabulary]`; written in place.
        rows: the rows that have a mask, rising.
        words: int32 `[masks, words]`, one mask for each of these rows.
    """
    vocabulary = logits.shape[1]
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocabulary]  # [masks, vocabulary]
    is_out = torch.from_numpy(bits == 0).to(logits.device)
    if len(rows) == len(logits):  # `rows` has all rows, in order
        logits.masked_fill_(is_out, float("-inf"))
        return
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(is_out, float("-inf"))
