"""Compares the weights' bytes as estimated from a configuration with the models that transformers builds from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.planning import ConfigError, weight_bytes
from transformers import AutoConfig, AutoModelForCausalLM

CONFIGS = Path(__file__).parent / "configs"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8_000,
    "dtype": "bfloat16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8_000,
    "moe_intermediate_size": 192,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "dtype": "bfloat16",
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "float32": {**LLAMA, "dtype": "float32"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 96},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 64, "sliding_window": 128},
    "phi": {**LLAMA, "model_type": "phi"},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**LLAMA, "model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 256, "head_dim": 64},
    "gpt_oss": {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 16, "head_dim": 64, "sliding_window": 128},
    "deepseek_v3": DEEPSEEK,
}


@pytest.mark.parametrize("name", SMALL)
def test_the_estimate_is_what_transformers_makes_of_the_configuration(name: str) -> None:
    config = dict(SMALL[name])
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, config["dtype"]))
    exact = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(SMALL[name]) == pytest.approx(exact, rel=0.02)


def test_quantised_weights_are_as_large_as_they_are_stored() -> None:
    whole = weight_bytes(LLAMA)
    assert whole is not None
    embeddings = 2 * 8_000 * 512 * 2
    half = weight_bytes({**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    assert half == embeddings + (whole - embeddings) // 2
    quarter = weight_bytes({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert quarter == embeddings + (whole - embeddings) // 4


def test_a_configuration_that_lacks_a_size_names_it() -> None:
    with pytest.raises(ConfigError, match="lacks 'intermediate_size'"):
        weight_bytes({name: value for name, value in LLAMA.items() if name != "intermediate_size"})


@pytest.mark.parametrize("name", ["bamba-9b", "qwen3-next-80b"])
def test_of_layers_with_states_nothing_is_said(name: str) -> None:
    assert weight_bytes(json.loads((CONFIGS / f"{name}.json").read_text())) is None
