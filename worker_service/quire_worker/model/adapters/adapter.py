"""An adapter's tensors, and the tokens of a pass that use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """The change of one linear layer's weight: `up @ down`. `up` includes the scale."""

    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. An adapter never changes. Loading it again under the same name makes a new object.

    Attributes:
        digest: 32 bytes that identify its weights and configuration; part of every digest of a prefix.
        rank: the largest rank among its factors.
        factors: its factors by the layer's name in the model; float32, on the model's device.
    """

    name: str
    digest: bytes
    rank: int
    factors: Mapping[str, Factors] = field(repr=False)

    @property
    def byte_count(self) -> int:
        """Counts the bytes of the adapter's factors."""
        return sum(part.nbytes for factors in self.factors.values() for part in factors)


class Segment(NamedTuple):
    """The tokens of a pass that belong to requests with one adapter."""

    adapter: Adapter
    tokens: torch.Tensor  # int64 [tokens with this adapter], rising indices in the flat batch
