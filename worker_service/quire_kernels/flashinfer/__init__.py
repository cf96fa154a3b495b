"""FlashInfer's names and arguments over the kernels of `ops`."""

from __future__ import annotations

from quire_kernels.flashinfer.cascade import MultiLevelCascadeAttentionWrapper
from quire_kernels.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from quire_kernels.flashinfer.mla import BatchMLAPagedAttentionWrapper
from quire_kernels.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire_kernels.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
]
