"""Reads a model's `config.json`, and returns the cache of each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from quire._numbers import require_integer
from quire.planning.fields import ConfigError, Fields
from quire.planning.kinds import LayerKind, layer_kinds
from quire.planning.specs import ELEMENT_BYTES, LayerSpec, element_bytes_of
from quire.planning.state_groups import divided, state_bytes_of
from quire.types import GroupKind

# Model types whose plans were compared with the caches that transformers creates.
KNOWN: Final = {
    *("apertus", "arcee", "bamba", "bitnet", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4"),
    *("falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4"),
    *("glm4_moe", "glm4_moe_lite", "gpt_oss", "granite", "granitemoehybrid", "hunyuan_v1_dense", "jamba"),
    *("kimi_linear", "lfm2", "lfm2_moe", "llama", "llama4_text", "mamba", "mamba2", "minicpm3", "minimax"),
    *("minimax_text_01", "ministral", "mistral", "mixtral", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid", "phi"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3"),
    *("stablelm", "starcoder2", "youtu", "zamba", "zamba2"),
}
# Names of fields that may change the cache of an unknown model type.
SUSPICIOUS: Final = re.compile(
    r"pattern|interval|layer_ids|hybrid|swa_|global_|ssm|mamba|linear_|index_|cross_att|block_"
)
REFUSED: Final = {
    "cross_attention_layers": "cross-attention layers",
    "index_head_dim": "an indexer with keys of its own",
    "block_configs": "layers that are configured one by one",
    "lru_width": "linear recurrent units",
}


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The cache that a model needs on one rank, according to its configuration.

    Attributes:
        model_type: the language model's type.
        layers: the cache of each layer. Layers without a cache are left out.
        dtype: dtype of keys and values.
        token_count_max: longest sequence that the model supports; None if the configuration does not say.
        notes: assumptions of the plan, in sentences.
    """

    model_type: str
    layers: tuple[LayerSpec, ...]
    dtype: str
    token_count_max: int | None
    notes: tuple[str, ...]


def layers_from_config(
    config: Mapping[str, Any], dtype: str = "auto", tensor_parallel: int = 1, state_dtype: str = "auto"
) -> tuple[LayerSpec, ...]:
    """Returns the cache of each layer; see `read_config`."""
    return read_config(config, dtype, tensor_parallel, state_dtype).layers


def read_config(
    config: Mapping[str, Any],
    dtype: str = "auto",
    tensor_parallel: int = 1,
    state_dtype: str = "auto",
    *,
    state_ranks: int | None = None,
    model_dtype: str | None = None,
) -> ModelCache:
    """Reads a parsed `config.json`.

    Args:
        config: the configuration in Hugging Face's format.
        dtype: dtype of keys and values. "auto" is the model's own, or bfloat16 if the configuration does not say.
        tensor_parallel: number of ranks. KV heads are divided, or repeated if there are fewer heads than ranks. Every
            rank keeps latents (MLA) whole.
        state_dtype: dtype of recurrent states. "auto" is float32 unless the configuration says otherwise.
        state_ranks: number of ranks that divide the heads of states. By default all ranks. 1 if each rank keeps states
            whole, as Quire's worker does.
        model_dtype: dtype of the computation, and of states without their own dtype; by default the checkpoint's own.

    Raises:
        ConfigError: a field is missing, is not understood, or does not divide by the ranks.
        ValueError: a dtype is unknown, or the number of ranks is below 1.
    """
    require_integer("tensor_parallel", tensor_parallel, 1)
    if state_ranks is not None:
        require_integer("state_ranks", state_ranks, 1)
    fields = Fields.of(config)
    for name, what in REFUSED.items():
        if fields.has(name):
            raise ConfigError(f"model type {fields.model_type!r:.80} has {what} ({name}), which is not supported")
    kinds = layer_kinds(fields)
    own_dtype = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if own_dtype.lower() not in ELEMENT_BYTES and (dtype == "auto" or model_dtype is None):
        raise ConfigError(f"dtype {own_dtype!r:.80} is not supported; supported are {', '.join(ELEMENT_BYTES)}")
    dtype = own_dtype if dtype == "auto" else dtype
    notes = _notes(fields)
    state_bytes = 0
    if LayerKind.STATE in kinds or LayerKind.FULL_AND_STATE in kinds:
        state_bytes = state_bytes_of(
            fields,
            tensor_parallel=tensor_parallel if state_ranks is None else state_ranks,
            element_bytes=element_bytes_of(model_dtype or own_dtype),
            dtype=state_dtype,
        )
    layers = []
    shared = _shared_layers(fields, kinds)
    for index, kind in enumerate(kinds):
        if kind not in {LayerKind.NOTHING, LayerKind.STATE}:
            made = _attention(fields.at(index), index, kind, tensor_parallel)
            layers.append(replace(made, element_bytes=element_bytes_of(dtype), shared_with=shared.get(index)))
        if kind in {LayerKind.STATE, LayerKind.FULL_AND_STATE}:
            layers.append(LayerSpec(index, GroupKind.STATE, state_bytes=state_bytes))
    longest = fields.get("max_position_embeddings") or fields.get("model_max_length") or fields.get("n_positions")
    return ModelCache(fields.model_type, tuple(layers), dtype, longest if isinstance(longest, int) else None, notes)


def _attention(fields: Fields, index: int, kind: LayerKind, ranks: int) -> LayerSpec:
    group_kind, window = GroupKind.FULL_ATTENTION, 0
    if kind is LayerKind.SLIDING:
        group_kind, window = GroupKind.SLIDING_WINDOW, fields.integer("sliding_window")
    elif kind is LayerKind.CHUNKED:
        group_kind, window = GroupKind.CHUNKED_LOCAL, fields.integer("attention_chunk_size")
    if fields.has("kv_lora_rank"):
        heads, head_dim = 1, fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
        value_head_dim: int | None = 0
    else:
        heads, head_dim = _kv_heads(fields, kind, ranks), _head_dim(fields, kind)
        value_head_dim = fields.integer("v_head_dim", default=head_dim)
    return LayerSpec(
        index,
        group_kind,
        kv_head_count=heads,
        head_dim=head_dim,
        value_head_dim=None if value_head_dim == head_dim else value_head_dim,
        window=window,
    )


def _kv_heads(fields: Fields, kind: LayerKind, ranks: int) -> int:
    """Returns the number of KV heads of one rank, at least 1."""
    heads = fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    if fields.has("multi_query") and not fields.has("new_decoder_architecture"):  # Falcon, StarCoder
        count = 1
    elif kind is LayerKind.FULL and fields.has("num_global_key_value_heads") and fields.has("attention_k_eq_v"):
        count = fields.integer("num_global_key_value_heads")  # Gemma 4
    else:
        count = fields.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    if count < ranks and ranks % count == 0:
        return 1
    return divided(fields, "KV heads", count, ranks)


def _head_dim(fields: Fields, kind: LayerKind) -> int:
    if kind is LayerKind.FULL and fields.has("global_head_dim"):
        return fields.integer("global_head_dim")  # Gemma 4
    heads = fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    if fields.has("head_dim", "attention_head_dim", "kv_channels"):
        return fields.integer("head_dim", "attention_head_dim", "kv_channels")
    width = fields.integer("hidden_size", "n_embd", "d_model")
    if fields.model_type in {"zamba", "zamba2"}:  # Attention reads the concatenation of hidden states and embeddings.
        width *= 2
    if width % heads:
        raise ConfigError(f"'head_dim' is missing, and the hidden size {width} is not a multiple of {heads} heads")
    return width // heads


def _shared_layers(fields: Fields, kinds: list[LayerKind]) -> dict[int, int]:
    """Returns, for each layer without its own keys and values, the layer that it reads: the last of its kind (Gemma
    3n)."""
    count = fields.get("num_kv_shared_layers") or 0
    if not isinstance(count, int) or not 0 <= count < len(kinds):
        raise fields.wrong("num_kv_shared_layers", f"from 0 to {len(kinds) - 1}")
    first = len(kinds) - count
    last_own = {kind: index for index, kind in enumerate(kinds[:first])}
    for index in range(first, len(kinds)):
        if kinds[index] not in last_own:
            raise ConfigError(
                f"layer {index} shares keys and values, but no layer before layer {first} has the same kind of "
                "attention"
            )
    return {index: last_own[kinds[index]] for index in range(first, len(kinds))}


def _notes(fields: Fields) -> tuple[str, ...]:
    if fields.model_type in KNOWN:
        return ()
    note = (
        f"model type {fields.model_type!r} is not known: the plan assumes that its standard fields mean ordinary layers"
    )
    odd = sorted(name for name in fields.values if SUSPICIOUS.search(name) and fields.has(name))
    return (note, f"these fields may change the cache: {', '.join(odd)}") if odd else (note,)
