"""Recurrent layers on a flat batch: the input of a mixer is cut into segments, and goes through it one by one.

A mixer is the module of a layer that gets the cache and asks it for states. Most mixers call that argument
`cache_params`, some `past_key_values` (LFM2, MiniMax). The mixer's `forward` is replaced by one that cuts the batch;
the weights stay in place. Without Quire's cache view, as when a model computes its own logits, the mixer works as
before.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from quire_cpu.library import Library

from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.states.continuations import CONTINUATIONS, has_limits, renew_decays, within_limits
from quire_worker.model.states.flat import NoStates, flat_mixer
from quire_worker.model.states.state_pass import StatePass, States, StateSegment
from quire_worker.model.states.view import SegmentView

_CACHE_NAMES = ("cache_params", "past_key_values")


class CacheView:
    """The cache that a model sees outside of mixers. This cache has no states.

    Attributes:
        states: states of the pass; None if the model has none.
    """

    def __init__(self, states: States | None) -> None:
        """Keeps the states of one forward pass."""
        self.states = states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: no earlier states are recorded."""
        return False

    def get_conv_state(self, layer_idx: int, *_: object, **__: object) -> torch.Tensor:
        """Refuses the call: only mixers that Quire does not support make this call.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(f"layer {layer_idx} keeps a state that its configuration does not mention")

    get_recurrent_state = update_recurrent_state = get_linear_cache = set_linear_cache = get_conv_state

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *_: object, **__: object) -> torch.Tensor:
        """Refuses the call, like `get_conv_state`.

        Raises:
            UnsupportedModelError: always.
        """
        return self.get_conv_state(layer_idx)


def wrap_mixers(module: torch.nn.Module, layers: Collection[int], library: Library | None = None) -> None:
    """Makes every mixer of a model take flat batches.

    Args:
        module: a model of transformers.
        layers: the layers that keep states.
        library: the CPU's kernels; None to compute without them.

    Raises:
        UnsupportedModelError: a layer has no mixer, or several.
    """
    for layer in sorted(layers):
        found = _mixers_of(module, layer)
        if len(found) != 1:
            what = ", ".join(type(mixer).__name__ for mixer in found) or "no module that takes a cache"
            raise UnsupportedModelError(
                f"layer {layer} keeps a recurrent state, so it must have exactly one module that takes a cache, "
                f"not {what}"
            )
        _wrap(found[0], library)


def _mixers_of(module: torch.nn.Module, layer: int) -> list[torch.nn.Module]:
    """Returns the innermost modules of a layer that take a cache, by the first of the names that any module has."""
    own = [part for part in module.modules() if getattr(part, "layer_idx", None) == layer]
    for name in _CACHE_NAMES:
        found = [part for part in own if name in inspect.signature(part.forward).parameters]
        innermost = [part for part in found if not any(child in found for child in part.modules() if child is not part)]
        if innermost:
            return innermost
    return []


def _wrap(mixer: torch.nn.Module, library: Library | None) -> None:
    if hasattr(mixer, "decay_factors"):
        renew_decays(mixer)
    inner = mixer.forward
    go_on = CONTINUATIONS.get(type(mixer).__name__)
    is_limited = has_limits(mixer)
    flat = flat_mixer(mixer, library)

    def forward(*arguments: Any, **keywords: Any) -> Any:
        states = _states_in([*arguments, *keywords.values()])
        if states is None:
            return inner(*arguments, **keywords)
        keywords.pop("quire_step", None)
        if flat is not None and isinstance(states, StatePass):
            return flat(
                states,
                *(_without_states(value) for value in arguments),
                **{name: _without_states(value) for name, value in keywords.items()},
            )
        results = []
        for segment in states.segments:
            view = SegmentView(states, segment)
            compute = inner
            if isinstance(segment.tokens, slice):
                if go_on is not None and segment.is_begun:
                    compute = partial(go_on, mixer)
            elif is_limited and segment.is_prompt:
                compute = partial(within_limits, mixer, inner)
            taken = [_take(argument, segment, view) for argument in arguments]
            named = {name: _take(value, segment, view) for name, value in keywords.items()}
            with states.narrowed(segment):
                results.append(compute(*taken, **named))
            view.finish()
        return _joined(states.segments, results)

    mixer.forward = forward


def _states_in(values: list[Any]) -> States | None:
    return next((value.states for value in values if isinstance(value, CacheView)), None)


def _without_states(value: Any) -> Any:
    return NoStates() if isinstance(value, CacheView) else value


def _take(value: Any, segment: StateSegment, view: SegmentView) -> Any:
    """Returns a segment's part of a mixer's argument. An argument without a dimension of tokens stays unchanged."""
    if isinstance(value, CacheView):
        return view
    if isinstance(value, tuple):
        return tuple(_take(each, segment, view) for each in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[0] != 1:
        return value
    return value[:, segment.tokens] if isinstance(segment.tokens, slice) else value[0, segment.tokens].unsqueeze(1)


def _joined(segments: list[StateSegment], results: list[Any]) -> Any:
    """Joins the segments' results, `[sequences, tokens, hidden]`, in the flat batch's order: `[1, all tokens, hidden]`.

    If a mixer returns a tuple, its further items are states. The states become None, because no caller reads them.
    """
    firsts = [result[0] if isinstance(result, tuple) else result for result in results]
    token_count = sum(first.shape[0] * first.shape[1] for first in firsts)
    joined = firsts[0].new_empty(1, token_count, *firsts[0].shape[2:])
    for segment, first in zip(segments, firsts, strict=True):
        joined[0, segment.tokens] = first.reshape(-1, *first.shape[2:])
    return (joined, *[None] * (len(results[0]) - 1)) if isinstance(results[0], tuple) else joined
