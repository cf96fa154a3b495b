"""Checkpoints with the same or nearly the same texts as the demo model, at other costs.

deep      the demo model with more layers that add nothing: the same text at a multiple of the cost, like a large model
          beside a small one that agrees with it
shallow   only the first layers of the demo model, under the same head: their likeliest token is sometimes right
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from serving_sides.models import DEMO


def make_deep(folder: Path, layer_count: int) -> Path:
    """Writes the demo model with `layer_count` layers and returns its folder. The additional layers add zeros."""
    import torch

    model = _demo()
    own = len(model.model.layers)
    for number in range(own, layer_count):
        layer = copy.deepcopy(model.model.layers[number % own])
        layer.self_attn.layer_idx = number
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.layers.append(layer)
    return _write(model, layer_count, folder)


def make_shallow(folder: Path, layer_count: int) -> Path:
    """Writes the first layers of the demo model as a separate model, and returns its folder."""
    model = _demo()
    del model.model.layers[layer_count:]
    return _write(model, layer_count, folder)


def _demo() -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def _write(model: Any, layer_count: int, folder: Path) -> Path:
    model.config.num_hidden_layers = layer_count
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = ["full_attention"] * layer_count
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder
