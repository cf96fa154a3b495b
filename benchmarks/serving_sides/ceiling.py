"""A GPU's limits. A decode pass must read all weights, keys and values once; a prompt needs all its multiplications."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

COPY_BYTES, MATRIX_SIZE, ROUNDS = 1 << 30, 8192, 20


class Chip(NamedTuple):
    """The speed of a GPU.

    Attributes:
        copied_bytes_per_s: bytes read and written per second in a large copy.
        multiplied_per_s: operations per second of a large matrix product in bfloat16.
    """

    copied_bytes_per_s: float
    multiplied_per_s: float


def chip() -> Chip:
    """Measures this machine's first GPU; returns medians of 20 runs."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    copy_s = _seconds(lambda: target.copy_(source))
    product_s = _seconds(lambda: torch.mm(a, b, out=product))
    return Chip(2 * COPY_BYTES / copy_s, 2 * MATRIX_SIZE**3 / product_s)


def _seconds(run: Callable[[], object]) -> float:
    import torch

    times_ms = []
    for _ in range(ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return statistics.median(times_ms[2:]) / 1e3


class Bounds:
    """The least time that a Llama's passes take on a chip. The embedding's rows for new tokens are not counted. The
    head is read whole, and multiplied only with a prompt's last token."""

    def __init__(self, folder: Path, speed: Chip, *, element_bytes: int) -> None:
        """Reads a checkpoint's configuration. `element_bytes` is the size of an element of weights, keys and values."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv = config["num_key_value_heads"] * head_dim
        self._speed = speed
        self._element_bytes = element_bytes
        self._layers: int = config["num_hidden_layers"]
        self._query = heads * head_dim  # elements of one token's queries
        self._kept = 2 * kv  # cached elements of one token in one layer
        self._layer = hidden * (2 * self._query + 2 * kv + 3 * config["intermediate_size"])  # parameters of one layer
        self._head = config["vocab_size"] * hidden

    def decode_s(self, sequences: int, tokens: int) -> float:
        """Returns the least time of one decode pass: the time to read its bytes, for sequences of this average
        length."""
        pages = sequences * tokens * self._layers * self._kept
        read = self._element_bytes * (self._layers * self._layer + self._head + pages)
        return read / self._speed.copied_bytes_per_s

    def prompt_s(self, tokens: int) -> float:
        """Returns the least time of a prompt. A pass has two operations for each parameter and token, and four for each
        pair of a query's and a key's element within the causal mask."""
        pairs = tokens * (tokens + 1) // 2
        products = 2 * (self._layers * self._layer * tokens + self._head)
        return (products + 4 * self._layers * self._query * pairs) / self._speed.multiplied_per_s
