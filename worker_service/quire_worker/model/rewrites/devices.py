"""Choice of the rewrites for a device. No other module chooses rewrites."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from quire_cpu.interface import DTYPES

from quire_worker.attention import CpuPagedAttention, PagedAttention, TorchPagedAttention
from quire_worker.model.rewrites.recording import Recording
from quire_worker.model.rewrites.rewriter import Rewritten, rewrite

# Takes a model, and a function that makes it compute one batch.
RewriteModel: TypeAlias = Callable[[torch.nn.Module, Callable[[Recording], object]], Rewritten]


def rewrite_for(attention: PagedAttention, dtype: torch.dtype) -> RewriteModel | None:
    """Returns the rewriting pass for models with this attention and dtype; None if their modules stay unchanged."""
    if isinstance(attention, CpuPagedAttention):
        return partial(_for_cpu, attention) if dtype in DTYPES else None
    if isinstance(attention, TorchPagedAttention):
        return None
    from quire_worker.model.rewrites.on_gpu import rewrite_for_gpu  # needs Triton, as this kind of attention does

    return rewrite_for_gpu


def _for_cpu(attention: CpuPagedAttention, module: torch.nn.Module, run: Callable[[Recording], object]) -> Rewritten:
    return rewrite(module, attention.library, run)
