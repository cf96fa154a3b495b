"""The specification of a pool, from vLLM's configuration."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final, NamedTuple

KINDS: Final = {  # vLLM's specification -> kind of Quire's group, attribute that holds the window
    "FullAttentionSpec": ("full_attention", ""),
    "SlidingWindowSpec": ("sliding_window", "sliding_window"),
    "ChunkedLocalAttentionSpec": ("chunked_local", "attention_chunk_size"),
    "MambaSpec": ("full_attention", ""),  # one block per live request; states in a prefix cache have `STATE_WINDOW`
}


# A state summarizes all previous tokens for its layers, and is in the block of the last token. So a prompt that
# continues a prefix needs only the last block of the prefix. A window of 2 tokens needs the same block: it reads one
# token back.
STATE_WINDOW: Final = 2


class GroupShape(NamedTuple):
    """One KV cache group: the value of its `GroupKind`, tokens per block, and tokens per window."""

    kind: str
    block_size: int
    window: int

    def first_block(self, token_count: int) -> int:
        """Returns the first block of a windowed group that the token after `token_count` tokens reads."""
        if self.kind == "chunked_local":
            return token_count // self.window * self.window // self.block_size
        return max(0, token_count - self.window + 1) // self.block_size


class PoolShape(NamedTuple):
    """The pool's shape for both kinds of pools; fields as in `quire.PoolSpec`.

    `chunk_token_count` is the largest part of a prompt that unfinished turns compute while blocks fall out of windows.
    The chunk is 0 without windows: prompts then get all blocks at once. With `caches_states`, a prompt's pass ends at
    the next block edge at the latest.
    """

    block_count: int
    groups: tuple[GroupShape, ...]
    chunk_token_count: int
    cache_layout: str
    model_fingerprint: bytes
    watermark_block_count: int
    first_block_id: int
    tells_removed: bool
    caches_states: bool

    @property
    def edge_tokens(self) -> int:
        """Returns the number of tokens after which the blocks of all groups end together."""
        return math.lcm(*[group.block_size for group in self.groups])

    @property
    def digest_tokens(self) -> int:
        """Returns the number of tokens per digest."""
        return min(group.block_size for group in self.groups)


def pool_shape(vllm_config: Any, kv_cache_config: Any, *, first_block: int) -> PoolShape:
    """Returns the shape of an engine's KV cache as a pool, without the blocks below `first_block`."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    smallest = min(spec.block_size for spec in specs)
    groups = tuple(group_shape(spec, smallest) for spec in specs)
    events = vllm_config.kv_events_config
    chunk, caches_states = 0, any(map(is_cached_state, specs))
    if caches_states:
        passes = -(-vllm_config.max_in_flight_tokens // vllm_config.scheduler_config.max_num_batched_tokens)
        chunk = passes * smallest
    elif any(group.window for group in groups):
        chunk = vllm_config.max_in_flight_tokens
    return PoolShape(
        kv_cache_config.num_blocks - first_block,
        groups,
        chunk,
        " + ".join(map(layout, specs)),
        fingerprint(vllm_config.model_config),
        int(vllm_config.scheduler_config.watermark * kv_cache_config.num_blocks),
        first_block,
        events is not None and bool(events.enable_kv_cache_events),
        caches_states,
    )


def is_cached_state(spec: Any) -> bool:
    """Returns whether a specification is for states that are cached at block edges."""
    return type(spec).__name__ == "MambaSpec" and spec.mamba_cache_mode == "align"


def group_shape(spec: Any, smallest: int) -> GroupShape:
    """Returns Quire's description of a vLLM specification that `KINDS` names. The block of a state is as large as the
    longest request, and so may not be a multiple of the smallest block."""
    name = type(spec).__name__
    kind, window = KINDS[name]
    size = spec.block_size
    if name == "MambaSpec":
        if is_cached_state(spec):
            return GroupShape("sliding_window", size, STATE_WINDOW)
        size = -(-size // smallest) * smallest
    return GroupShape(kind, size, getattr(spec, window) if window else 0)


def layout(spec: Any) -> str:
    """Returns the name of a page's layout. Engines can read each other's pages of the same layout."""
    if type(spec).__name__ == "MambaSpec":
        dtypes = ",".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        return f"vllm {spec.mamba_type} {dtypes} {spec.shapes} {spec.page_size_bytes}"
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"vllm {dtype} {spec.num_kv_heads}x{spec.head_size} {spec.page_size_bytes}"


def fingerprint(model_config: Any) -> bytes:
    """Returns 32 bytes that identify the model: its name or folder, its revision, and the format of its weights."""
    parts = (model_config.model, model_config.revision, model_config.dtype, model_config.quantization)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
