"""Attention on a CPU over pages of formats that its kernels do not read: fp8, and HND.

Each layer converts the pages that a batch reads to the model's dtype and NHD, into one tensor. The layer then attends
to that tensor as to any other pages:

    block tables   7 2 | 9 2       in the pool          used    2 7 9
                   1 0 | 2 0       in the converted pages

So every option of attention works with these formats. The results use the rounded numbers in the pages, because new
keys are stored first and then read back. Each layer converts all keys and values in use, into memory for one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire_worker.attention.interface import AttentionBatch, AttentionPlan
from quire_worker.cache import PageSpec
from quire_worker.page_format import UNSCALED, Scales, is_quantised, quantised, restored


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedPlan(AttentionPlan):
    """An `AttentionPlan` that converts pages, then uses the plan for plain pages."""

    spec: PageSpec
    used: torch.Tensor  # int64 [pages]
    pages_of_tokens: torch.Tensor  # int64 [tokens]
    places: torch.Tensor  # int64 [tokens], the index of each token in its page
    inner: AttentionPlan

    @classmethod
    def of(
        cls, batch: AttentionBatch, spec: PageSpec, plan: Callable[[AttentionBatch, PageSpec], AttentionPlan]
    ) -> ConvertedPlan:
        """Plans a batch; `plan` plans a batch over plain pages."""
        counts = (batch.kv_lengths + spec.block_size - 1) // spec.block_size
        is_read = torch.arange(batch.block_tables.shape[1]) < counts[:, None]
        used, numbers = batch.block_tables[is_read].to(torch.int64).unique(return_inverse=True)
        tables = torch.zeros_like(batch.block_tables)
        tables[is_read] = numbers.to(tables.dtype)
        plain = replace(spec, dtype=spec.query_dtype, computed_in=None, stride=None, is_hnd=False)
        inner = plan(replace(batch, block_tables=tables), plain)
        return cls(spec, used, batch.slot_mapping // spec.block_size, batch.slot_mapping % spec.block_size, inner)

    def append(self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, *, scales: Scales = UNSCALED) -> None:
        halves = (key, value)[: self.spec.half_count]
        for half, (new, scale) in enumerate(zip(halves, scales, strict=False)):
            stored = quantised(new, scale, self.spec.dtype) if is_quantised(self.spec.dtype) else new
            _bytes(pages)[self.pages_of_tokens, half, self.places] = _bytes(stored.contiguous())

    def attend(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        *,
        scale: float,
        window_left: int = -1,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        brought = self._brought(pages, scales)
        return self.inner.attend(query, brought, scale=scale, window_left=window_left, soft_cap=soft_cap, sinks=sinks)

    def _brought(self, pages: torch.Tensor, scales: Scales) -> torch.Tensor:
        """Returns the pages in use, converted: `[pages, 2, block_size, kv_heads, head_dim]`, contiguous."""
        spec = self.spec
        gathered = _bytes(pages)[self.used].contiguous()
        if not is_quantised(spec.dtype):
            return gathered.view(spec.dtype)
        stored = gathered.view(spec.dtype)
        brought = torch.empty(stored.shape, dtype=spec.query_dtype)
        for half, scale in zip(range(spec.half_count), scales, strict=False):
            brought[:, half] = restored(stored[:, half], scale, spec.query_dtype)
        return brought


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views fp8 as bytes, because torch cannot index fp8. Returns any other dtype unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
