"""The wrappers under their FlashInfer names, in one place."""

from __future__ import annotations

from quire_worker.kernels.cascade import MultiLevelCascadeAttentionWrapper
from quire_worker.kernels.decode_wrapper import BatchDecodeWithPagedKVCacheWrapper
from quire_worker.kernels.mla_wrapper import BatchMLAPagedAttentionWrapper
from quire_worker.kernels.prefill_wrapper import BatchPrefillWithPagedKVCacheWrapper
from quire_worker.kernels.ragged_wrapper import BatchPrefillWithRaggedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
]
