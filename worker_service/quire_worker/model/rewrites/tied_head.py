"""A vocabulary head whose weights are those of the embedding: packed once, and looked up where they are packed.

Token i's embedding is column i % 64 of panel i // 64. Its words lie 64 words apart, so a look-up touches a cache line
for each of them: little beside the products that follow, and nothing beside a second copy of the vocabulary.
"""

from __future__ import annotations

import math

import torch
from quire_cpu import ops
from quire_cpu.ops import PackedLinear


class PackedEmbedding(torch.nn.Module):
    """The rows of a packed weight.

    `weight` says what the weight was, for models that ask their embedding for its device or dtype (Llama 4): a single
    NaN in its shape, so that one that computes with it does not pass the check of its logits.
    """

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed
        self.weight = torch.full((1, 1), math.nan, dtype=packed.dtype).expand(packed.outputs, packed.inputs)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Takes int64 `[...]` to `[..., inputs]` of the weights' dtype."""
        return ops.embed(self.packed.library, input_ids, self.packed)
