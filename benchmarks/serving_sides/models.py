"""Checkpoints of random weights, for questions to which the text does not matter.

llama-32m     large enough that matrices weigh more than Python: with 512 hidden dimensions and 8 layers a decode
              step of 32 requests spends most of its time in matrix products; the 3.5 M demo model between them
mistral-32m   the same shape, whose layers see windows of 64 tokens
bamba-35m     recurrent states of Mamba 2 in six layers of eight
llama-8b      the shape of Llama 3.1 8B, for a GPU
"""

from __future__ import annotations

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LAST_FILE = "tokenizer.json"  # that a checkpoint gets
WRITERS = 8  # threads
PIECE_BYTES = 64 << 20  # that a thread has on its way
FILE_BYTES = 1 << 30  # of weights that are drawn at once
INITIAL = 0.02  # standard deviation, as transformers draws weights

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
    """Returns the folder of a model: of the demo model its own, of one of `MADE` the given one, where it is written
    with the demo model's tokenizer. Any other name is a folder.

    The parameters of the models of 32 M are 8,192 x 512 for each of the two embeddings and 2,949,120 for each of the 8
    layers.
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
    torch.set_default_dtype(getattr(torch, dtype))  # a model of 8 B parameters is not made in float32 first
    try:
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(default)
    _copy_tokenizer(folder)
    return folder


def draw_model(name: str, folder: Path, device: str) -> Path:
    """Writes one of `MADE` with weights that are drawn on a device and written by several threads: 16 GB in seconds,
    where `make_model` takes minutes. Its norms are 1; all else is normal, with a standard deviation of 0.02."""
    import torch
    import transformers

    family, shape, dtype = MADE[name]
    config = getattr(transformers, f"{family}Config")(
        **shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, dtype=dtype,
        architectures=[f"{family}ForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    element = getattr(torch, dtype)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    taken = 0
    for key, of_tensor in shapes.items():
        taken += math.prod(of_tensor) * element.itemsize
        if files[-1] and taken > FILE_BYTES * len(files):
            files.append({})
        files[-1][key] = of_tensor
    names = [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=None).save_pretrained(folder)
    with ThreadPoolExecutor(WRITERS) as threads:
        begun = [
            threads.submit(_draw_file, folder / named, file, element, device)
            for named, file in zip(names, files, strict=True)
        ]
        for each in begun:
            each.result()
    weight_map = {key: named for named, file in zip(names, files, strict=True) for key in file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _copy_tokenizer(folder)
    return folder


def _draw_file(path: Path, shapes: dict[str, tuple[int, ...]], element: Any, device: str) -> None:
    """Writes tensors as safetensors does, a piece of them at a time, which is in pinned memory on its way."""
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        start, end = end, end + math.prod(shape) * element.itemsize
        name = {torch.bfloat16: "BF16", torch.float32: "F32"}[element]
        header[key] = {"dtype": name, "shape": shape, "data_offsets": [start, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    piece = torch.empty(PIECE_BYTES // element.itemsize, dtype=element, pin_memory=device != "cpu")
    with path.open("wb", buffering=0) as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for shape in shapes.values():
            count = math.prod(shape)
            flat = torch.ones(count, dtype=element, device=device)
            if len(shape) > 1:
                flat.normal_(0.0, INITIAL)
            for part in flat.split(len(piece)):
                file.write(piece[: len(part)].copy_(part).view(torch.uint8).numpy().data)


def _copy_tokenizer(folder: Path) -> None:
    for name_of_file in ("tokenizer_config.json", LAST_FILE):
        shutil.copy(DEMO / name_of_file, folder / name_of_file)


def make_llama_32m(folder: Path) -> Path:
    """Writes `llama-32m` and returns its folder."""
    return make_model("llama-32m", folder)
