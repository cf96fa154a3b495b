"""A vocabulary head whose weights are those of the embedding: packed once, and looked up where they are packed.

Token i's embedding is column i % 64 of panel i // 64. Its words lie 64 words apart, so a look-up touches a cache line
for each of them: little beside the products that follow, and nothing beside a second copy of the vocabulary.
"""

from __future__ import annotations

import torch
from quire_cpu import ops
from quire_cpu.ops import PackedLinear

from quire_worker.model.rewrites.interface import stand_in


class PackedEmbedding(torch.nn.Module):
    """The rows of a packed weight."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed
        self.weight = stand_in(packed)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Takes int64 `[...]` to `[..., inputs]` of the weights' dtype."""
        return ops.embed(self.packed.library, input_ids, self.packed)
