"""What of vLLM does not go together with Quire yet; it is refused by name when the engine starts."""

from __future__ import annotations

from typing import Any, Final

from quire_vllm.releases import UnsupportedError

WINDOWED: Final = {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"}  # which vLLM can keep as full attention


def check_engine(vllm_config: Any, kv_cache_config: Any, *, block_size: int, hash_block_size: int) -> None:
    """Raises UnsupportedError if something is switched on that needs vLLM's own manager."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    observed = vllm_config.observability_config
    speculative, groups = vllm_config.speculative_config, kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    kinds = {type(group.kv_cache_spec) for group in groups}
    others = sorted(kind.__name__ for kind in kinds if kind is not FullAttentionSpec)
    reasons = {
        "KV connectors (kv_transfer_config)": vllm_config.kv_transfer_config is not None,
        "residency metrics (kv_cache_metrics)": observed.kv_cache_metrics,
        "EAGLE and MTP speculation": speculative is not None and speculative.use_eagle(),
        "encoder-decoder models": vllm_config.model_config.is_encoder_decoder,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        f"KV cache groups of {', '.join(others)}": bool(others),
        f"models of {len(groups)} KV cache groups": len(groups) != 1 and not others,
        f"hashes of {hash_block_size} tokens for blocks of {block_size}": hash_block_size != block_size,
    }
    refused = [name for name, is_on in reasons.items() if is_on]
    if refused:
        way_out = "run without --scheduler-cls"
        if others and set(others) <= WINDOWED:
            way_out = (
                f"run with --disable-hybrid-kv-cache-manager, which makes one group of full attention, or {way_out[4:]}"
            )
        raise UnsupportedError(f"quire_vllm does not support {', '.join(refused)}; {way_out}")
