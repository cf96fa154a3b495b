"""Paged attention: keys and values written to pages, and queries attending over them.

The public names of the package; one file per implementation, chosen by device.
"""

from __future__ import annotations

import torch

from quire_worker.attention.interface import AttentionBatch, AttentionPlan, PagedAttention
from quire_worker.attention.torch_path import TorchPagedAttention

__all__ = ["AttentionBatch", "AttentionPlan", "PagedAttention", "TorchPagedAttention", "backend_for"]


def backend_for(device: torch.device | str) -> PagedAttention:
    """A new implementation for a device, with a workspace of its own.

    Raises:
        ValueError: there is none for this kind of device.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return TorchPagedAttention()
    raise ValueError(f"no paged attention for device {kind!r}: available for cpu")
