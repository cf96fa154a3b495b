"""The states of one forward pass: the tokens that go through a mixer together, and their states.

Most recurrent layers cannot take a flat batch, because they would continue from one sequence into the next (`flat` has
the exceptions). So a pass is cut into segments. Each segment goes through a mixer as its own batch:

    chunks      A: 3 tokens from position 0     B: 1 token at 40     C: 1 token at 16     D: 2 tokens from 8
    segments    B and C as [2, 1, hidden]; A as [1, 3, hidden], which has no state before it; D as [1, 2, hidden]

Prompt chunks of one token and generated tokens are in different segments, because some mixers treat them differently.

New states are written to the pages at the end of the pass. So a pass that fails midway changes no state, and can be
computed again in parts.
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


class StateSegment(NamedTuple):
    """Tokens that go through a mixer together.

    Attributes:
        tokens: indices in the flat batch: a slice with all tokens of one chunk, or int64 `[sequences]` with the single
            token of several chunks.
        chunks: int64 `[sequences]`, the chunks' numbers.
        is_begun: whether their sequences have earlier tokens.
        is_prompt: True if these tokens belong to prompts, False if they were generated.
    """

    tokens: slice | torch.Tensor
    chunks: torch.Tensor
    is_begun: bool
    is_prompt: bool = True


class States(Protocol):
    """Source and destination of a pass's states."""

    @property
    def segments(self) -> list[StateSegment]:
        """Returns the pass's segments. The tokens of a segment go through a mixer together."""
        ...

    def read(self, layer: int, key: StateKey, segment: StateSegment) -> torch.Tensor:
        """Returns one tensor of the states before a segment's tokens, `[sequences, ...]`.

        The segment must continue sequences that have states.
        """
        ...

    def keep(self, layer: int, key: StateKey, segment: StateSegment, value: torch.Tensor) -> None:
        """Stores one tensor of the states after a segment's tokens, `[sequences, ...]`."""
        ...

    def narrowed(self, segment: StateSegment) -> AbstractContextManager[None]:
        """Returns a context for the call of a mixer with these tokens. The mixer's adapters see only these tokens."""
        ...


class StatePass:
    """The states of a pass, read from pages and written to them."""

    def __init__(self, layers: Mapping[int, LayerState], batch: ForwardBatch, sites: Sites | None = None) -> None:
        """Begins a pass over a batch that is on its device; `sites` are the model's sites of adapters."""
        self._batch = batch
        self._layers = layers
        self._sites = sites
        self._blocks = batch.state_blocks
        self._kept: list[tuple[LayerState, StateKey, torch.Tensor, torch.Tensor]] = []

    @cached_property
    def segments(self) -> list[StateSegment]:
        """Returns the pass's segments. The tokens of a segment go through a mixer together."""
        return segments_of(self._batch)

    @cached_property
    def flat(self) -> Flat:
        """Describes the tokens for mixers that take all tokens at once."""
        return flat_of(self._batch)

    @cached_property
    def _beginning(self) -> torch.Tensor:
        """Returns the chunks that have no state before them, int64."""
        return (self._batch.spans[0] == 0).nonzero()[:, 0].to(self._blocks.device)

    def read_all(self, layer: int, key: StateKey) -> torch.Tensor:
        """Returns one tensor of the states of all chunks: from their pages, or zeros where a sequence begins."""
        found = self._layers[layer].read(key, self._blocks)
        return found if len(self._beginning) == 0 else found.index_fill_(0, self._beginning, 0)

    def keep_all(self, layer: int, key: StateKey, value: torch.Tensor) -> None:
        """Keeps a tensor of all chunks until the end of the pass. The caller must not change the tensor afterwards."""
        self._kept.append((self._layers[layer], key, self._blocks, value))

    def read(self, layer: int, key: StateKey, segment: StateSegment) -> torch.Tensor:
        """Returns one tensor of the states in the pages of the segment's chunks."""
        return self._layers[layer].read(key, self._blocks[:, segment.chunks])

    def keep(self, layer: int, key: StateKey, segment: StateSegment, value: torch.Tensor) -> None:
        """Keeps a tensor until the end of the pass. Copies a part of a larger tensor, so that the rest can be freed."""
        value = value.to(self._layers[layer].tensors[key].dtype)
        is_part = value.untyped_storage().nbytes() > value.nbytes
        blocks = self._blocks[:, segment.chunks]
        self._kept.append((self._layers[layer], key, blocks, value.clone() if is_part else value))

    def narrowed(self, segment: StateSegment) -> AbstractContextManager[None]:
        """Returns a context in which adapters see only the segment's tokens."""
        return nullcontext() if self._sites is None else self._sites.narrowed(segment.tokens)

    def finish(self) -> None:
        """Writes all kept states to their pages."""
        for layer, key, blocks, value in self._kept:
            layer.write(key, blocks, value)
        self._kept.clear()


class StateProbe:
    """The states of a model's first pass. The object records which tensors each layer stores."""

    def __init__(self, batch: ForwardBatch) -> None:
        """Begins the pass. All chunks of the batch must begin a sequence."""
        self.segments = segments_of(batch)
        self.arrivals: dict[int, dict[StateKey, StateTensor]] = {}

    def read(self, layer: int, key: StateKey, segment: StateSegment) -> torch.Tensor:
        """Must not be called, because all sequences begin in this pass."""
        raise AssertionError("a probe has no state to read")

    def keep(self, layer: int, key: StateKey, segment: StateSegment, value: torch.Tensor) -> None:
        """Records a tensor's shape and dtype."""
        self.arrivals.setdefault(layer, {})[key] = StateTensor(key, tuple(value.shape[1:]), value.dtype)

    def narrowed(self, segment: StateSegment) -> AbstractContextManager[None]:
        """Returns an empty context, because the first pass has no adapters."""
        return nullcontext()

    def finish(self) -> None:
        """Ends the pass without storing any state."""


def segments_of(batch: ForwardBatch) -> list[StateSegment]:
    """Cuts a batch into segments. The tokens of a segment go through a mixer together."""
    device = batch.input_ids.device
    segments, place = [], 0
    single: dict[bool, list[tuple[int, int]]] = {}
    for chunk, (start, length, begun_with) in enumerate(batch.spans.T.tolist()):
        if start > 0 and length == 1:
            single.setdefault(start < begun_with, []).append((place, chunk))
        else:
            segments.append(StateSegment(slice(place, place + length), torch.tensor([chunk], device=device), start > 0))
        place += length
    for is_prompt, places in single.items():
        tokens, chunks = torch.tensor(places, device=device).T
        segments.append(StateSegment(tokens, chunks, is_begun=True, is_prompt=is_prompt))
    return segments
