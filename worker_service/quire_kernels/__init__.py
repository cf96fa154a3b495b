"""Triton kernels for paged attention, under FlashInfer's names: programs for FlashInfer need only another import line.

    from quire_kernels import BatchDecodeWithPagedKVCacheWrapper, append_paged_kv_cache

Every name here is FlashInfer's, with its arguments and defaults. `extra` has functions that FlashInfer lacks. `ops` has
one kernel per file, and `flashinfer` has the wrappers with FlashInfer's arguments. Each name is imported when it is
first used, because all of them need Triton.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_kernels.flashinfer.cascade import MultiLevelCascadeAttentionWrapper
    from quire_kernels.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    from quire_kernels.flashinfer.mla import BatchMLAPagedAttentionWrapper
    from quire_kernels.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
    from quire_kernels.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
    from quire_kernels.ops.append_paged_kv_cache import append_paged_kv_cache
    from quire_kernels.ops.gated_activation import gelu_tanh_and_mul, silu_and_mul
    from quire_kernels.ops.merge_states import merge_state, merge_state_in_place, merge_states
    from quire_kernels.ops.pack_mask import packbits, segment_packbits
    from quire_kernels.ops.rms_norm import gemma_rmsnorm, rmsnorm
    from quire_kernels.ops.token_positions import get_batch_indices_positions, get_seq_lens

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "gelu_tanh_and_mul",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "rmsnorm",
    "segment_packbits",
    "silu_and_mul",
]

_MODULES = {
    "BatchDecodeWithPagedKVCacheWrapper": "quire_kernels.flashinfer.decode",
    "BatchMLAPagedAttentionWrapper": "quire_kernels.flashinfer.mla",
    "BatchPrefillWithPagedKVCacheWrapper": "quire_kernels.flashinfer.prefill",
    "BatchPrefillWithRaggedKVCacheWrapper": "quire_kernels.flashinfer.ragged",
    "MultiLevelCascadeAttentionWrapper": "quire_kernels.flashinfer.cascade",
    "append_paged_kv_cache": "quire_kernels.ops.append_paged_kv_cache",
    "gelu_tanh_and_mul": "quire_kernels.ops.gated_activation",
    "gemma_rmsnorm": "quire_kernels.ops.rms_norm",
    "rmsnorm": "quire_kernels.ops.rms_norm",
    "silu_and_mul": "quire_kernels.ops.gated_activation",
    "get_batch_indices_positions": "quire_kernels.ops.token_positions",
    "get_seq_lens": "quire_kernels.ops.token_positions",
    "merge_state": "quire_kernels.ops.merge_states",
    "merge_state_in_place": "quire_kernels.ops.merge_states",
    "merge_states": "quire_kernels.ops.merge_states",
    "packbits": "quire_kernels.ops.pack_mask",
    "segment_packbits": "quire_kernels.ops.pack_mask",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("quire-kv")
    if name not in _MODULES:
        extra = importlib.import_module("quire_kernels.extra")
        if name == "extra":
            return extra
        of_ours = f": it is in {extra.__name__}" if name in extra.__all__ else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{of_ours}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES)
