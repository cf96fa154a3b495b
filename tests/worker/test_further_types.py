"""Model types that are not among the families, and are served because what they are made of is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.paged_model import load_model
from transformers import AutoModelForCausalLM

from tests.worker.engine_harness import prompt
from tests.worker.tiny_models import tiny_shape, write_model

SLIDING, FULL = "sliding_attention", "full_attention"
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
THREE_TO_ONE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
}

# By the start of the classes' names, what is changed in the shape that all have.
SERVED: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "Cohere2": THREE_TO_ONE,
    "Dots1": EXPERTS | {"layer_types": [FULL, FULL]},
    "Ernie4_5": {},
    "Exaone4": THREE_TO_ONE,
    "GPTBigCode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "GPTNeoX": {},
    "Gemma": {},
    "Glm4": {"pad_token_id": 0},
    "Glm4Moe": EXPERTS,
    "Granite": {},
    "HunYuanDenseV1": {},
    "MiniCPM3": {
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
    "Ministral": {"sliding_window": 24, "layer_types": [SLIDING, FULL]},
    "Mixtral": {"sliding_window": 24, "num_local_experts": 4},
    "Olmo2": {},
    "Olmo3": THREE_TO_ONE,
    "Phi": {},
    "Phi3": {"sliding_window": 24, "pad_token_id": 0},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "num_hidden_layers": 3},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "SeedOss": {},
    "SmolLM3": {"num_hidden_layers": 4, "pad_token_id": 0},
    "Starcoder2": {"sliding_window": 24},
}


def write(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    config = getattr(transformers, f"{name}Config")(**(tiny_shape() | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return write_model(folder, model)


@pytest.mark.parametrize("name", SERVED)
def test_logits_equal_those_of_transformers_beyond_every_window(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path, SERVED[name])
    model, tokens = load_model(folder), prompt(70, seed=7)
    own: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = own(torch.tensor([tokens])).logits[0, -1]
    groups = model.cache_spec.groups
    cache = KVCache(model.cache_spec, 5 * len(groups))
    for buffer in cache.buffers:
        buffer.fill_(NAN_BYTE)
    tables = [range(5 * group, 5 * group + 5) for group in range(len(groups))]
    for start, stop in ((0, 41), (41, 70)):
        chunk = Chunk(tokens[start:stop], start, tables, needs_logits=True)
        logits = model.forward(build_batch([chunk], groups=groups), cache)[0]
    assert (logits - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("StableLm", "does not hand keyword arguments to its attention"),
        ("Mamba", r"recurrent state \(state_size\)"),
        ("Bamba", "recurrent state"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(write(name, tmp_path, {}))
