"""Paged attention: keys and values written to pages, and queries attending over them.

There is one interface (`interface.py`) and one file per implementation; `backend_for` chooses by device. The Triton
kernels are in a separate library, `quire_kernels`, with FlashInfer's names.
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
    """Returns a new implementation for a device, with its own workspace. No other code chooses an implementation.

    A GPU gets the Triton kernels. A CPU gets the kernels of `quire_cpu`, or plain torch if these kernels are not found
    and cannot be built. With `TRITON_INTERPRET=1` in the environment, a CPU runs the Triton kernels in Triton's
    interpreter. The interpreter is slow; tests use it to run the GPU path without a GPU.

    Raises:
        ValueError: no implementation supports this kind of device, or Triton is not installed.
    """
    kind = torch.device(device).type
    if kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        library = load()
        if isinstance(library, Library):
            return CpuPagedAttention(library)
        log.warning(
            ("there are no CPU kernels: plain torch computes instead, at about half the speed"), reason=library.reason
        )
        return TorchPagedAttention()
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {kind!r} has no paged attention: use cpu or cuda")
    try:
        from quire_worker.attention.triton_path import TritonPagedAttention
    except ImportError as error:
        raise ValueError(f"paged attention for device {kind!r} needs Triton: {error}") from error
    return TritonPagedAttention(device)
