"""Reads the kind of each layer of a model. Configurations name kinds in many forms."""

from __future__ import annotations

import enum
from typing import Final

from quire.planning.fields import ConfigError, Fields


class LayerKind(enum.Enum):
    """The kind of cache that a layer keeps."""

    FULL = "full attention"
    SLIDING = "sliding-window attention"
    CHUNKED = "chunked attention"
    STATE = "recurrent state"
    FULL_AND_STATE = "full attention and recurrent state"
    NOTHING = "nothing"


_WORDS: Final = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
    "linear_attention": LayerKind.STATE,
    "mamba": LayerKind.STATE,
    "mamba2": LayerKind.STATE,
    "conv": LayerKind.STATE,
    "hybrid": LayerKind.FULL_AND_STATE,
    "mlp": LayerKind.NOTHING,
    "moe": LayerKind.NOTHING,
}
_LETTERS: Final = {  # letters of Nemotron-H's layer pattern
    "M": LayerKind.STATE,
    "*": LayerKind.FULL,
    "-": LayerKind.NOTHING,
    "E": LayerKind.NOTHING,
}
_ONE_WINDOW: Final = {"minimax"}  # All attention layers have the window, even if a list calls some of them full.
_STATES_ALONE: Final = {"mamba", "mamba2", "falcon_mamba"}
_EVERY_LAYER_BOTH: Final = {"falcon_h1"}
# Models with states that need an explicit list: no rule maps a layer's index to its kind.
_NEEDS_A_LIST: Final = {"bamba", "granitemoehybrid", "minimax", "minimax_text_01", "nemotron_h", "zamba", "zamba2"}
LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "n_layers")
LAYERS_MAX: Final = 4_096  # The largest models have a few hundred layers.


def layer_kinds(fields: Fields) -> list[LayerKind]:
    """Returns one kind per layer.

    Raises:
        ConfigError: a necessary field is missing or not understood.
    """
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and not fields.has("layer_types", "layers_block_type"):
        if not set(pattern) <= set(_LETTERS):
            raise fields.wrong("hybrid_override_pattern", f"a text of the letters {' '.join(_LETTERS)}")
        return [_LETTERS[letter] for letter in pattern]
    kinds = _listed_kinds(fields, _layer_count(fields))
    if fields.model_type in _ONE_WINDOW and fields.has("sliding_window"):
        return [LayerKind.SLIDING if kind is LayerKind.FULL else kind for kind in kinds]
    return kinds


def _listed_kinds(fields: Fields, count: int) -> list[LayerKind]:
    for name in ("layer_types", "layers_block_type"):
        if fields.has(name):
            return [_kind_of(fields, name, word) for word in fields.strings(name, count)]
    return _hybrid_kinds(fields, count) or _attention_kinds(fields, count)


def _layer_count(fields: Fields) -> int:
    if fields.model_type == "nemotron_h" and fields.has("layers_block_type"):
        return len(fields.get("layers_block_type"))
    count = fields.integer(*LAYER_COUNTS)
    if count > LAYERS_MAX:
        raise ConfigError(f"num_hidden_layers must be at most {LAYERS_MAX:,}, not {count:,}")
    return count


def _kind_of(fields: Fields, name: str, word: str) -> LayerKind:
    if word not in _WORDS:
        raise fields.wrong(name, f"a list of {', '.join(_WORDS)}: {word!r} is unknown")
    return _WORDS[word]


def _hybrid_kinds(fields: Fields, count: int) -> list[LayerKind]:
    """Returns the kinds of layers of a model with states, from its model type's own fields. Empty for other models."""
    if fields.model_type in _STATES_ALONE:
        return [LayerKind.STATE] * count
    if fields.model_type in _EVERY_LAYER_BOTH:
        return [LayerKind.FULL_AND_STATE] * count
    if fields.has("hybrid_layer_ids"):  # Zamba2
        both = set(fields.integers("hybrid_layer_ids"))
        return [LayerKind.FULL_AND_STATE if i in both else LayerKind.STATE for i in range(count)]
    if fields.has("linear_attn_config"):  # Kimi-Linear counts layers from 1.
        full = set(fields.get("linear_attn_config").get("full_attn_layers", ()))
        return [LayerKind.FULL if i + 1 in full else LayerKind.STATE for i in range(count)]
    attention = _attention_layers(fields, count)
    if attention is None and fields.model_type in _NEEDS_A_LIST:
        raise fields.missing("layer_types", "layers_block_type", "attn_type_list")
    if attention is None:
        return []
    return [LayerKind.FULL if i in attention else LayerKind.STATE for i in range(count)]


def _attention_layers(fields: Fields, count: int) -> set[int] | None:
    """Returns the indices of attention layers among layers with states; None if no field says."""
    for name in ("attn_layer_indices", "full_attn_idxs"):  # Bamba, LFM2
        if fields.get(name) is not None:
            return set(fields.integers(name))
    if fields.has("attn_type_list"):  # MiniMax: 0 is lightning attention, 1 softmax attention
        return {i for i, kind in enumerate(fields.integers("attn_type_list")[:count]) if kind == 1}
    if fields.has("attn_layer_period") and fields.model_type not in _NEEDS_A_LIST:  # Jamba
        period, offset = fields.integer("attn_layer_period"), fields.get("attn_layer_offset", 0)
        return {i for i in range(count) if i % period == offset}
    if fields.has("full_attention_interval"):  # Qwen3-Next
        interval = fields.integer("full_attention_interval")
        return {i for i in range(count) if (i + 1) % interval == 0}
    return None


def _attention_kinds(fields: Fields, count: int) -> list[LayerKind]:
    """Returns the kinds of layers of a model with attention only."""
    if fields.has("attention_chunk_size"):
        return _chunked_kinds(fields, count)
    if not fields.has("sliding_window") or fields.get("use_sliding_window") is False:
        return [LayerKind.FULL] * count
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str):  # EXAONE 4: "LLLG"
        return [LayerKind.FULL if pattern[i % len(pattern)] == "G" else LayerKind.SLIDING for i in range(count)]
    if pattern:
        every = fields.integer("sliding_window_pattern")
        return [LayerKind.SLIDING if (i + 1) % every else LayerKind.FULL for i in range(count)]
    first = fields.get("max_window_layers", 0) if "use_sliding_window" in fields.values else 0
    return [LayerKind.SLIDING if i >= first else LayerKind.FULL for i in range(count)]


def _chunked_kinds(fields: Fields, count: int) -> list[LayerKind]:
    """Returns the kinds for Llama 4: layers without rotary positions (0 in `no_rope_layers`) have full attention."""
    rope = fields.get("no_rope_layers")
    if not rope:
        interval = fields.integer("no_rope_layer_interval", default=4)
        rope = [int((i + 1) % interval != 0) for i in range(count)]
    elif len(fields.integers("no_rope_layers")) < count:
        raise fields.wrong("no_rope_layers", f"a list of {count} numbers, one per layer")
    return [LayerKind.CHUNKED if rope[i] else LayerKind.FULL for i in range(count)]
