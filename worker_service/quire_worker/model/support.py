"""Checks whether a model can be served from pages.

There are three checks. The first reads the configuration before any weights are read: it finds each layer's cache
(`quire.planning`), and refuses by name the parts that are known not to work. The second compares the input of each
layer's attention in the first pass with the configuration. The third checks every call of attention and refuses an
option that is not implemented: ignoring the option would give wrong text without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from quire.planning import ConfigError, LayerSpec, read_config
from quire.types import GroupKind

from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.state_pages import StateKey, StateTensor, in_order

# Models pass these options, but attention over pages does not need them: queries and keys are rotated already.
_MEANINGLESS_OPTIONS = frozenset({"position_ids", "cache_position"})

# Model types whose attention chunks are known to begin at multiples of `attention_chunk_size`. The first pass cannot
# check these beginnings, because the model does not pass its chunks to attention.
_CHUNKED_TYPES = frozenset({"llama4_text"})

# Configuration entries that show that a model keeps a state in addition to keys and values.
_STATE_ENTRIES = ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_key_heads")

# Model types that cannot be served although their configuration does not show it, each with the reason.
_UNLIKE_OTHERS = {
    "zamba": "its attention layers share one block of weights and one layer index",
    "zamba2": "its attention layers share one block of weights and one layer index",
}


class Arrival(NamedTuple):
    """Input of one layer's attention in the first pass."""

    key: torch.Tensor  # [tokens, kv_heads, head_dim]
    latent_dim: int | None  # for latent attention, the number of leading key elements that are also the value
    sliding_window: int | None  # tokens that a query sees, including itself


def layers_of(config: Any, *, block_size: int) -> tuple[LayerSpec, ...]:
    """Reads each layer's cache from the configuration, and refuses models that cannot be served.

    Args:
        config: transformers' configuration.
        block_size: tokens per block.

    Raises:
        UnsupportedModelError: the model cannot be served; the message names its type and the reason.
    """
    text_config = config.get_text_config()
    for reason_of in _REASONS:
        reason = reason_of(text_config) or reason_of(config)
        if reason is not None:
            raise UnsupportedModelError(f"model type {config.model_type!r} cannot be served: {reason}")
    try:
        layers = read_config(text_config.to_dict()).layers
    except ConfigError as error:
        raise UnsupportedModelError(f"model type {config.model_type!r} cannot be served: {error}") from error
    reason = _untold_state(text_config, layers)
    if reason is not None:
        raise UnsupportedModelError(f"model type {config.model_type!r} cannot be served: {reason}")
    if all(layer.kind is GroupKind.STATE for layer in layers):
        raise UnsupportedModelError(
            f"model type {config.model_type!r} cannot be served: all of its layers keep recurrent states, and none "
            "has attention"
        )
    for layer in layers:
        if layer.kind is not GroupKind.CHUNKED_LOCAL:
            continue
        if text_config.model_type not in _CHUNKED_TYPES:
            raise UnsupportedModelError(
                f"model type {config.model_type!r} cannot be served: chunked attention (attention_chunk_size = "
                f"{layer.window}) is supported only for {', '.join(_CHUNKED_TYPES)}"
            )
        if layer.window % block_size:
            raise UnsupportedModelError(
                f"model type {config.model_type!r} cannot be served with blocks of {block_size} tokens: its "
                f"attention_chunk_size of {layer.window} is not a multiple of that; use --block-size "
                f"{math.gcd(layer.window, block_size)}"
            )
    return layers


def check_ranks(config: Any, rank_count: int) -> None:
    """Checks that the number of ranks divides the model's attention heads.

    Raises:
        UnsupportedModelError: it does not; the message lists the possible numbers of ranks.
    """
    head_count = getattr(config.get_text_config(), "num_attention_heads", None)
    if isinstance(head_count, int) and head_count % rank_count:
        counts = ", ".join(str(count) for count in range(2, head_count + 1) if head_count % count == 0)
        raise UnsupportedModelError(
            f"model type {config.model_type!r} cannot be served by {rank_count} ranks: its {head_count} attention "
            f"heads cannot be divided evenly; --tensor-parallel may be {counts or 1}"
        )


def layers_as_they_arrive(
    model_type: str, layers: tuple[LayerSpec, ...], arrivals: Mapping[int, Arrival], *, longest: int
) -> tuple[LayerSpec, ...]:
    """Returns the layers with this rank's heads, as they arrived in the first pass, and checks everything else.

    Phi 3.5 MoE has a window that it does not pass to attention. A window of this kind is ignored if it is as long as
    the `longest` sequence.

    Raises:
        UnsupportedModelError: a layer of the configuration does not attend, another layer does, a layer has another
            window, a layer computes its own keys instead of reading another layer's, or the dtypes of keys differ.
    """
    attention = [layer for layer in layers if layer.kind is not GroupKind.STATE]
    unlike = sorted({layer.layer for layer in attention} ^ arrivals.keys())
    if unlike:
        raise UnsupportedModelError(
            f"model type {model_type!r} cannot be served: layers {unlike} do not use transformers' attention interface"
        )
    dtypes = {arrival.key.dtype for arrival in arrivals.values()}
    if len(dtypes) > 1:
        raise UnsupportedModelError(
            f"model type {model_type!r} cannot be served: its layers' keys have different dtypes: {dtypes}"
        )
    layers = tuple(_without_idle_window(layer, arrivals, longest) for layer in layers)
    for layer in (layer for layer in layers if layer.kind is not GroupKind.STATE):
        key, latent_dim, found = arrivals[layer.layer]
        if (latent_dim is None) == (layer.value_head_dim == 0):
            raise UnsupportedModelError(
                f"model type {model_type!r} cannot be served: by its configuration layer {layer.layer} has latent "
                "attention (kv_lora_rank), but its keys and values arrive expanded, or the reverse"
            )
        expected = layer.window if layer.kind is GroupKind.SLIDING_WINDOW else None
        if found != expected:
            raise UnsupportedModelError(
                f"model type {model_type!r} cannot be served: by its configuration layer {layer.layer} has a sliding"
                f" window of {expected}, but it passes 'sliding_window' = {found} to its attention"
            )
        if layer.shared_with is not None and key.data_ptr() != arrivals[layer.shared_with].key.data_ptr():
            raise UnsupportedModelError(
                f"model type {model_type!r} cannot be served: by its configuration layer {layer.layer} reads the keys"
                f" of layer {layer.shared_with} (num_kv_shared_layers), but it computes its own"
            )
    return tuple(
        layer if layer.kind is GroupKind.STATE else _with_heads(layer, arrivals[layer.layer].key) for layer in layers
    )


def _without_idle_window(layer: LayerSpec, arrivals: Mapping[int, Arrival], longest: int) -> LayerSpec:
    is_idle = layer.kind is GroupKind.SLIDING_WINDOW and layer.window >= longest
    if is_idle and arrivals[layer.layer].sliding_window is None:
        return replace(layer, kind=GroupKind.FULL_ATTENTION, window=0)
    return layer


def states_as_they_arrive(
    model_type: str, layers: tuple[LayerSpec, ...], arrivals: Mapping[int, Mapping[StateKey, StateTensor]]
) -> tuple[tuple[LayerSpec, ...], tuple[tuple[int, tuple[StateTensor, ...]], ...]]:
    """Returns the layers with the sizes of their states, as stored in the first pass, and the tensors of these states.

    Raises:
        UnsupportedModelError: a layer keeps no state, or a state that its configuration does not describe.
    """
    unlike = sorted({layer.layer for layer in layers if layer.kind is GroupKind.STATE} ^ arrivals.keys())
    if unlike:
        raise UnsupportedModelError(
            f"model type {model_type!r} cannot be served: layers {unlike} keep states that differ from its "
            "configuration"
        )
    states = tuple((layer, in_order(tensors)) for layer, tensors in sorted(arrivals.items()))
    sizes = {layer: sum(tensor.byte_count for tensor in tensors) for layer, tensors in states}
    sized = (
        replace(layer, state_bytes=sizes[layer.layer]) if layer.kind is GroupKind.STATE else layer for layer in layers
    )
    return tuple(sized), states


def _with_heads(layer: LayerSpec, key: torch.Tensor) -> LayerSpec:
    _, kv_head_count, head_dim = key.shape
    element_bytes = key.dtype.itemsize
    return replace(
        layer,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        value_head_dim=0 if layer.value_head_dim == 0 else None,
        element_bytes=element_bytes,
    )


def refuse_unsupported_options(layer: str, options: Mapping[str, object]) -> None:
    """Refuses options of attention that attention over pages does not support.

    Args:
        layer: class of the attention module, for the message.
        options: the options that the model passes, by name.

    Raises:
        UnsupportedModelError: an option is set. None and False count as not set, except `is_causal=False`, which means
            attention in both directions.
    """
    for name, value in options.items():
        if name in _MEANINGLESS_OPTIONS or value is None:
            continue
        if name == "is_causal" and value is True:
            continue
        if value is False and name != "is_causal":
            continue
        raise UnsupportedModelError(f"{layer} cannot be served: it passes {name!r} to its attention")


def _encoder_decoder(config: Any) -> str | None:
    return "it is an encoder-decoder" if config.is_encoder_decoder else None


def _untold_state(config: Any, layers: tuple[LayerSpec, ...]) -> str | None:
    """Returns the reason to refuse a configuration that shows a state but not the layers that keep it; else None.

    A list of layers settles the question: Granite 4 has such entries, and a list in which all layers attend.
    """
    if getattr(config, "layer_types", None) or any(layer.kind is GroupKind.STATE for layer in layers):
        return None
    name = next((name for name in _STATE_ENTRIES if getattr(config, name, None)), None)
    return f"recurrent state ({name})" if name is not None else None


def _shared_layers(config: Any) -> str | None:
    return _UNLIKE_OTHERS.get(config.model_type)


_REASONS: tuple[Callable[[Any], str | None], ...] = (
    _encoder_decoder,
    _shared_layers,
)
