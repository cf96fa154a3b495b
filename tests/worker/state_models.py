"""Checkpoints of a few thousand random weights with recurrent layers; see `tiny_models`.

The same arguments give the same bytes. The decay of states is drawn such that texts depend on tokens hundreds of
positions back. With random initial values a state would forget a token within five.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.worker.tiny_models import tiny_shape, write_model, write_tokenizer

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}

# Prefix of a family's class names -> changes to the common configuration. The families differ in their numbers of
# layers, groups and heads, so that a state fills one page or several, or several states share a page.
STATE_FAMILIES: dict[str, dict[str, Any]] = {
    "Bamba": _MAMBA2 | {"num_hidden_layers": 4, "attn_layer_indices": [1]},
    "Jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "pad_token_id": 0,
    },
    "FalconH1": _MAMBA2 | {"num_hidden_layers": 3, "mamba_d_ssm": 128},
    "NemotronH": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "GraniteMoeHybrid": _MAMBA2
    | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "pad_token_id": 0,
    },
    "Qwen3Next": _GATED_DELTA | _EXPERTS | {"shared_expert_intermediate_size": 32},
    "MiniMax": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "block_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}

# These further model types have states. The worker serves them because it knows all of their parts.
FURTHER: dict[str, dict[str, Any]] = {
    "KimiLinear": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 12,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "Lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "Lfm2Moe": _EXPERTS
    | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1},
    "Lfm3": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "Qwen3_5": _GATED_DELTA,
    "OlmoHybrid": _GATED_DELTA | {"linear_num_key_heads": 4, "pad_token_id": 0},
}


def _classes(name: str) -> tuple[Any, Any]:
    config_name = f"{name}TextConfig" if name == "Qwen3_5" else f"{name}Config"
    if not hasattr(transformers, config_name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, config_name), getattr(transformers, f"{name}ForCausalLM")


def write_with_states(name: str, folder: Path, **changes: Any) -> Path:
    """Writes a model of one of these types with a tokenizer; `changes` override its configuration."""
    shape = tiny_shape() | (STATE_FAMILIES | FURTHER)[name] | changes
    if "layers_block_type" in shape:  # the list determines the number of layers
        del shape["num_hidden_layers"]
    config_class, model_class = _classes(name)
    config = config_class(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.data.uniform_(-5.0, -1.0)
    write_model(folder, model)
    write_tokenizer(folder)
    return folder
