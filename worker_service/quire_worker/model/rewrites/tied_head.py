"""A vocabulary head that shares its weight with the embedding. Head and embedding use one packed weight.

Token i's embedding is column i % 64 of panel i // 64. Consecutive words of an embedding lie 64 words apart, so a
look-up touches one cache line per word. Such look-ups are cheap compared with the products that follow, and save a
second copy of the vocabulary.
"""

from __future__ import annotations

import torch
from quire_cpu import ops
from quire_cpu.ops import PackedLinear

from quire_worker.model.rewrites.interface import stand_in


class PackedEmbedding(torch.nn.Module):
    """An embedding that reads the rows of a packed weight."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed
        self.weight = stand_in(packed)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of int64 ids `[...]`: `[..., inputs]` in the weight's dtype."""
        return ops.embed(self.packed.library, input_ids, self.packed)
