"""Model types outside the tested families; they are served because all of their parts are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.loading import load_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.worker.engine_harness import prompt
from tests.worker.tiny_models import FAMILIES, tiny_shape, write_model

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

# Prefix of a model type's class names -> changes to the common configuration.
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
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2},  # This model reads the dtype of a linear layer's weight.
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
    "Phimoe": {
        "num_local_experts": 4,
        "sliding_window": 512,
    },  # The window is as long as the context, because this model does not pass a window to its attention.
    "Qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "num_hidden_layers": 3},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "SeedOss": {},
    "SmolLM3": {"num_hidden_layers": 4, "pad_token_id": 0},
    "Starcoder2": {"sliding_window": 24},
}


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA4_VISION = VISION | {
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "pixel_shuffle_ratio": 0.5,
}

# Model that also reads images -> the family of its text model, and the configuration around the text model's.
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3": ("gemma3", {"vision_config": VISION | {"intermediate_size": 32}, "mm_tokens_per_image": 4}),
    "Llama4": ("llama4", {"vision_config": LLAMA4_VISION}),
    "Mistral3": ("mistral", {"vision_config": VISION | {"intermediate_size": 32, "model_type": "pixtral"}}),
}


def write(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    config = getattr(transformers, f"{name}Config")(**(tiny_shape() | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return write_model(folder, model)


def check_logits(folder: Path, model_class: Any) -> None:
    """Compares the logits of 70 tokens, computed in two chunks through pages."""
    model, tokens = load_model(folder), prompt(70, seed=7)
    own: Any = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
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


@pytest.mark.parametrize("name", SERVED)
def test_logits_equal_those_of_transformers_beyond_every_window(name: str, tmp_path: Path) -> None:
    check_logits(write(name, tmp_path, SERVED[name]), AutoModelForCausalLM)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_of_a_model_that_reads_images_the_text_model_is_served(name: str, tmp_path: Path) -> None:
    family, around = WITH_IMAGES[name]
    _, text_class, own = FAMILIES[family]
    # The prompt has none of these tokens.
    tokens = {"image_token_index": 317, "boi_token_index": 318, "eoi_token_index": 319}
    text_config = text_class(**(tiny_shape() | own)).to_dict()
    config = getattr(transformers, f"{name}Config")(text_config=text_config, **around, **tokens)
    model_class: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    check_logits(write_model(tmp_path, model), model_class)


def test_of_gemma_3n_the_text_model_is_served_without_the_libraries_of_its_towers(tmp_path: Path) -> None:
    _, text_class, own = FAMILIES["gemma3n"]
    text_config = text_class(**(tiny_shape() | own))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_model(tmp_path / "text", transformers.Gemma3nForCausalLM(text_config))
    around = transformers.Gemma3nConfig(text_config=text_config.to_dict())
    around.save_pretrained(tmp_path / "whole")
    weights = load_file(tmp_path / "text" / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    tower = {"model.vision_tower.timm_model.conv_stem.conv.weight": torch.zeros(1)}
    save_file(named | tower, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    model, expected = (load_model(tmp_path / name) for name in ("whole", "text"))
    assert model.architecture == "Gemma3nForCausalLM"
    groups = model.cache_spec.groups
    cache = KVCache(model.cache_spec, 4 * len(groups))
    tables = [range(4 * group, 4 * group + 3) for group in range(len(groups))]
    batch = build_batch([Chunk(prompt(40, seed=7), 0, tables, needs_logits=True)], groups=groups)
    assert torch.equal(model.forward(batch, cache), expected.forward(batch, cache))


def test_a_model_that_does_not_generate_text_is_refused_by_name(tmp_path: Path) -> None:
    shape = VISION | {"intermediate_size": 32}
    write_model(tmp_path, transformers.ViTModel(transformers.ViTConfig(**shape)))
    with pytest.raises(UnsupportedModelError, match="'vit' cannot be served: it does not generate text"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("StableLm", "does not pass keyword arguments on to its attention"),
        ("Mamba", "'mamba' cannot be served: all of its layers keep recurrent states, and none has attention"),
        ("Zamba2", "'zamba2' cannot be served: its attention layers share one block of weights"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(write(name, tmp_path, {"num_hidden_layers": 54} if name == "Zamba2" else {}))
