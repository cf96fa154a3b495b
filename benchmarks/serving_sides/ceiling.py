"""What a GPU's memory allows: every decode pass reads all weights and all keys and values once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COPY_BYTES = 1 << 30


def copied_bytes_per_s() -> float:
    """Reads and writes of a large copy on the GPU, in bytes a second; the best of ten."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 2e3 * COPY_BYTES / begin.elapsed_time(end))
    return best


def decode_bytes(folder: Path, *, sequences: int, tokens: int, element_bytes: int) -> int:
    """Bytes that one decode pass of a Llama has to read.

    The embedding's rows for the new tokens count as nothing; the head is read whole.

    Args:
        folder: of the checkpoint.
        sequences: in the batch.
        tokens: of each sequence, on average while it decodes.
        element_bytes: of a weight, a key and a value.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head_dim
    layer = hidden * (heads * head_dim * 2 + 2 * kv + 3 * config["intermediate_size"])
    weights = layers * layer + config["vocab_size"] * hidden
    return element_bytes * (weights + sequences * tokens * layers * 2 * kv)
