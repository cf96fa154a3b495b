"""Small models of random weights with layers of different kinds: windows, chunks, states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers

LAYERS: Final = 4
BASE: Final[dict[str, Any]] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # With a smaller range all texts are equal, and comparing them shows nothing.
}
WINDOW: Final = 64  # tokens of a window or chunk: two of the smallest blocks of vLLM's CPU backend
MAMBA: Final[dict[str, Any]] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}


def _gemma() -> Any:
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    return transformers.Gemma3TextConfig(
        **BASE, head_dim=32, sliding_window=WINDOW, layer_types=layers, query_pre_attn_scalar=32
    )


def _mistral() -> Any:
    return transformers.MistralConfig(**BASE, head_dim=32, sliding_window=WINDOW)


def _gpt_oss() -> Any:
    layers = ["sliding_attention", "full_attention"] * 2
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.GptOssConfig(**BASE, **experts, head_dim=32, sliding_window=WINDOW, layer_types=layers)


def _llama() -> Any:
    layers = ["chunked_attention"] * 3 + ["full_attention"]
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    return transformers.Llama4TextConfig(
        **BASE,
        **experts,
        head_dim=32,
        intermediate_size_mlp=128,
        attention_chunk_size=WINDOW,
        layer_types=layers,
        no_rope_layers=[1, 1, 1, 0],
    )


def _granite() -> Any:
    experts: dict[str, Any] = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 128}
    base = {**BASE, "max_position_embeddings": 1024}
    return transformers.GraniteMoeHybridConfig(**base, **experts, **MAMBA, layer_types=["mamba", "attention"] * 2)


def _mamba() -> Any:
    return transformers.Mamba2Config(
        vocab_size=2048,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        expand=2,
        initializer_range=0.3,
    )


WINDOWED: Final[dict[str, Callable[[], Any]]] = {
    "gemma3": _gemma,  # three groups of windows, one of full attention
    "mistral": _mistral,  # one group of windows
    "gpt-oss": _gpt_oss,  # one group of windows, one of full attention, two layers each
    "llama4": _llama,  # three groups of chunks, one of full attention
}
RECURRENT: Final[dict[str, Callable[[], Any]]] = {"granite4": _granite, "mamba2": _mamba}


def save(name: str, folder: Path) -> str:
    """Saves a model in a folder, and returns its path."""
    torch.manual_seed(0)
    config = {**WINDOWED, **RECURRENT}[name]()
    transformers.AutoModelForCausalLM.from_config(config).float().eval().save_pretrained(folder / name)
    return str(folder / name)
