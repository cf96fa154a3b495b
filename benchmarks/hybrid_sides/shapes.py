"""The cached bytes of a model's layers, and the pages that Quire's planner puts them into.

Every side gets the same bytes and has its own layout: Quire's pool from `quire.planning`, vLLM's pool from vLLM
(`vllm_side.py`). The optimum has no layout, because it counts bytes of tokens and states.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from quire.planning import LayerSpec, Layout, plan_layout, read_config
from quire.types import GroupKind

CONFIGS: Final = Path(__file__).parents[2] / "tests" / "client" / "configs"
STATE_DTYPE: Final = "bfloat16"  # vLLM's default dtype of states
WINDOW_TOKENS: Final = 1_024  # window of the one shape that belongs to no real model


@dataclass(frozen=True)
class Shape:
    """The layers of one model on one rank.

    Attributes:
        name: the name on the command line.
        layers: the layers that cache something.
    """

    name: str
    layers: tuple[LayerSpec, ...]

    @cached_property
    def layout(self) -> Layout:
        """Returns the groups and pages that `quire plan` proposes."""
        return plan_layout(self.layers)

    @cached_property
    def full_token_bytes(self) -> int:
        """Counts the bytes of a token in all layers of full attention."""
        return sum(layer.token_bytes for layer in self.layers if layer.kind is GroupKind.FULL_ATTENTION)

    @cached_property
    def windowed_token_bytes(self) -> int:
        """Counts the bytes of a token in all layers with a window."""
        return sum(layer.token_bytes for layer in self.layers if layer.window)

    @cached_property
    def window(self) -> int:
        """Returns the longest window in tokens; 0 without windows."""
        return max(layer.window for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        """Counts the bytes of one checkpoint in all layers with states; 0 without states."""
        return sum(layer.state_bytes for layer in self.layers)

    def tail_bytes(self, token_count: int) -> int:
        """Counts the bytes that a prefix of this many tokens needs in addition to full attention, so that a prompt can
        continue there.

        The next token reads the `window - 1` tokens before it (fewer in a short prefix), and one state. With windows
        of 1,024 in five layers of 4 KiB a token, a prefix of 8,192 tokens needs 5 * 1,023 * 4 KiB, 20 MiB.
        """
        windowed = [layer for layer in self.layers if layer.window]
        kept = sum(min(token_count, layer.window - 1) * layer.token_bytes for layer in windowed)
        return kept + self.state_bytes

    def running_bytes(self, token_count: int, pass_token_count: int) -> int:
        """Counts the bytes of a request of this many tokens during its last pass. The request has three states: the
        first one, the running one, and a checkpoint."""
        windowed = [layer for layer in self.layers if layer.window]
        kept = sum(min(token_count, layer.window + pass_token_count) * layer.token_bytes for layer in windowed)
        return token_count * self.full_token_bytes + kept + 3 * self.state_bytes


def _of_config(name: str, file: str) -> Shape:
    return Shape(name, read_config(json.loads((CONFIGS / file).read_text()), state_dtype=STATE_DTYPE).layers)


def _full_and_windows() -> Shape:
    kinds = [GroupKind.FULL_ATTENTION] + [GroupKind.SLIDING_WINDOW] * 5
    layers = [
        LayerSpec(number, kind, kv_head_count=8, head_dim=128, window=WINDOW_TOKENS if number else 0)
        for number, kind in enumerate(kinds)
    ]
    return Shape("full+5x1024", tuple(layers))


def states_alone() -> Shape:
    """Returns the shape of a model that keeps only states: bamba's, without its attention."""
    layers = _of_config("bamba", "bamba-9b.json").layers
    return Shape("states alone", tuple([layer for layer in layers if layer.kind is GroupKind.STATE]))


def all_shapes() -> dict[str, Shape]:
    """Returns every shape with full attention by its name."""
    shapes = [
        _full_and_windows(),
        _of_config("gpt-oss-20b", "gpt-oss-20b.json"),
        _of_config("gemma-3-27b", "gemma-3-27b.json"),
        _of_config("qwen3-next", "qwen3-next-80b.json"),
        _of_config("bamba", "bamba-9b.json"),
    ]
    return {shape.name: shape for shape in shapes}
