"""Which tokens a row may choose from, as bits: token t is bit t % 32 of word t // 32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from quire_worker.sampling.words import word_count


def pack(tokens: Iterable[int], vocabulary: int) -> np.ndarray:
    """Returns int32 `[words]` with the bits of these tokens."""
    bits = np.zeros(word_count(vocabulary) * 32, dtype=np.uint8)
    bits[np.fromiter(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def contains(words: np.ndarray, token: int) -> bool:
    """Tells whether the bit of a token is set in int32 `[words]`."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def apply_masks(logits: torch.Tensor, rows: Sequence[int], words: np.ndarray) -> None:
    """Rules out the tokens whose bits are not set, in all rows at once.

    Args:
        logits: float32 `[rows, vocabulary]`; written in place.
        rows: those that have a mask.
        words: int32 `[masks, words]`, of each of them.
    """
    vocabulary = logits.shape[1]
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocabulary]  # [masks, vocabulary]
    is_out = torch.from_numpy(bits == 0).to(logits.device)
    if len(rows) == len(logits):  # all of them, in order
        logits.masked_fill_(is_out, float("-inf"))
        return
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill(is_out, float("-inf"))
