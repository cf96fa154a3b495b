"""What a model gives by itself, which pages, ranks and kernels are compared with at load."""

from __future__ import annotations

from typing import Any

import torch

from quire_worker.model.transformers_seam import ATTENTION_NAME

CHECK_TOKENS = 24  # of each sequence


def check_texts(vocab_size: int, max_position: int) -> tuple[list[int], list[int]]:
    """Returns two sequences of one length."""
    first = [(7 * i + 1) % vocab_size for i in range(min(CHECK_TOKENS, max_position))]
    return first, first[::-1]


def own_logits_of(module: Any, texts: tuple[list[int], list[int]]) -> torch.Tensor:
    """Returns what transformers' own attention gives after each of the two sequences, `[2, vocabulary]`."""
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: torch.Tensor = module(torch.tensor(texts, device=module.device), use_cache=False).logits[:, -1]
            return logits.float()
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
