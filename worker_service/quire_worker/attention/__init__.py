"""Paged attention: keys and values written to pages, and queries attending over them.

One interface (`interface.py`) with one file per implementation; `backend_for` chooses by device. The Triton kernels are
a library of their own, `quire_kernels`, with FlashInfer's names.
"""

from __future__ import annotations

import os

import structlog
import torch
from quire_cpu.library import Library, load

from quire_worker.attention.cpu_path import CpuPagedAttention
from quire_worker.attention.interface import AttentionBatch, AttentionPlan, PagedAttention
from quire_worker.attention.torch_path import TorchPagedAttention

log = structlog.get_logger()

__all__ = [
    "AttentionBatch",
    "AttentionPlan",
    "CpuPagedAttention",
    "PagedAttention",
    "TorchPagedAttention",
    "backend_for",
]


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
