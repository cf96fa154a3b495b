"""An adapter's tensors, and the tokens of a pass that use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """The change of one linear layer: `up @ down`, the scale in `up`."""

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One that is loaded. What it holds never changes; loaded again under the same name it is another.

    Attributes:
        digest: 32 bytes that stand for its weights and configuration, part of every digest of a prefix.
        rank: largest of its factors.
        factors: by the layer's name in the model; float32, on the model's device.
    """

    name: str
    digest: bytes
    rank: int
    factors: Mapping[str, Factors] = field(repr=False)

    @property
    def byte_count(self) -> int:
        """Counts the bytes of its factors."""
        return sum(part.nbytes for factors in self.factors.values() for part in factors)


class Segment(NamedTuple):
    """The tokens of a pass that belong to requests with one adapter."""

    adapter: Adapter
    tokens: torch.Tensor  # int64 [tokens of it], rising indices in the flat batch
