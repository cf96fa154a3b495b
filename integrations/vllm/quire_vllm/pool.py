"""The specification of a pool, from vLLM's configuration."""

from __future__ import annotations

import hashlib
from typing import Any

from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec


def pool_spec(vllm_config: Any, kv_cache_config: Any, *, first_block: int) -> PoolSpec:
    """Returns the pool that an engine's KV cache is, without the blocks below `first_block`."""
    (group,) = kv_cache_config.kv_cache_groups
    block_count = kv_cache_config.num_blocks - first_block
    return PoolSpec(
        block_count=block_count,
        groups=(GroupSpec(GroupKind.FULL_ATTENTION, group.kv_cache_spec.block_size),),
        cache_layout=layout(group.kv_cache_spec),
        model_fingerprint=fingerprint(vllm_config.model_config),
        watermark_block_count=int(vllm_config.scheduler_config.watermark * kv_cache_config.num_blocks),
        append_only=True,
    )


def layout(spec: Any) -> str:
    """Names what a page consists of: pages of one layout can be read by each other's engines."""
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"vllm {dtype} {spec.num_kv_heads}x{spec.head_size} {spec.page_size_bytes}"


def fingerprint(model_config: Any) -> bytes:
    """Returns 32 bytes that stand for the model: its name or folder, its revision, and how its weights are kept."""
    parts = (model_config.model, model_config.revision, model_config.dtype, model_config.quantization)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
