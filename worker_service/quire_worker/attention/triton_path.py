"""Paged attention on the Triton kernels, for GPUs, and for CPU tensors under Triton's interpreter.

A plan turns block tables and lengths into the page table of the FlashInfer-named wrappers. A plan is made on the host,
without waiting for the device. A wrapper's `plan` is called once per forward pass and kind of layer, its `run` once per
layer. A batch whose sequences have one query each takes the decode kernel, which divides the keys. Any other batch
takes the causal prefill kernel, which divides the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from quire_kernels.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from quire_kernels.ops.append_slots import append_slots, check_slots
from quire_kernels.ops.copy_blocks import copy_blocks
from quire_kernels.ops.rotate_append import HeadNorms, rotate_append
from quire_kernels.ops.sampling import greedy, sample
from quire_kernels.shared.upload import upload_tensor

from quire_worker.attention.interface import AttentionBatch, AttentionPlan, PagedAttention
from quire_worker.cache import PageSpec
from quire_worker.page_format import UNSCALED, Scales, is_quantised
from quire_worker.sampling.params import SamplingParams

# Workspace for partial results of split decodes. This workspace is more than any batch with usual query heads and head
# dims needs.
WORKSPACE_BYTES = 256 << 20
BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1

Wrapper = BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper


class PageTable(NamedTuple):
    """FlashInfer's table of the pages of each sequence; int32 on the host."""

    indptr: torch.Tensor  # [batch + 1]
    indices: torch.Tensor  # [pages]
    last_page_len: torch.Tensor  # [batch]


class TritonPagedAttention(PagedAttention):
    """The GPU's `PagedAttention`. Holds the workspace of all forward passes."""

    def __init__(self, device: torch.device | str, *, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        """Reserves the workspace on the device."""
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)

    def plan(self, batch: AttentionBatch, spec: PageSpec) -> TritonAttentionPlan:
        slots = upload_tensor(batch.slot_mapping, self.workspace.device)
        return TritonAttentionPlan(batch, spec, page_table(batch, spec.block_size), slots, self.workspace)

    def copy_blocks(self, buffers: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies blocks in all buffers by one launch; see `PagedAttention.copy_blocks`."""
        copy_blocks(buffers, sources, destinations)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Finds the greedy choices by one launch; see `PagedAttention.likeliest`."""
        return greedy(logits)

    def choose_tokens(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Chooses tokens by one launch, without sorting the vocabulary; see `PagedAttention.choose_tokens`."""
        if all(row.is_greedy for row in params):
            return greedy(logits)
        device = logits.device
        uniform = torch.empty(len(params), dtype=torch.float32, device=device)
        settings = SamplingSettings(
            upload_tensor(torch.tensor([row.temperature for row in params], dtype=torch.float32), device),
            upload_tensor(torch.tensor([row.top_k for row in params], dtype=torch.int32), device),
            upload_tensor(torch.tensor([row.top_p for row in params], dtype=torch.float32), device),
            upload_tensor(torch.tensor([row.min_p for row in params], dtype=torch.float32), device),
        )
        tokens = torch.empty(len(params), dtype=torch.int32, device=device)
        is_drawn = torch.tensor([not row.is_greedy for row in params])
        numbers = torch.zeros(len(params), dtype=torch.float32)
        numbers[is_drawn] = draw().float().clamp_(max=BELOW_ONE)  # rounding may give 1
        upload_tensor(numbers, device, into=uniform)
        return sample(logits, uniform, *settings, check=False, out=tokens)


class SamplingSettings(NamedTuple):
    """Sampling parameters of the rows, each `[rows]` on the device."""

    temperature: torch.Tensor  # float32
    top_k: torch.Tensor  # int32
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32


class Kind(NamedTuple):
    """Parameters of planning that differ between the layers of a model."""

    query_heads: int
    scale: float
    window_left: int
    soft_cap: float


@dataclass(slots=True, eq=False)
class TritonAttentionPlan(AttentionPlan):
    """An `AttentionPlan` of the GPU's path: the state of one batch."""

    batch: AttentionBatch
    spec: PageSpec
    table: PageTable
    slots: torch.Tensor  # int64 [tokens], on the device
    workspace: torch.Tensor
    wrappers: dict[Kind, Wrapper] = field(default_factory=dict)
    latent_wrappers: dict[Kind, BatchMLAPagedAttentionWrapper] = field(default_factory=dict)
    checked_slot_counts: set[int] = field(default_factory=set)

    def append(self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, *, scales: Scales = UNSCALED) -> None:
        """Writes keys and values to their slots; see `AttentionPlan.append`.

        Raises:
            ValueError: a slot is outside the pages. The host checks that once per forward pass.
        """
        self._check_slots(pages)
        if self.spec.latent_dim is None:
            append_slots(key, value, self.slots, pages, "NHD", *self._scales(scales), check=False)
        else:
            latent, rotated = key.tensor_split([self.spec.latent_dim], dim=-1)
            places = pages[:, 0].tensor_split([self.spec.latent_dim], dim=-1)
            append_slots(latent, rotated, self.slots, places, check=False)

    def turn_and_append(
        self,
        heads: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        pages: torch.Tensor,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """Rotates queries and keys, and writes keys and values to their slots, in one launch. Returns the queries.

        Args:
            heads: see `rotate_append`; the other arguments are passed to it, too.
            cosine: `[tokens, rotary_dim]`.
            sine: `[tokens, rotary_dim]`.
            pages: one layer, see `append`, of the dtype of `heads`.
            norms: norms of the heads, applied before the rotation; None: no norms.

        Raises:
            ValueError: a slot is outside the pages. The host checks that once per forward pass.
        """
        self._check_slots(pages)
        return rotate_append(heads, cosine, sine, self.slots, pages, "NHD", norms=norms)

    def _check_slots(self, pages: torch.Tensor) -> None:
        """Checks, once per forward pass and number of pages, that all slots of the batch exist in the pages."""
        slot_count = pages.shape[0] * pages.shape[2]
        if slot_count not in self.checked_slot_counts:
            check_slots(self.batch.slot_mapping, slot_count=slot_count)
            self.checked_slot_counts.add(slot_count)

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
        kind = Kind(query.shape[1], scale, window_left, soft_cap)
        if self.spec.latent_dim is not None:
            return self._attend_latents(kind, query, pages, sinks)
        wrapper = self.wrappers.get(kind)
        if wrapper is None:
            wrapper = self.wrappers[kind] = self._planned(kind)
        k_scale, v_scale = self._scales(scales)
        output = wrapper.run(
            query, pages, k_scale=k_scale, v_scale=v_scale, sinks=None if sinks is None else sinks.float()
        )
        assert isinstance(output, torch.Tensor)  # the result is a pair only with `return_lse`
        return output

    def _scales(self, scales: Scales) -> tuple[float | None, float | None]:
        """Returns the kernels' scales for fp8 pages; None for other pages, because their kernels take no scales."""
        return scales if is_quantised(self.spec.dtype) else (None, None)

    def _attend_latents(
        self, kind: Kind, query: torch.Tensor, pages: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes multi-query attention, with the first part of each key as its value."""
        if kind.window_left >= 0 or kind.soft_cap or sinks is not None:
            raise ValueError("the kernel of latent attention does not support windows, soft caps or sinks")
        wrapper = self.latent_wrappers.get(kind)
        if wrapper is None:
            wrapper = self.latent_wrappers[kind] = self._planned_latents(kind)
        output = wrapper.run(query=query, kv_cache=pages[:, 0, :, 0])
        assert isinstance(output, torch.Tensor)  # the result is a pair only with `return_lse`
        return output

    def _planned_latents(self, kind: Kind) -> BatchMLAPagedAttentionWrapper:
        """Returns a planned wrapper for all latent-attention layers of a kind."""
        wrapper = BatchMLAPagedAttentionWrapper(self.workspace)
        self._plan_latents(wrapper, kind)
        return wrapper

    def _planned(self, kind: Kind) -> Wrapper:
        """Returns a planned wrapper for all layers of a kind: of the decode or the prefill kernel."""
        if bool((self.batch.query_indptr.diff() == 1).all()):
            decode = BatchDecodeWithPagedKVCacheWrapper(self.workspace)
            self._plan_decode(decode, kind)
            return decode
        spec, sizes = self.spec, (kind.query_heads, self.spec.kv_head_count, self.spec.head_dim, self.spec.block_size)
        prefill = BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        prefill.plan(
            self.batch.query_indptr, *self.table, *sizes, causal=True, sm_scale=kind.scale,
            window_left=kind.window_left, logits_soft_cap=kind.soft_cap, q_data_type=spec.query_dtype,
            kv_data_type=spec.dtype,
        )  # fmt: skip
        return prefill

    def _plan_decode(self, wrapper: BatchDecodeWithPagedKVCacheWrapper, kind: Kind) -> None:
        spec, sizes = self.spec, (kind.query_heads, self.spec.kv_head_count, self.spec.head_dim, self.spec.block_size)
        wrapper.plan(
            *self.table, *sizes, window_left=kind.window_left, logits_soft_cap=kind.soft_cap,
            q_data_type=spec.query_dtype, kv_data_type=spec.dtype, sm_scale=kind.scale,
        )  # fmt: skip

    def _plan_latents(self, wrapper: BatchMLAPagedAttentionWrapper, kind: Kind) -> None:
        spec, latent_dim = self.spec, self.spec.latent_dim
        assert latent_dim is not None
        wrapper.plan(
            self.batch.query_indptr, self.table.indptr, self.table.indices, self.batch.kv_lengths, kind.query_heads,
            latent_dim, spec.head_dim - latent_dim, spec.block_size, True, kind.scale, spec.dtype, spec.dtype,
        )  # fmt: skip


def page_table(batch: AttentionBatch, page_size: int) -> PageTable:
    """Returns the pages that hold keys, sequence by sequence, without the padding of the block tables."""
    lengths = batch.kv_lengths.to(torch.int32)
    counts = (lengths + page_size - 1) // page_size
    is_used = torch.arange(batch.block_tables.shape[1]) < counts[:, None]
    indptr = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    last_page_len = torch.where(counts > 0, lengths - (counts - 1) * page_size, 0).to(torch.int32)
    return PageTable(indptr, batch.block_tables[is_used], last_page_len)
