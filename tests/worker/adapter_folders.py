"""Adapters that PEFT has saved, and the texts that PEFT itself generates with them, for comparison."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(folder: Path, base: Path, *, seed: int, targets: Any = LINEARS, **options: Any) -> Path:
    """Writes an adapter with random weights that are large enough to change the text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = LoraConfig(
            **{"r": 4, "lora_alpha": 6, "target_modules": targets, "init_lora_weights": False, "lora_dropout": 0.1}
            | options
        )
        adapted = get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(str(folder))
    return folder


def change_config(folder: Path, **entries: object) -> None:
    """Changes entries of an adapter's configuration."""
    config = json.loads((folder / CONFIG).read_bytes())
    (folder / CONFIG).write_text(json.dumps(config | entries))


@cache
def _adapted_model(base: Path, adapter: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(model, str(adapter)).eval()


@cache
def adapted_text(base: Path, adapter: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Returns the greedy tokens of PEFT's `generate`, without the end-of-text token."""
    output = (
        _adapted_model(base, adapter)
        .generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :]
        .tolist()
    )
    return tuple(output[: output.index(0)] if 0 in output else output)
