"""The parts of vLLM that do not work with Quire yet. The engine refuses them by name at its start."""

from __future__ import annotations

from typing import Any

from quire_vllm.pool import KINDS, is_cached_state
from quire_vllm.releases import UnsupportedError


def check_engine(vllm_config: Any, kv_cache_config: Any, *, hash_block_size: int) -> None:
    """Raises UnsupportedError if an enabled feature needs vLLM's own manager."""
    observed = vllm_config.observability_config
    speculative, groups = vllm_config.speculative_config, kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    specs = [group.kv_cache_spec for group in groups]
    others = sorted({type(spec).__name__ for spec in specs} - KINDS.keys())
    states = [spec for spec in specs if type(spec).__name__ == "MambaSpec"]
    sizes = [spec.block_size for spec in specs if is_cached_state(spec) or spec not in states]
    smallest = min(sizes, default=hash_block_size)
    block_size = vllm_config.cache_config.block_size
    is_cached = vllm_config.cache_config.enable_prefix_caching
    reasons = {
        "KV connectors (kv_transfer_config)": vllm_config.kv_transfer_config is not None,
        "residency metrics (kv_cache_metrics)": observed.kv_cache_metrics,
        "EAGLE and MTP speculation": speculative is not None and speculative.use_eagle(),
        "encoder-decoder models": vllm_config.model_config.is_encoder_decoder,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        f"KV cache groups of {', '.join(others)}": bool(others),
        ("windows that keep more tokens than they read"): any(
            getattr(spec, "extra_retained_tokens", 0) for spec in specs
        ),
        "states whose size differs from a block's": any(map(is_cached_state, states)) and len({*sizes, block_size}) > 1,
        "speculation with recurrent states": any(spec.num_speculative_blocks for spec in states),
        "replayed states (use_replayssm)": bool(states) and vllm_config.cache_config.use_replayssm,
        f"hashes of {hash_block_size} tokens for blocks of {smallest}": is_cached and hash_block_size != smallest,
        "blocks that are not multiples of the smallest": any(size % smallest for size in sizes),
    }
    refused = [name for name, is_on in reasons.items() if is_on]
    if refused:
        raise UnsupportedError(f"quire_vllm does not support {', '.join(refused)}; run without --scheduler-cls")
