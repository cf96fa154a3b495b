"""The states of one forward pass: which tokens go through a mixer together, and where their states are kept.

Most recurrent layers cannot take a flat batch (`flat` has those that can): they would run on from one sequence into the
next. So a pass is cut into segments. Each goes through a mixer as a batch of its own:

    chunks      A: 3 tokens from position 0     B: 1 token at 40     C: 1 token at 16     D: 2 tokens from 8
    segments    B and C as [2, 1, hidden]; A as [1, 3, hidden], which has no state before it; D as [1, 2, hidden]

Prompt chunks of one token and generated tokens are in different segments: some mixers compute the latter differently.

New states are written to the pages when the pass has ended. So a pass that fails midway changes no state, and can be
computed again, in parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from quire_worker.model.adapters.sites import Sites
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.states.flat import Flat, flat_of
from quire_worker.state_pages import LayerState, StateKey, StateTensor


class Segment(NamedTuple):
    """Tokens that go through a mixer together.

    Attributes:
        tokens: of the flat batch: those of one chunk, or one of each chunk, int64 `[sequences]`.
        chunks: int64 `[sequences]`.
        is_begun: whether there are tokens before these.
        is_prompt: whether requests began with them, and did not generate them.
    """

    tokens: slice | torch.Tensor
    chunks: torch.Tensor
    is_begun: bool
    is_prompt: bool = True


class States(Protocol):
    """Source and destination of a pass's states."""

    @property
    def segments(self) -> list[Segment]:
        """Returns the pass's segments. The tokens of a segment go through a mixer together."""
        ...

    def read(self, layer: int, key: StateKey, segment: Segment) -> torch.Tensor:
        """Returns a tensor of the states before the tokens of a segment, `[sequences, ...]`. The segment must continue
        sequences that have states."""
        ...

    def keep(self, layer: int, key: StateKey, segment: Segment, value: torch.Tensor) -> None:
        """Takes the tensor of the states after these tokens, `[sequences, ...]`."""
        ...

    def narrowed(self, segment: Segment) -> AbstractContextManager[None]:
        """Surrounds the call of a mixer with these tokens, for code that changes the results of layers inside of it."""
        ...


class StatePass:
    """States that lie in pages."""

    def __init__(self, layers: Mapping[int, LayerState], batch: ForwardBatch, sites: Sites | None = None) -> None:
        """Begins a pass over a batch that is on its device; `sites` are those of adapters in the model."""
        self._batch = batch
        self._layers = layers
        self._sites = sites
        self._blocks = batch.state_blocks
        self._kept: list[tuple[LayerState, StateKey, torch.Tensor, torch.Tensor]] = []

    @cached_property
    def segments(self) -> list[Segment]:
        """Returns the pass's segments. The tokens of a segment go through a mixer together."""
        return segments_of(self._batch)

    @cached_property
    def flat(self) -> Flat:
        """Describes the tokens for mixers that take all of them at once."""
        return flat_of(self._batch)

    @cached_property
    def _beginning(self) -> torch.Tensor:
        """Returns the chunks that have no state before them, int64."""
        return (self._batch.spans[0] == 0).nonzero()[:, 0].to(self._blocks.device)

    def read_all(self, layer: int, key: StateKey) -> torch.Tensor:
        """Returns what the pages of all chunks hold, and zeros of those that begin."""
        found = self._layers[layer].read(key, self._blocks)
        return found if len(self._beginning) == 0 else found.index_fill_(0, self._beginning, 0)

    def keep_all(self, layer: int, key: StateKey, value: torch.Tensor) -> None:
        """Notes a tensor that nobody else has until the pass ends."""
        self._kept.append((self._layers[layer], key, self._blocks, value))

    def read(self, layer: int, key: StateKey, segment: Segment) -> torch.Tensor:
        """Returns what the pages of the segment's chunks hold."""
        return self._layers[layer].read(key, self._blocks[:, segment.chunks])

    def keep(self, layer: int, key: StateKey, segment: Segment, value: torch.Tensor) -> None:
        """Notes it until the pass ends. A part of a larger tensor is copied, so that the larger one is let go."""
        value = value.to(self._layers[layer].tensors[key].dtype)
        is_part = value.untyped_storage().nbytes() > value.nbytes
        blocks = self._blocks[:, segment.chunks]
        self._kept.append((self._layers[layer], key, blocks, value.clone() if is_part else value))

    def narrowed(self, segment: Segment) -> AbstractContextManager[None]:
        """Lets adapters change what these tokens give, while their mixer is called."""
        return nullcontext() if self._sites is None else self._sites.narrowed(segment.tokens)

    def finish(self) -> None:
        """Writes everything that was kept to its pages."""
        for layer, key, blocks, value in self._kept:
            layer.write(key, blocks, value)
        self._kept.clear()


class StateProbe:
    """States of a first pass, over sequences that begin: notes which tensors each layer keeps."""

    def __init__(self, batch: ForwardBatch) -> None:
        """Begins a pass that notes."""
        self.segments = segments_of(batch)
        self.arrivals: dict[int, dict[StateKey, StateTensor]] = {}

    def read(self, layer: int, key: StateKey, segment: Segment) -> torch.Tensor:
        """Never called, since no sequence is begun."""
        raise AssertionError("a probe has no state to read")

    def keep(self, layer: int, key: StateKey, segment: Segment, value: torch.Tensor) -> None:
        """Notes shape and dtype."""
        self.arrivals.setdefault(layer, {})[key] = StateTensor(key, tuple(value.shape[1:]), value.dtype)

    def narrowed(self, segment: Segment) -> AbstractContextManager[None]:
        """Changes nothing: a first pass has no adapters."""
        return nullcontext()

    def finish(self) -> None:
        """Ends the pass; nothing of it is kept."""


def segments_of(batch: ForwardBatch) -> list[Segment]:
    """Cuts a batch into segments. The tokens of a segment go through a mixer together."""
    device = batch.input_ids.device
    segments, place = [], 0
    single: dict[bool, list[tuple[int, int]]] = {}
    for chunk, (start, length, begun_with) in enumerate(batch.spans.T.tolist()):
        if start > 0 and length == 1:
            single.setdefault(start < begun_with, []).append((place, chunk))
        else:
            segments.append(Segment(slice(place, place + length), torch.tensor([chunk], device=device), start > 0))
        place += length
    for is_prompt, places in single.items():
        tokens, chunks = torch.tensor(places, device=device).T
        segments.append(Segment(tokens, chunks, is_begun=True, is_prompt=is_prompt))
    return segments
