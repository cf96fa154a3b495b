"""Tables of cosines and sines by position. The tables are computed once, and a forward pass looks up rows.

The rows are equal, bit by bit, to the results of the model's own module. The module itself is called in every pass if
its frequencies depend on the length of a sequence, and for positions beyond `POSITIONS_MAX`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

POSITIONS_MAX = 1 << 14  # rows of a table; both tables take 16 MiB in float32 with heads of 128
_POSITIONS_MIN = 1 << 10
# Rope types of transformers that have the same frequencies in every pass.
STEADY = {"default", "linear", "llama3", "yarn"}


class Turns(NamedTuple):
    """Rotary angles of the tokens of a pass.

    Attributes:
        cosine: `[rows, rotary_dim]`.
        sine: `[rows, rotary_dim]`.
        positions: int64 `[tokens]`, each token's row; None if token i has row i.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    positions: torch.Tensor | None

    @property
    def of_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines for transformers' layers, each `[1, tokens, rotary_dim]`."""
        if self.positions is None:
            return self.cosine[None], self.sine[None]
        return self.cosine[self.positions][None], self.sine[self.positions][None]


class RotaryTables:
    """The tables of one rotary embedding. The tables grow to the largest position so far."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Takes a rotary module of transformers. If the module's `forward` was replaced, it is called in every pass."""
        is_steady = getattr(module, "rope_type", None) in STEADY and "forward" not in vars(module)
        self._module = module
        self._row_count_max = POSITIONS_MAX if is_steady else 0
        self._cosine = self._sine = torch.empty(0, 0)

    def turns(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Turns:
        """Returns the rotary angles of tokens at positions int64 `[1, tokens]`, in the dtype of `hidden`."""
        last = int(position_ids.max())
        if last >= self._row_count_max:
            cosine, sine = self._module(hidden, position_ids=position_ids)
            return Turns(cosine[0], sine[0], None)
        if last >= self._cosine.shape[0] or self._cosine.dtype != hidden.dtype:
            rows = min(max(_POSITIONS_MIN, 1 << last.bit_length()), self._row_count_max)
            cosine, sine = self._module(hidden, position_ids=torch.arange(rows)[None])
            self._cosine, self._sine = cosine[0].contiguous(), sine[0].contiguous()
        return Turns(self._cosine, self._sine, position_ids[0].contiguous())
