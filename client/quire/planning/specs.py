"""Specifies the cache of one layer per token or per sequence, on one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire._numbers import require_integer
from quire.types import GroupKind

STATE_ALIGNMENT_BYTES: Final = 256  # alignment of each state's start, for wide loads
# Bytes per element, by the type names in configurations and on command lines.
ELEMENT_BYTES: Final = {
    "float32": 4,
    "fp32": 4,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


def element_bytes_of(dtype: str) -> int:
    """Returns the bytes of one element of a dtype.

    Raises:
        ValueError: the dtype is not in `ELEMENT_BYTES`.
    """
    name = dtype.removeprefix("torch.").lower()
    if name not in ELEMENT_BYTES:
        raise ValueError(f"dtype {dtype!r:.80} is not supported; supported are {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[name]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One cache of one layer. A layer with both attention and a state (Falcon-H1) has two caches.

    Attributes:
        layer: index in the model.
        kind: how the layer uses its blocks.
        kv_head_count: heads on this rank. Latent attention (MLA) has one head, which every rank keeps whole.
        head_dim: elements of a key.
        value_head_dim: elements of a value, if they differ from a key's. 0 for latent attention: one vector is both key
            and value.
        element_bytes: bytes of one element of keys and values.
        window: tokens, for SLIDING_WINDOW and CHUNKED_LOCAL; 0 otherwise.
        state_bytes: bytes of one sequence's state, for STATE; 0 otherwise.
        shared_with: index of another layer. This layer reads the other layer's keys and values, and takes no pages.

    Raises:
        ValueError: a size is missing, negative, or not applicable to the kind.
        TypeError: a size is not an integer.
    """

    layer: int
    kind: GroupKind
    kv_head_count: int = 0
    head_dim: int = 0
    value_head_dim: int | None = None
    element_bytes: int = 2
    window: int = 0
    state_bytes: int = 0
    shared_with: int | None = None

    def __post_init__(self) -> None:
        for name in ("layer", "kv_head_count", "head_dim", "element_bytes", "window", "state_bytes"):
            require_integer(name, getattr(self, name))
        for name in ("value_head_dim", "shared_with"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name))
        windowed = self.kind in {GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL}
        if windowed != (self.window > 0):
            raise ValueError(f"layer {self.layer}: {self.kind.name} cannot have a window of {self.window} tokens")
        if (self.kind is GroupKind.STATE) != (self.state_bytes > 0):
            raise ValueError(f"layer {self.layer}: {self.kind.name} cannot have {self.state_bytes} bytes of state")
        if (self.kind is GroupKind.STATE) == (self.token_bytes > 0):
            raise ValueError(f"layer {self.layer}: {self.kind.name} cannot have {self.token_bytes} bytes per token")

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of one token in this layer, keys and values together; 0 for a state."""
        value_head_dim = self.head_dim if self.value_head_dim is None else self.value_head_dim
        return self.kv_head_count * (self.head_dim + value_head_dim) * self.element_bytes

    @property
    def key_bytes(self) -> int:
        """Returns the bytes of one token's key; 0 for a state."""
        return self.kv_head_count * self.head_dim * self.element_bytes

    @property
    def aligned_state_bytes(self) -> int:
        """Returns the bytes of one state, rounded up to the alignment of states; 0 for attention."""
        return -(-self.state_bytes // STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES

    def live_bytes(self, token_count: int) -> int:
        """Returns the bytes that computing the last of `token_count` tokens reads and writes."""
        if token_count < 1:
            return 0
        tokens = token_count
        if self.kind is GroupKind.SLIDING_WINDOW:
            tokens = min(token_count, self.window)
        elif self.kind is GroupKind.CHUNKED_LOCAL:
            tokens = (token_count - 1) % self.window + 1
        return self.state_bytes + tokens * self.token_bytes
