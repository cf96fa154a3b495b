"""The specification of a pool, from vLLM's configuration."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple


class PoolShape(NamedTuple):
    """What both sides say of a pool of one group of full attention; fields as in `quire.PoolSpec`."""

    block_count: int
    block_size: int
    cache_layout: str
    model_fingerprint: bytes
    watermark_block_count: int
    first_block_id: int
    tells_removed: bool


def pool_shape(vllm_config: Any, kv_cache_config: Any, *, first_block: int) -> PoolShape:
    """Returns the pool that an engine's KV cache is, without the blocks below `first_block`."""
    (group,) = kv_cache_config.kv_cache_groups
    events = vllm_config.kv_events_config
    return PoolShape(
        kv_cache_config.num_blocks - first_block,
        group.kv_cache_spec.block_size,
        layout(group.kv_cache_spec),
        fingerprint(vllm_config.model_config),
        int(vllm_config.scheduler_config.watermark * kv_cache_config.num_blocks),
        first_block,
        events is not None and bool(events.enable_kv_cache_events),
    )


def layout(spec: Any) -> str:
    """Names what a page consists of: pages of one layout can be read by each other's engines."""
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"vllm {dtype} {spec.num_kv_heads}x{spec.head_size} {spec.page_size_bytes}"


def fingerprint(model_config: Any) -> bytes:
    """Returns 32 bytes that stand for the model: its name or folder, its revision, and how its weights are kept."""
    parts = (model_config.model, model_config.revision, model_config.dtype, model_config.quantization)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
