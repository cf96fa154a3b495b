"""Reads the cache's shape from a `config.json`: ten architectures and the field names of others, all counted by
hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from quire.planning import ConfigError, LayerSpec, layers_from_config, read_config
from quire.types import GroupKind

CONFIGS = Path(__file__).parent / "configs"
FULL, SLIDING, CHUNKED, STATE = (
    GroupKind.FULL_ATTENTION,
    GroupKind.SLIDING_WINDOW,
    GroupKind.CHUNKED_LOCAL,
    GroupKind.STATE,
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}


def published(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())  # type: ignore[no-any-return]


def summary(layers: tuple[LayerSpec, ...]) -> dict[tuple[GroupKind, int, int], int]:
    """Counts the layers that have pages of their own, by kind, window and bytes of a token or state."""
    own = (layer for layer in layers if layer.shared_with is None)
    return dict(Counter((layer.kind, layer.window, layer.token_bytes or layer.state_bytes) for layer in own))


# Bytes of a token: 2 (keys and values) x heads x head_dim x 2. Bytes of a state: convolution x 2 + recurrent x 4.
TEN = {
    "llama-3-70b": {(FULL, 0, 2 * 8 * 128 * 2): 80},
    "gemma-3-27b": {(FULL, 0, 2 * 16 * 128 * 2): 10, (SLIDING, 1024, 2 * 16 * 128 * 2): 52},
    "gpt-oss-20b": {(FULL, 0, 2 * 8 * 64 * 2): 12, (SLIDING, 128, 2 * 8 * 64 * 2): 12},
    "deepseek-v3": {(FULL, 0, (512 + 64) * 2): 61},
    "bamba-9b": {(FULL, 0, 2 * 8 * 128 * 2): 3, (STATE, 0, (8192 + 2 * 256) * 4 * 2 + 128 * 64 * 256 * 4): 29},
    "jamba-v0.1": {(FULL, 0, 2 * 8 * 128 * 2): 4, (STATE, 0, 8192 * 4 * 2 + 8192 * 16 * 4): 28},
    "llama-4-scout": {(FULL, 0, 2 * 8 * 128 * 2): 12, (CHUNKED, 8192, 2 * 8 * 128 * 2): 36},
    "gemma-3n-e4b": {(FULL, 0, 2 * 2 * 256 * 2): 4, (SLIDING, 512, 2 * 2 * 256 * 2): 16},
    "qwen3-next-80b": {
        (FULL, 0, 2 * 2 * 256 * 2): 12,
        (STATE, 0, (2 * 16 * 128 + 32 * 128) * 4 * 2 + 32 * 128 * 128 * 4): 36,
    },
    "minimax-text-01": {(FULL, 0, 2 * 8 * 128 * 2): 10, (STATE, 0, 64 * 128 * 128 * 2): 70},
}
# Sizes on one of 8 ranks. Heads are divided among the ranks, and 2 KV heads are repeated. Every rank holds whole
# latents, and the single group of B and C whole.
ON_EIGHT_RANKS = {
    "llama-3-70b": {(FULL, 0, 512): 80},
    "gemma-3-27b": {(FULL, 0, 1024): 10, (SLIDING, 1024, 1024): 52},
    "gpt-oss-20b": {(FULL, 0, 256): 12, (SLIDING, 128, 256): 12},
    "deepseek-v3": {(FULL, 0, 1152): 61},
    "bamba-9b": {(FULL, 0, 512): 3, (STATE, 0, (1024 + 2 * 256) * 4 * 2 + 16 * 64 * 256 * 4): 29},
    "jamba-v0.1": {(FULL, 0, 512): 4, (STATE, 0, 1024 * 4 * 2 + 1024 * 16 * 4): 28},
    "llama-4-scout": {(FULL, 0, 512): 12, (CHUNKED, 8192, 512): 36},
    "gemma-3n-e4b": {(FULL, 0, 1024): 4, (SLIDING, 512, 1024): 16},
    "qwen3-next-80b": {(FULL, 0, 1024): 12, (STATE, 0, (2 * 2 * 128 + 4 * 128) * 4 * 2 + 4 * 128 * 128 * 4): 36},
    "minimax-text-01": {(FULL, 0, 512): 10, (STATE, 0, 8 * 128 * 128 * 2): 70},
}


@pytest.mark.parametrize("name", TEN)
def test_ten_architectures_are_read_as_they_are(name: str) -> None:
    cache = read_config(published(name))
    assert summary(cache.layers) == TEN[name]
    assert (cache.dtype, cache.notes) == ("bfloat16", ())
    assert cache.token_count_max is not None
    assert summary(layers_from_config(published(name), tensor_parallel=8)) == ON_EIGHT_RANKS[name]
    whole = {layer: count for layer, count in TEN[name].items() if layer[0] is STATE}
    # Quire's worker keeps whole states on each rank.
    shared = read_config(published(name), tensor_parallel=8, state_ranks=1)
    assert {layer: count for layer, count in summary(shared.layers).items() if layer[0] is STATE} == whole


@pytest.mark.parametrize(("dtype", "share"), [("fp32", 2), ("fp16", 1), ("fp8", 0.5)])
def test_the_dtype_of_keys_and_values_is_chosen_and_states_keep_theirs(dtype: str, share: float) -> None:
    (state, attention) = summary(layers_from_config(published("jamba-v0.1"), dtype))
    assert attention == (FULL, 0, 4096 * share)
    assert state == (STATE, 0, 589_824)
    assert summary(layers_from_config(published("jamba-v0.1"), dtype, state_dtype="bf16")) == {
        attention: 4,
        (STATE, 0, 8192 * 4 * 2 + 8192 * 16 * 2): 28,
    }


def test_layers_that_share_name_the_last_of_their_kind_that_does_not() -> None:
    layers = layers_from_config(published("gemma-3n-e4b"))
    sharing = {layer.layer: layer.shared_with for layer in layers if layer.shared_with is not None}
    assert sharing == {i: 19 if i % 5 == 4 else 18 for i in range(20, 35)}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral"}, [4096] * 4),  # 4096 is transformers' default
        ({"model_type": "mistral", "sliding_window": None}, [0] * 4),
        ({"model_type": "qwen2", "sliding_window": 8}, [0] * 4),  # windows are off unless `use_sliding_window` is set
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
         [0, 0, 0, 8]),
        ({"model_type": "gemma2", "sliding_window": 8}, [8, 0, 8, 0]),
        ({"model_type": "cohere2", "sliding_window": 8}, [8, 8, 8, 0]),
        ({"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LLG"}, [8, 8, 0, 8]),
        ({"model_type": "phi3", "sliding_window": 2047}, [2047] * 4),
        # Rotary embeddings do not change the cache.
        ({"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0]}, [0] * 4),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0, 1, 1]}, [8192, 0, 8192, 8192]),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, [0] * 4),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}, [0, 8, 0, 8]),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8,
             "per_layer_config": {"1": {"sliding_window": 5}}},
            [0, 5, 0, 8],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_windows_are_found_in_the_words_of_each_model(fields: dict[str, Any], windows: list[int]) -> None:
    assert [layer.window for layer in layers_from_config({**LLAMA, **fields})] == windows


MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_d_conv": 4}


@pytest.mark.parametrize(
    ("fields", "kinds", "state_bytes"),
    [
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba", "mamba"], **MAMBA2},
            [STATE, FULL, STATE, STATE],
            (128 + 8) * 4 * 2 + 8 * 16 * 4 * 4,
        ),
        ({"model_type": "falcon_h1", **MAMBA2}, [FULL, STATE] * 4, (128 + 8) * 4 * 2 + 8 * 16 * 4 * 4),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "mamba_num_heads": 8, "mamba_head_dim": 16,
             "ssm_state_size": 4, "n_groups": 2, "conv_kernel": 4, "mamba_ssm_cache_dtype": "bfloat16"},
            [STATE, FULL],
            (128 + 2 * 2 * 4) * 4 * 2 + 8 * 16 * 4 * 2,
        ),
        (
            {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8,
             "mamba_headdim": 16, "mamba_d_state": 4, "mamba_ngroups": 1},
            [STATE, FULL, STATE] * 2,
            (128 + 8) * 4 * 2 + 8 * 16 * 4 * 4,
        ),
        ({"model_type": "lfm2", "full_attn_idxs": [1]}, [STATE, FULL, STATE, STATE], 256 * 3 * 2),
        (
            {"model_type": "kimi_linear", "kv_lora_rank": 32, "qk_rope_head_dim": 8,
             "linear_attn_config": {"full_attn_layers": [4], "num_heads": 4, "head_dim": 8}},
            [STATE, STATE, STATE, FULL],
            3 * 4 * 8 * 4 * 2 + 4 * 8 * 8 * 4,
        ),
        ({"model_type": "mamba", "state_size": 16}, [STATE] * 4, 512 * 4 * 2 + 512 * 16 * 4),
        (
            {"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 4, "n_groups": 2},
            [STATE] * 4,
            (128 + 16) * 4 * 2 + 8 * 16 * 4 * 4,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_states_are_found_in_the_words_of_each_model(
    fields: dict[str, Any], kinds: list[GroupKind], state_bytes: int
) -> None:
    cache = read_config({**LLAMA, **fields})
    assert [layer.kind for layer in cache.layers] == kinds
    assert {layer.state_bytes for layer in cache.layers if layer.kind is STATE} == {state_bytes}
    assert cache.notes == ()


def test_a_layer_with_attention_and_a_state_is_two_caches_of_one_layer() -> None:
    layers = layers_from_config({**LLAMA, "model_type": "falcon_h1", **MAMBA2})
    assert [layer.layer for layer in layers] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_full_layers_may_have_other_heads_than_those_with_windows() -> None:
    config = {
        **LLAMA,
        "model_type": "gemma4_text",
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    assert summary(layers_from_config(config)) == {(SLIDING, 512, 2 * 2 * 32 * 2): 2, (FULL, 0, 2 * 1 * 64 * 2): 2}


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"num_key_value_heads": None}, 4),
        ({"model_type": "falcon", "num_key_value_heads": None}, 1),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_key_value_heads": None, "num_kv_heads": 2}, 2),
    ],
    ids=str,
)
def test_heads_of_keys_and_values_have_several_names(fields: dict[str, Any], heads: int) -> None:
    assert {layer.kv_head_count for layer in layers_from_config({**LLAMA, **fields})} == {heads}


def test_an_unknown_model_type_is_read_by_its_standard_fields_and_says_so() -> None:
    cache = read_config({**LLAMA, "model_type": "novel", "swa_num_key_value_heads": 8})
    assert summary(cache.layers) == {(FULL, 0, 2 * 2 * 64 * 2): 4}
    assert "'novel' is not known" in cache.notes[0]
    assert "swa_num_key_value_heads" in cache.notes[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "lacks 'model_type'"),
        ({**LLAMA, "num_hidden_layers": None}, "'llama' lacks 'num_hidden_layers' or 'n_layer'"),
        ({**LLAMA, "num_attention_heads": None}, "lacks 'num_attention_heads'"),
        ({**LLAMA, "hidden_size": None}, "lacks 'hidden_size'"),
        ({**LLAMA, "hidden_size": 250}, "'head_dim' is missing, and the hidden size 250 is not a multiple of 4 heads"),
        (
            {**LLAMA, "num_hidden_layers": "4"},
            "'num_hidden_layers' of model type 'llama' is '4', but must be an integer of at least 1",
        ),
        ({**LLAMA, "layer_types": ["full_attention"]}, "must be a list of 4 words"),
        ({**LLAMA, "layer_types": ["full_attention", "quantum"] * 2}, "'quantum' is unknown"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "lacks 'sliding_window'"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 4}, "lacks 'mamba_n_heads'"),
        ({**LLAMA, "per_layer_config": [{}]}, "'per_layer_config' of model type 'llama' must be an object"),
        ({**LLAMA, "kv_lora_rank": 512}, "lacks 'qk_rope_head_dim'"),
        ({**LLAMA, "num_kv_shared_layers": 4}, "must be from 0 to 3"),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
        ({**LLAMA, "cross_attention_layers": [1]}, "cross-attention"),
        ({**LLAMA, "index_head_dim": 128}, "indexer"),
        ({**LLAMA, "model_type": "bamba"}, "lacks 'layer_types' or 'layers_block_type'"),
        ({**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "must be a text of the letters M"),
        ({**LLAMA, "model_type": "lfm2", "full_attn_idxs": 3}, "must be a list of integers"),
        ({**LLAMA, "model_type": "llama4_text", "no_rope_layers": [1]}, "4 numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_understood_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(config)


def test_states_without_a_dtype_of_their_own_have_the_models() -> None:
    config = {**published("bamba-9b"), "torch_dtype": "bfloat16"}
    convolution, recurrent = (8192 + 2 * 256) * 4, 128 * 64 * 256 * 4
    for dtype, element_bytes in ((None, 2), ("fp32", 4)):
        layers = read_config(config, model_dtype=dtype).layers
        assert {layer.state_bytes for layer in layers} == {0, convolution * element_bytes + recurrent}


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 KV heads of model type 'llama' cannot be divided evenly among 3 ranks"):
        read_config(LLAMA, tensor_parallel=3)
    with pytest.raises(ConfigError, match="state heads of model type 'bamba' cannot be divided evenly among 3 ranks"):
        read_config({**published("bamba-9b"), "num_key_value_heads": 3}, tensor_parallel=3)
    with pytest.raises(ValueError, match=r"tensor_parallel must be an integer from 1 to \d+, not 0"):
        read_config(LLAMA, tensor_parallel=0)
    with pytest.raises(ValueError, match="dtype 'fp3' is not supported"):
        read_config(LLAMA, "fp3")
