"""The cache that a recurrent layer sees: transformers' interface to the states of one segment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from quire_worker.model.states.state_pass import States, StateSegment
from quire_worker.state_pages import StateKey

T = TypeVar("T")


class ByNumber(Generic[T]):
    """A sequence that reads an item when it is indexed."""

    def __init__(self, read: Callable[[int], T]) -> None:
        """Takes the function that reads an item."""
        self._read = read

    def __getitem__(self, number: int) -> T:
        return self._read(number)


class LayerView(NamedTuple):
    """A layer of the cache, for transformers before 5.21, which reads these attributes.

    Attributes:
        conv_states: the last inputs of its convolutions.
        recurrent_states: its recurrent states.
        record_past: whether earlier states are recorded.
    """

    conv_states: ByNumber[torch.Tensor | None]
    recurrent_states: ByNumber[torch.Tensor | None]
    record_past: bool = False


class SegmentView:
    """The cache of one segment, for one call of a mixer.

    Kernels for one token overwrite the tensors that they read, so `finish` stores every tensor that was read, too.
    """

    def __init__(self, states: States, segment: StateSegment) -> None:
        """Takes the segment. A state is read when the mixer asks for it."""
        self._states = states
        self._segment = segment
        self._tensors: dict[tuple[int, StateKey], torch.Tensor] = {}

    @property
    def layers(self) -> ByNumber[LayerView]:
        """Returns the layers; each gives its states: `view.layers[3].conv_states[0]`."""
        return ByNumber(
            lambda layer: LayerView(
                ByNumber(partial(self.get_conv_state, layer)), ByNumber(partial(self.get_recurrent_state, layer))
            )
        )

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Returns the last inputs of a convolution, `[sequences, channels, columns]`; None if the sequence has none."""
        return self._get(layer_idx, StateKey("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Returns the recurrent state; None if there is none."""
        return self._get(layer_idx, StateKey("recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Returns the recurrent state, under the name that MiniMax uses."""
        return self.get_recurrent_state(layer_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Stores new inputs `[sequences, channels, tokens]`, and returns them appended to the earlier inputs.

        At the beginning of a sequence, zeros pad them on the left to `conv_kernel_size`.
        """
        key = StateKey("conv", state_idx)
        past = self._get(layer_idx, key)
        if past is not None:
            columns, both = past.shape[-1], torch.cat([past, conv_states], dim=-1)
        else:
            columns = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            both = torch.nn.functional.pad(conv_states, (max(columns - conv_states.shape[-1], 0), 0))
        self._tensors[layer_idx, key] = both[..., -columns:]
        return both

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Stores the state after these tokens."""
        self._tensors[layer_idx, StateKey("recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Stores the recurrent state, under the name that MiniMax uses."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns whether the segment's sequences have earlier tokens."""
        return self._segment.is_begun

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: no earlier states are recorded."""
        return False

    def finish(self) -> None:
        """Stores the states as they are after the call."""
        for (layer, key), tensor in self._tensors.items():
            self._states.keep(layer, key, self._segment, tensor)

    def _get(self, layer: int, key: StateKey) -> torch.Tensor | None:
        if self._segment.is_begun and (layer, key) not in self._tensors:
            self._tensors[layer, key] = self._states.read(layer, key, self._segment)
        return self._tensors.get((layer, key))
