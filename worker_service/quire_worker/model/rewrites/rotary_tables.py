"""Cosines and sines by position, computed once: a forward pass looks up rows instead of computing them again.

The rows are what the model's own module gives for these positions, bit by bit. A module whose frequencies follow the
length of a sequence is asked in every pass, and so is any for positions beyond `POSITIONS_MAX`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

POSITIONS_MAX = 1 << 14  # of a table: 16 MiB of float32 for heads of 128
_POSITIONS_MIN = 1 << 10
# The kinds whose frequencies are the same for every pass, as transformers names them.
STEADY = {"default", "linear", "llama3", "yarn"}


class Turns(NamedTuple):
    """Rotary angles of the tokens of a pass.

    Attributes:
        cosine: `[rows, rotary_dim]`.
        sine: the same.
        positions: int64 `[tokens]`, each token's row; None where token i has row i.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    positions: torch.Tensor | None

    @property
    def of_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both as transformers' layers take them, `[1, tokens, rotary_dim]`."""
        if self.positions is None:
            return self.cosine[None], self.sine[None]
        return self.cosine[self.positions][None], self.sine[self.positions][None]


class RotaryTables:
    """The tables of one rotary embedding; they grow to the largest position that was asked for."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Takes a module of transformers' kind; where its `forward` was replaced, it is asked in every pass."""
        is_steady = getattr(module, "rope_type", None) in STEADY and "forward" not in vars(module)
        self._module = module
        self._row_count_max = POSITIONS_MAX if is_steady else 0
        self._cosine = self._sine = torch.empty(0, 0)

    def turns(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Turns:
        """Returns how tokens at int64 `[1, tokens]` are turned; `hidden` has the dtype of the tables."""
        last = int(position_ids.max())
        if last >= self._row_count_max:
            cosine, sine = self._module(hidden, position_ids=position_ids)
            return Turns(cosine[0], sine[0], None)
        if last >= self._cosine.shape[0] or self._cosine.dtype != hidden.dtype:
            rows = min(max(_POSITIONS_MIN, 1 << last.bit_length()), self._row_count_max)
            cosine, sine = self._module(hidden, position_ids=torch.arange(rows)[None])
            self._cosine, self._sine = cosine[0].contiguous(), sine[0].contiguous()
        return Turns(self._cosine, self._sine, position_ids[0].contiguous())
