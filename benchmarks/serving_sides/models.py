"""Checkpoints of random weights, for measurements that do not depend on the text.

llama-32m     large enough that matrices cost more than Python: with 512 hidden dimensions and 8 layers, a decode
              step of 32 requests spends most of its time in matrix products. The 3.5 M demo model does not.
mistral-32m   the same shape, with windows of 64 tokens in its layers
bamba-35m     recurrent states of Mamba 2 in six layers of eight
llama-8b      the shape of Llama 3.1 8B, for a GPU
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"

_32M: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
_MAMBA2: dict[str, Any] = {
    "attn_layer_indices": [2, 6],
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65_536,
    "rope_theta": 500_000.0,
}
MADE: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-32m": ("Llama", _32M, "float32"),
    "mistral-32m": ("Mistral", {**_32M, "sliding_window": 64}, "float32"),
    "bamba-35m": ("Bamba", _32M | _MAMBA2, "float32"),
    "llama-8b": ("Llama", _8B, "bfloat16"),
}


def make_model(name: str, folder: Path) -> Path:
    """Returns the folder of a model. The demo model has its own folder. A model of `MADE` is written to `folder`, with
    the demo model's tokenizer. Any other name is a folder already.

    A 32 M model has 8,192 x 512 parameters in each of its two embeddings, and 2,949,120 in each of its 8 layers.
    """
    if name not in MADE:
        return DEMO if name == "demo" else Path(name)
    import torch
    import transformers

    family, shape, dtype = MADE[name]
    config = getattr(transformers, f"{family}Config")(
        **shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, dtype=dtype
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # Avoids making 8 B parameters in float32.
    try:
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(default)
    _copy_tokenizer(folder)
    return folder


def describe_model(name: str, folder: Path) -> Path:
    """Writes a model of `MADE` without weights. `dummy` draws the weights on a GPU: that takes a second for 16 GB, and
    reading them from files takes minutes."""
    import torch
    import transformers
    from safetensors.torch import save_file

    family, shape, dtype = MADE[name]
    config = getattr(transformers, f"{family}Config")(
        **shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, dtype=dtype,
        architectures=[f"{family}ForCausalLM"],
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=None).save_pretrained(folder)
    save_file({"dummy": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    _copy_tokenizer(folder)
    return folder


def weight_bytes(folder: Path) -> int:
    """Counts the bytes of the weights of a model that `describe_model` wrote."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters()) * config.dtype.itemsize


def dummy(folder: Path, device: str, dtype: Any, implementation: str) -> Any:
    """Returns the model of a folder with random weights, which transformers' initialization draws on the device."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    return model.eval()


def _copy_tokenizer(folder: Path) -> None:
    for name_of_file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name_of_file, folder / name_of_file)


def make_llama_32m(folder: Path) -> Path:
    """Writes `llama-32m` and returns its folder."""
    return make_model("llama-32m", folder)
