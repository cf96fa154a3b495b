"""Which rewrites there are for a device: the only place that chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from quire_cpu.interface import DTYPES

from quire_worker.attention import CpuPagedAttention, PagedAttention, TorchPagedAttention
from quire_worker.model.rewrites.recording import Recording
from quire_worker.model.rewrites.rewriter import Rewritten, rewrite

# Takes a model and what makes it compute one batch.
RewriteModel: TypeAlias = Callable[[torch.nn.Module, Callable[[Recording], object]], Rewritten]


def rewrite_for(attention: PagedAttention, dtype: torch.dtype) -> RewriteModel | None:
    """Returns the pass over a model of this dtype whose attention this is; None where its modules stay as they are."""
    if isinstance(attention, CpuPagedAttention):
        return partial(_for_cpu, attention) if dtype in DTYPES else None
    if isinstance(attention, TorchPagedAttention):
        return None
    from quire_worker.model.rewrites.on_gpu import rewrite_for_gpu  # needs Triton, as that attention does

    return rewrite_for_gpu


def _for_cpu(attention: CpuPagedAttention, module: torch.nn.Module, run: Callable[[Recording], object]) -> Rewritten:
    return rewrite(module, attention.library, run)
