"""Checkpoints of a few thousand random weights, for tests that need a model, but not sensible text.

    write_tiny_llama(tmp_path / "llama")        GQA 4:2, tied embeddings
    write_tiny_qwen3(tmp_path / "qwen3")        GQA 4:2, normalised queries and keys
    write_tiny("gemma2", tmp_path / "gemma2")   and likewise for every family of `FAMILIES`

The same arguments give the same bytes. Random weights are ten times larger than usual, so that logits are far apart,
and greedy text depends on every earlier token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 320
MAX_POSITION = 512
END_OF_TEXT = "<|end|>"  # the text of token 0
_SAMPLE_TEXT = "A quire is a gathering of pages. The pages of a sequence need not lie together. Größe, naïve, 漢字.\n"


def write_tiny_llama(folder: Path, *, seed: int = 0, heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> Path:
    """Writes a Llama of two layers with a tokenizer, and returns its folder."""
    shape = tiny_shape(heads, kv_heads, head_dim)
    return _write(folder, seed, lambda: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)))


def write_tiny_qwen3(folder: Path, *, seed: int = 0, heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> Path:
    """Writes a Qwen3 of two layers with a tokenizer, and returns its folder."""
    shape = tiny_shape(heads, kv_heads, head_dim)
    return _write(folder, seed, lambda: Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False)))


def write_tiny(family: str, folder: Path, **changes: Any) -> Path:
    """Writes a model of one of `FAMILIES` with a tokenizer; `changes` override its configuration."""
    model_class, config_class, own = FAMILIES[family]
    shape = tiny_shape() | own | changes
    return _write(folder, 0, lambda: model_class(config_class(**shape)))


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE of `VOCABULARY` tokens: any text can be encoded, rare characters byte by byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_SAMPLE_TEXT], trainer)
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(folder)


def write_model(folder: Path, model: PreTrainedModel) -> Path:
    """Saves any model, without a tokenizer."""
    model.save_pretrained(folder)
    return folder


_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"

# Windows have 24 tokens, so that they end inside blocks of 16. In checkpoints of this size, a usual soft cap or
# temperature would have too little effect. Here the soft cap is 2, and the temperature changes every 8 tokens.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"num_hidden_layers": 4, "sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"num_hidden_layers": 5, "sliding_window": 24, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING]},
    ),
    "gemma3n": (
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        {
            "num_hidden_layers": 6,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
            "sliding_window": 24,
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "layer_types": [_SLIDING, _FULL] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 1, 0, 1],
            "floor_scale": 8,
            "attn_scale": 1.0,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
        },
    ),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config, _LATENT | {"q_lora_rank": None}),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, _LATENT | {"q_lora_rank": 24}),
}


def tiny_shape(heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> dict[str, Any]:
    """Returns the sizes of a tiny model, under the names that most model types' configurations use."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16 * heads,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITION,
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _write(folder: Path, seed: int, build: Callable[[], PreTrainedModel]) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    write_model(folder, model)
    write_tokenizer(folder)
    return folder
