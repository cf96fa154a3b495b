"""Paged attention for CPUs, in plain torch: gather the keys and values, then PyTorch's fused attention.

A layer `[pages, 2, page_size, kv_heads, head_dim]` is read as a matrix of rows `[pages * 2 * page_size, kv_heads *
head_dim]`, one row a token: its key at `key_row = page * 2 * page_size + offset`, its value `page_size` rows further.
All row numbers are computed once per forward pass; a layer then costs two scatters to append, and per call of the fused
kernel two gathers.

Sequences with one new token (decode) are attended to together. They are put into groups of similar length, lengths
within a factor of two, so that one long sequence does not make all others as long, and a group gathers at most
`GATHER_TOKENS_MAX` keys (unless a single sequence has more), so that the workspace stays small and in the processor's
cache. Within a group short sequences are padded: their padding reads *their own last key* again and is masked, rather
than reading a slot that nobody wrote. A NaN there would outlive the mask, since 0 * NaN is NaN.

Sequences with several new tokens (prefill, or a chunk of one) are attended to one by one, under a right-aligned causal
mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire_worker.attention.interface import AttentionBatch
from quire_worker.cache import KEY_AND_VALUE, CacheSpec

# Measured with 2 KV heads of 64 in float32: 8 MiB of keys and values, and no gain from larger gathers.
GATHER_TOKENS_MAX = 8192


class TorchPagedAttention:
    """The CPU's `PagedAttention`. Holds the workspace that keys and values are gathered into."""

    def __init__(self) -> None:
        self._workspace = _Workspace()

    def plan(self, batch: AttentionBatch, spec: CacheSpec) -> TorchAttentionPlan:
        """See `PagedAttention.plan`."""
        query_indptr = batch.query_indptr.tolist()
        kv_lengths = batch.kv_lengths.tolist()
        decode_indices = []
        prefills = []
        for index, kv_length in enumerate(kv_lengths):
            start, stop = query_indptr[index], query_indptr[index + 1]
            if stop - start == 1:
                decode_indices.append(index)
            else:
                prefills.append(_plan_prefill(spec, batch.block_tables[index], start, stop, kv_length))
        decodes = [
            _plan_decode(batch, spec, group, [kv_lengths[index] for index in group])
            for group in _groups_of_similar_length(decode_indices, kv_lengths)
        ]
        return TorchAttentionPlan(
            append_rows=_key_rows(batch.slot_mapping, spec.block_size),
            page_size=spec.block_size,
            decodes=tuple(decodes),
            prefills=tuple(prefills),
            workspace=self._workspace,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TorchAttentionPlan:
    """The CPU's `AttentionPlan`."""

    append_rows: torch.Tensor  # int64 [tokens], key rows
    page_size: int
    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]
    workspace: _Workspace

    def append(self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor) -> None:
        """See `AttentionPlan.append`."""
        rows = _rows_of(pages)
        rows.index_copy_(0, self.append_rows, key.reshape(key.shape[0], -1))
        rows.index_copy_(0, self.append_rows + self.page_size, value.reshape(value.shape[0], -1))

    def attend(self, query: torch.Tensor, pages: torch.Tensor, *, scale: float) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for decode in self.decodes:
            self._attend_decode(decode, query, pages, scale, output)
        for prefill in self.prefills:
            self._attend_prefill(prefill, query, pages, scale, output)
        return output

    def _attend_decode(
        self, part: _Decode, query: torch.Tensor, pages: torch.Tensor, scale: float, output: torch.Tensor
    ) -> None:
        kv_head_count, head_dim = pages.shape[3:]
        sequence_count, kv_length = part.mask.shape[0], part.mask.shape[3]
        key, value = self.workspace.gather(pages, part.key_rows, self.page_size)
        shape = (sequence_count, kv_length, kv_head_count, head_dim)
        # The query heads of one KV head stand where several queries would: keys are read once for all of them.
        packed = query[part.query_index].reshape(sequence_count, kv_head_count, -1, head_dim)
        attended = scaled_dot_product_attention(
            packed,  # [batch, kv_heads, query_heads / kv_heads, head_dim]
            key.view(shape).transpose(1, 2),  # [batch, kv_heads, kv_length, head_dim]
            value.view(shape).transpose(1, 2),
            attn_mask=part.mask,
            scale=scale,
        )
        output[part.query_index] = attended.reshape(sequence_count, *query.shape[1:])

    def _attend_prefill(
        self, part: _Prefill, query: torch.Tensor, pages: torch.Tensor, scale: float, output: torch.Tensor
    ) -> None:
        kv_head_count, head_dim = pages.shape[3:]
        key, value = self.workspace.gather(pages, part.key_rows, self.page_size)
        shape = (1, -1, kv_head_count, head_dim)
        attended = scaled_dot_product_attention(
            query[part.start : part.stop].unsqueeze(0).transpose(1, 2),  # [1, query_heads, query_length, head_dim]
            key.view(shape).transpose(1, 2),  # [1, kv_heads, kv_length, head_dim]
            value.view(shape).transpose(1, 2),
            attn_mask=part.mask,
            is_causal=part.mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != kv_head_count,
        )
        output[part.start : part.stop] = attended[0].transpose(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    """Sequences of one query each, attended to together."""

    query_index: torch.Tensor  # int64 [batch], tokens of the flat batch
    key_rows: torch.Tensor  # int64 [batch * kv_length], padded to the longest
    mask: torch.Tensor  # [batch, 1, 1, kv_length], of the cache's dtype: 0 or, on padding, -inf


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """One sequence of several queries, the tokens `[start, stop)` of the flat batch."""

    start: int
    stop: int
    key_rows: torch.Tensor  # int64 [kv_length]
    mask: torch.Tensor | None  # [query_length, kv_length]; None: nothing came before, plainly causal


class _Workspace:
    """Memory to gather keys and values into, kept between calls and grown to the largest.

    Fresh memory costs more than the gather itself: every call would fault its pages in again.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def gather(self, pages: torch.Tensor, key_rows: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the rows, each `[rows, kv_heads * head_dim]`, valid until the next call."""
        rows = _rows_of(pages)
        shape = (KEY_AND_VALUE, key_rows.shape[0], rows.shape[1])
        element_count = shape[0] * shape[1] * shape[2]
        if self._buffer.dtype != rows.dtype or self._buffer.numel() < element_count:
            # An ordinary tensor even when first needed inside inference mode, so that it can be reused outside.
            with torch.inference_mode(False):
                self._buffer = torch.empty(element_count, dtype=rows.dtype)
        key, value = self._buffer[:element_count].view(shape)
        torch.index_select(rows, 0, key_rows, out=key)
        torch.index_select(rows, 0, key_rows + page_size, out=value)
        return key, value


def _rows_of(pages: torch.Tensor) -> torch.Tensor:
    """A layer as `[pages * 2 * page_size, kv_heads * head_dim]`, the same memory."""
    page_count, _, page_size, kv_head_count, head_dim = pages.shape
    return pages.view(page_count * KEY_AND_VALUE * page_size, kv_head_count * head_dim)


def _key_rows(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Rows of the keys at int64 slots of any shape."""
    page = slots // page_size
    return slots + page * page_size  # page * 2 * page_size + offset


def _groups_of_similar_length(indices: Sequence[int], kv_lengths: Sequence[int]) -> list[list[int]]:
    """Splits sequences into groups that may be padded to their longest (see the top of the file).

    Args:
        indices: the sequences to group.
        kv_lengths: of all sequences of the batch.
    """
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda index: kv_lengths[index], reverse=True):
        if groups:
            longest = kv_lengths[groups[-1][0]]
            if 2 * kv_lengths[index] >= longest and (len(groups[-1]) + 1) * longest <= GATHER_TOKENS_MAX:
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups


def _plan_decode(
    batch: AttentionBatch, spec: CacheSpec, sequences: Sequence[int], kv_lengths: Sequence[int]
) -> _Decode:
    """Plans a group; `kv_lengths` are those of `sequences`, the longest first."""
    index = torch.tensor(sequences, dtype=torch.int64)
    lengths = torch.tensor(kv_lengths, dtype=torch.int64).unsqueeze(1)  # [batch, 1]
    position = torch.arange(kv_lengths[0]).expand(len(sequences), -1)  # [batch, kv_length]
    readable = torch.minimum(position, lengths - 1)
    page = batch.block_tables[index].to(torch.int64).gather(1, readable // spec.block_size)
    slots = page * spec.block_size + readable % spec.block_size
    mask = torch.zeros(position.shape, dtype=spec.dtype).masked_fill_(position >= lengths, float("-inf"))
    return _Decode(
        query_index=batch.query_indptr[index].to(torch.int64),
        key_rows=_key_rows(slots, spec.block_size).flatten(),
        mask=mask[:, None, None, :],
    )


def _plan_prefill(spec: CacheSpec, block_table: torch.Tensor, start: int, stop: int, kv_length: int) -> _Prefill:
    """Plans the sequence that owns the tokens `[start, stop)` of the batch; its block table is int32 `[blocks]`."""
    position = torch.arange(kv_length)
    page = block_table.to(torch.int64)[position // spec.block_size]
    slots = page * spec.block_size + position % spec.block_size
    query_length = stop - start
    mask = None
    if query_length < kv_length:
        query_position = torch.arange(kv_length - query_length, kv_length).unsqueeze(1)
        mask = torch.zeros(query_length, kv_length, dtype=spec.dtype)
        mask.masked_fill_(position > query_position, float("-inf"))
    return _Prefill(start, stop, _key_rows(slots, spec.block_size), mask)
