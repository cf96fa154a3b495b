"""Paged attention: keys and values written to pages, and queries attending over them.

Two things. For the worker, `backend_for`: one interface (`interface.py`), one file per implementation, chosen by
device. For others, the Triton kernels under FlashInfer's names: a program that uses FlashInfer changes its import line,

    from quire_worker.attention import BatchDecodeWithPagedKVCacheWrapper, append_paged_kv_cache

Those are loaded when first asked for: they need Triton, which a worker on a CPU does not.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import structlog
import torch
from quire_cpu.library import Library, load

from quire_worker.attention.cpu_path import CpuPagedAttention
from quire_worker.attention.interface import AttentionBatch, AttentionPlan, PagedAttention
from quire_worker.attention.torch_path import TorchPagedAttention

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

    from quire_worker.attention.triton_path import TritonPagedAttention

log = structlog.get_logger()

__all__ = [
    "AttentionBatch",
    "AttentionKind",
    "AttentionPlan",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CpuPagedAttention",
    "LatentKind",
    "MultiLevelCascadeAttentionWrapper",
    "PagedAttention",
    "TorchPagedAttention",
    "TritonPagedAttention",
    "append_paged_kv_cache",
    "backend_for",
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

# Where each name lives that needs Triton.
_MODULES = {
    "AttentionKind": "quire_kernels.compilation.kinds",
    "BatchDecodeWithPagedKVCacheWrapper": "quire_kernels.flashinfer.decode",
    "BatchMLAPagedAttentionWrapper": "quire_kernels.flashinfer.mla",
    "BatchPrefillWithPagedKVCacheWrapper": "quire_kernels.flashinfer.prefill",
    "BatchPrefillWithRaggedKVCacheWrapper": "quire_kernels.flashinfer.ragged",
    "LatentKind": "quire_kernels.compilation.kinds",
    "MultiLevelCascadeAttentionWrapper": "quire_kernels.flashinfer.cascade",
    "TritonPagedAttention": "quire_worker.attention.triton_path",
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES)


def backend_for(device: torch.device | str) -> PagedAttention:
    """Returns a new implementation for a device, with a workspace of its own: the only place that chooses.

    A GPU gets the Triton kernels; a CPU those of `quire_cpu`, or plain torch where these can be neither found nor made.
    Where the environment has `TRITON_INTERPRET=1`, a CPU gets the Triton kernels, run by Triton's interpreter: slow,
    and how everything around them is tested without a GPU.

    Raises:
        ValueError: there is none for this kind of device, or Triton is not installed.
    """
    kind = torch.device(device).type
    if kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        library = load()
        if isinstance(library, Library):
            return CpuPagedAttention(library)
        log.warning("no CPU kernels: plain torch computes instead, at about half the speed", reason=library.reason)
        return TorchPagedAttention()
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"no paged attention for device {kind!r}: available for cpu and cuda")
    try:
        from quire_worker.attention.triton_path import TritonPagedAttention
    except ImportError as error:
        raise ValueError(f"paged attention for device {kind!r} needs Triton: {error}") from error
    return TritonPagedAttention(device)
