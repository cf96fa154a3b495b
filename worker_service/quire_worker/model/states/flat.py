"""Mixers of Mamba 2 on a CPU that has kernels: one call computes a whole flat batch.

Bamba, Falcon-H1, Granite 4 and Nemotron-H have the same forward. The mixer's code stays transformers' own, but two
functions that it calls are replaced: `causal_conv1d_fn` and `mamba2_chunk_scan`. (transformers would load kernels from
a hub for them.) The forward sees all tokens of the pass as one sequence without a state. The two functions know where
each sequence begins, and which state it continues from.

        in_proj | convolution: from each sequence's last inputs | scan: from each sequence's state | norm | out_proj

Like in `generate`, a mixer's limits apply to the time steps of prompt tokens, and not of generated tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from quire_cpu.interface import DTYPES
from quire_cpu.library import Library
from quire_cpu.recurrent import convolve, scan
from torch.nn.functional import softplus

from quire_worker.model.batch import ForwardBatch
from quire_worker.state_pages import StateKey

CONVOLUTION, RECURRENT = StateKey("conv", 0), StateKey("recurrent", 0)


class Flat(NamedTuple):
    """Description of a flat batch's tokens, on the host."""

    starts: torch.Tensor  # int64 [chunks + 1], index of each chunk's first token
    has_limits: torch.Tensor  # bool [tokens], whether limits apply to a token's time step: only for prompt tokens


class FlatStates(Protocol):
    """Source and destination of a pass's states, for all its chunks at once."""

    @property
    def flat(self) -> Flat:
        """Describes the tokens of the pass."""
        ...

    def read_all(self, layer: int, key: StateKey) -> torch.Tensor:
        """Returns one tensor of the states before the chunks, `[chunks, ...]`; zeros where a sequence begins."""
        ...

    def keep_all(self, layer: int, key: StateKey, value: torch.Tensor) -> None:
        """Stores one tensor of the states after the chunks, `[chunks, ...]`."""
        ...


def flat_of(batch: ForwardBatch) -> Flat:
    """Describes the tokens of a batch."""
    start, length, begun_with = batch.spans.to(torch.int64)
    ends = length.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    place = torch.arange(int(ends[-1])) - torch.repeat_interleave(starts[:-1] - start, length)
    of_prompt = place < torch.repeat_interleave(begun_with, length)
    untold = (begun_with == 0) & ((start == 0) | (length > 1))  # the check at load: all tokens are of the prompt
    return Flat(starts, of_prompt | torch.repeat_interleave(untold, length))


class FlatMixer:
    """A mixer's forward for flat batches."""

    def __init__(self, mixer: Any, library: Library) -> None:
        """Copies the forward of the mixer's class, with two functions replaced. `flat_mixer` calls this."""
        forward = _forward_of(mixer)
        names = forward.__globals__ | {"causal_conv1d_fn": self._convolve, "mamba2_chunk_scan": self._scan}
        self._forward = FunctionType(
            forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
        )
        self._forward.__kwdefaults__ = forward.__kwdefaults__
        self._mixer, self._library = mixer, library
        self._states: FlatStates | None = None

    def __call__(self, states: FlatStates, *arguments: Any, **keywords: Any) -> Any:
        """Computes all tokens of a pass. Takes the mixer's arguments, with `NoStates` as the cache."""
        self._states = states
        try:
            return self._forward(self._mixer, *arguments, **keywords)
        finally:
            self._states = None

    def _convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, **_: object
    ) -> torch.Tensor:
        """Replaces `causal_conv1d_fn`: x and the result are `[1, channels, tokens]`."""
        assert self._states is not None
        layer = self._mixer.layer_idx
        columns = self._states.read_all(layer, CONVOLUTION).to(x.dtype).transpose(1, 2).contiguous()
        result = convolve(
            self._library, x[0].T, weight=weight, bias=bias, states=columns, starts=self._states.flat.starts,
            activation=activation,
        )  # fmt: skip
        self._states.keep_all(layer, CONVOLUTION, columns.transpose(1, 2))
        return result.T.unsqueeze(0)

    def _scan(
        self, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
        *, D: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float], **_: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Replaces `mamba2_chunk_scan`: x and the result are `[1, tokens, heads, head_dim]`."""
        assert self._states is not None
        layer, flat = self._mixer.layer_idx, self._states.flat
        steps = softplus(dt[0] + dt_bias.to(dt.dtype))
        if tuple(dt_limit) != (0.0, float("inf")):
            steps = torch.where(flat.has_limits[:, None], steps.clamp(*dt_limit), steps)
        states = self._states.read_all(layer, RECURRENT).float()
        result = scan(
            self._library, x[0], steps=steps, decay=A, b=B[0], c=C[0], skip=D, states=states, starts=flat.starts
        )
        self._states.keep_all(layer, RECURRENT, states)
        return result.unsqueeze(0), None


class NoStates:
    """The cache that a mixer sees in a flat batch: it has no states, and stores none."""

    def get_conv_state(self, layer_idx: int, *_: object, **__: object) -> None:
        """Returns None: there is no state before these tokens."""

    get_recurrent_state = get_conv_state

    def update_recurrent_state(self, recurrent_states: None, layer_idx: int, *_: object, **__: object) -> None:
        """Ignores the call, because `_scan` has stored the states already."""

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *_: object, **__: object) -> torch.Tensor:
        """Returns the inputs unchanged."""
        return conv_states

    def has_previous_state(self, *_: object, **__: object) -> bool:
        """Returns False: there is no state before these tokens."""
        return False


def flat_mixer(mixer: Any, library: Library | None) -> FlatMixer | None:
    """Returns the forward of a Mamba 2 mixer for flat batches; None for other mixers, or without kernels."""
    if library is None or getattr(mixer, "activation", None) != "silu" or not hasattr(mixer, "conv1d"):
        return None
    calls = {"causal_conv1d_fn", "mamba2_chunk_scan"} <= set(_forward_of(mixer).__code__.co_names)
    weight = mixer.conv1d.weight
    fits = weight.shape[-1] == mixer.conv_kernel_size and weight.dtype in DTYPES
    return FlatMixer(mixer, library) if calls and fits else None


def _forward_of(mixer: Any) -> FunctionType:
    forward: Callable[..., Any] = inspect.unwrap(type(mixer).forward)
    assert isinstance(forward, FunctionType)
    return forward
