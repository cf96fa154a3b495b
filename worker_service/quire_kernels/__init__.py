"""Triton kernels for paged attention, under FlashInfer's names: a program that uses FlashInfer changes its import line.

    from quire_kernels import BatchDecodeWithPagedKVCacheWrapper, append_paged_kv_cache

`ops` has one kernel a file, `flashinfer` the wrappers with FlashInfer's arguments, `warmup` compiles ahead of the first
request. Each name is loaded when it is first asked for, because all of them need Triton.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_kernels.compilation.kinds import AttentionKind, LatentKind
    from quire_kernels.compilation.warmup import count_compilations, warmup
    from quire_kernels.flashinfer.cascade import MultiLevelCascadeAttentionWrapper
    from quire_kernels.flashinfer.cascade_gains import cascade_gains
    from quire_kernels.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    from quire_kernels.flashinfer.mla import BatchMLAPagedAttentionWrapper
    from quire_kernels.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
    from quire_kernels.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
    from quire_kernels.ops.append_paged_kv_cache import append_paged_kv_cache
    from quire_kernels.ops.copy_blocks import copy_blocks
    from quire_kernels.ops.gated_activation import gelu_tanh_and_mul, silu_and_mul
    from quire_kernels.ops.merge_states import merge_state, merge_state_in_place, merge_states
    from quire_kernels.ops.pack_mask import packbits, segment_packbits
    from quire_kernels.ops.rms_norm import gemma_rmsnorm, rmsnorm
    from quire_kernels.ops.rotate_append import rotate_append
    from quire_kernels.ops.sampling import greedy, sample
    from quire_kernels.ops.swap_blocks import gather_blocks, scatter_blocks
    from quire_kernels.ops.token_positions import get_batch_indices_positions, get_seq_lens

__all__ = [
    "AttentionKind",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "LatentKind",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "cascade_gains",
    "copy_blocks",
    "count_compilations",
    "gather_blocks",
    "gelu_tanh_and_mul",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "greedy",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "rmsnorm",
    "rotate_append",
    "sample",
    "scatter_blocks",
    "segment_packbits",
    "silu_and_mul",
    "warmup",
]

_MODULES = {
    "AttentionKind": "quire_kernels.compilation.kinds",
    "BatchDecodeWithPagedKVCacheWrapper": "quire_kernels.flashinfer.decode",
    "BatchMLAPagedAttentionWrapper": "quire_kernels.flashinfer.mla",
    "BatchPrefillWithPagedKVCacheWrapper": "quire_kernels.flashinfer.prefill",
    "BatchPrefillWithRaggedKVCacheWrapper": "quire_kernels.flashinfer.ragged",
    "LatentKind": "quire_kernels.compilation.kinds",
    "MultiLevelCascadeAttentionWrapper": "quire_kernels.flashinfer.cascade",
    "append_paged_kv_cache": "quire_kernels.ops.append_paged_kv_cache",
    "cascade_gains": "quire_kernels.flashinfer.cascade_gains",
    "copy_blocks": "quire_kernels.ops.copy_blocks",
    "gelu_tanh_and_mul": "quire_kernels.ops.gated_activation",
    "gemma_rmsnorm": "quire_kernels.ops.rms_norm",
    "rmsnorm": "quire_kernels.ops.rms_norm",
    "rotate_append": "quire_kernels.ops.rotate_append",
    "silu_and_mul": "quire_kernels.ops.gated_activation",
    "count_compilations": "quire_kernels.compilation.warmup",
    "gather_blocks": "quire_kernels.ops.swap_blocks",
    "get_batch_indices_positions": "quire_kernels.ops.token_positions",
    "get_seq_lens": "quire_kernels.ops.token_positions",
    "greedy": "quire_kernels.ops.sampling",
    "merge_state": "quire_kernels.ops.merge_states",
    "merge_state_in_place": "quire_kernels.ops.merge_states",
    "merge_states": "quire_kernels.ops.merge_states",
    "packbits": "quire_kernels.ops.pack_mask",
    "sample": "quire_kernels.ops.sampling",
    "scatter_blocks": "quire_kernels.ops.swap_blocks",
    "segment_packbits": "quire_kernels.ops.pack_mask",
    "warmup": "quire_kernels.compilation.warmup",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("quire-kv")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES)
