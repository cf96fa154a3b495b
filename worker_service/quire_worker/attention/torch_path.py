"""Paged attention for CPUs, in plain torch.

Work that all layers of a forward pass share is planned once. Decoding sequences in float32 with many keys are computed
without copying the keys (`torch_tiles`). All other sequences are put into units (`torch_plan`). In each layer a unit is
computed in two steps:

    gather   copies whole pages into a workspace, keys `[sequences, slots, kv_heads, head_dim]` and values; copies of a
             page's size run at the memory's speed, and the workspace is still in the CPU's cache for `attend`
    attend   calls torch's fused kernel. Mostly, the query heads that share a KV head become rows of one call, so that
             the call reads their keys only once

Long chunks are computed in blocks of queries, without the keys that no query of the block sees. A prompt without cached
tokens is the fused kernel's own causal case, head by head. The fused kernel has no soft cap and no sinks: with these,
scores, softmax and result are separate torch calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire_worker.attention.converted_plan import ConvertedPlan
from quire_worker.attention.interface import AttentionBatch, AttentionPlan, PagedAttention
from quire_worker.attention.torch_plan import GatheredBatch, plan_units, query_block
from quire_worker.attention.torch_tiles import DTYPES, Tiles, attend_tiles, key_rows, plan_tiles
from quire_worker.cache import KEY_AND_VALUE, PageSpec, rows_of
from quire_worker.page_format import UNSCALED, Scales
from quire_worker.sampling.choice import choose_by_sorting
from quire_worker.sampling.params import SamplingParams

# The fused kernel works on blocks of 32 rows, and on larger blocks if it gets at least 192 rows. 32 queries of one head
# fill a small block. Packing all heads of a KV head then pays only if the packed heads have at least 192 rows.
ROWS_SMALL, ROWS_LARGE = 32, 192
# With up to three query heads per KV head in bfloat16, computing head by head is faster for blocks of queries. For
# decode, head by head is faster because the kernel does not rearrange the keys for a single row, but only while the
# CPU's cache holds the keys and values of a sequence: each head reads them again.
LONE_HEADS_MAX, LONE_BYTES_MAX = 3, 2 << 20


class TorchPagedAttention(PagedAttention):
    """The CPU's `PagedAttention`. Holds the memory that all forward passes reuse."""

    def __init__(self) -> None:
        self._workspace = _Workspace()
        self._masks = _CausalMasks()

    def plan(self, batch: AttentionBatch, spec: PageSpec) -> AttentionPlan:
        if not spec.is_plain:
            return ConvertedPlan.of(batch, spec, self.plan)
        rows = key_rows(batch.slot_mapping, spec)
        return TorchAttentionPlan(batch, spec, rows, self._workspace, self._masks)

    def copy_blocks(self, buffers: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
        block_count = buffers[0].shape[0]
        if len(sources) != len(destinations):
            raise ValueError(f"destinations must have {len(sources)} blocks, like sources, not {len(destinations)}")
        if len(set(destinations)) != len(destinations):
            raise ValueError("destinations: a block occurs twice")
        for block in (*sources, *destinations):
            if not 0 <= block < block_count:
                raise ValueError(f"block {block} is outside the pool of {block_count} blocks")
        if not sources:
            return
        read = torch.tensor(sources, dtype=torch.int64)
        write = torch.tensor(destinations, dtype=torch.int64)
        for buffer in buffers:
            buffer.index_copy_(0, write, buffer.index_select(0, read))

    def choose_tokens(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        return choose_by_sorting(logits, params, draw)


class _Work(NamedTuple):
    """All queries of a batch for one window, divided into tiles and units."""

    tiles: Tiles | None
    units: tuple[GatheredBatch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TorchAttentionPlan(AttentionPlan):
    """The CPU's `AttentionPlan`. The object plans each window when the first layer with that window calls."""

    batch: AttentionBatch
    spec: PageSpec
    append_rows: torch.Tensor  # int64 [tokens], see `key_rows`
    workspace: _Workspace
    masks: _CausalMasks
    work_by_window: dict[int, _Work] = field(default_factory=dict)
    places: dict[GatheredBatch, _Place] = field(default_factory=dict)

    def work(self, window_left: int = -1) -> _Work:
        """Returns the tiles and units of a window; the first call plans them."""
        work = self.work_by_window.get(window_left)
        if work is None:
            tiles = plan_tiles(self.batch, self.spec, window_left) if self.spec.dtype in DTYPES else None
            units = plan_units(self.batch, self.spec, window_left, query_length_min=1 if tiles is None else 2)
            work = self.work_by_window[window_left] = _Work(tiles, units)
        return work

    def append(self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, *, scales: Scales = UNSCALED) -> None:
        _, _, page_size, kv_heads, head_dim = pages.shape
        rows = rows_of(pages, kv_heads * head_dim)
        rows.index_copy_(0, self.append_rows, key.reshape(-1, kv_heads * head_dim))
        if self.spec.latent_dim is not None:
            return
        rows[page_size:].index_copy_(0, self.append_rows, value.reshape(-1, kv_heads * head_dim))

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
        attended = self._attend(query, pages, _Scores(scale, window_left, soft_cap, sinks))
        return attended if self.spec.latent_dim is None else attended[..., : self.spec.latent_dim]

    def _attend(self, query: torch.Tensor, pages: torch.Tensor, scores: _Scores) -> torch.Tensor:
        """Computes attention. With latents, the values are whole keys, so the result has `head_dim` elements."""
        scale, window_left, soft_cap, sinks = scores
        tiles, units = self.work(window_left)
        if tiles is not None and not units and tiles.tokens.shape[0] == query.shape[0]:
            return attend_tiles(tiles, query, pages, scale=scale, soft_cap=soft_cap, sinks=sinks)
        if tiles is None and len(units) == 1 and isinstance(units[0].tokens, slice):
            return self._attend_unit(units[0], query, pages, scores)
        output = torch.empty(query.shape, dtype=query.dtype)
        if tiles is not None:
            rows = query[tiles.tokens]
            output[tiles.tokens] = attend_tiles(tiles, rows, pages, scale=scale, soft_cap=soft_cap, sinks=sinks)
        for unit in units:
            output[unit.tokens] = self._attend_unit(unit, query[unit.tokens], pages, scores)
        return output

    def _attend_unit(
        self, unit: GatheredBatch, query: torch.Tensor, pages: torch.Tensor, scores: _Scores
    ) -> torch.Tensor:
        """Computes one unit; queries and result are `[sequences * queries, query_heads, head_dim]`."""
        kv_heads, head_dim = pages.shape[3:]
        sequences = unit.sequence_count
        place = self.places.get(unit)
        if place is None or place.buffer is not self.workspace.buffer:
            place = self.places[unit] = self.workspace.place(pages, unit)
        key, value = place.gather(pages, unit)
        group = query.shape[1] // kv_heads
        is_lone = key.dtype == torch.bfloat16 and group <= LONE_HEADS_MAX
        if unit.query_length == 1:
            if is_lone and scores.are_plain and KEY_AND_VALUE * key.nbytes <= LONE_BYTES_MAX * sequences:
                rows = query.reshape(sequences, 1, -1, head_dim)
                return scores.attend_by_head(rows, key, value, unit.mask).reshape(query.shape)
            rows = query.reshape(sequences, kv_heads, -1, head_dim)
            return scores.attend(rows, key, value, unit.mask).reshape(query.shape)
        queries = query.reshape(sequences, unit.query_length, -1, head_dim)
        if unit.is_prompt and scores.are_plain:
            return scores.attend_by_head(queries, key, value, None, is_causal=True).reshape(query.shape)
        parts = []
        for start, stop, key_start, key_stop in unit.blocks:
            count = stop - start
            seen_key, seen_value = key[:, :, key_start:key_stop], value[:, :, key_start:key_stop]
            is_packed = not (scores.are_plain and count >= ROWS_SMALL and (is_lone or count * group < ROWS_LARGE))
            mask = self.masks.of(count, key_stop - key_start, group if is_packed else 1, scores.window_left, key.dtype)
            attend = scores.attend_packed if is_packed else scores.attend_by_head
            parts.append(attend(queries[:, start:stop], seen_key, seen_value, mask))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).reshape(query.shape)


class _Scores(NamedTuple):
    """Parameters of the scores that queries and keys have."""

    scale: float
    window_left: int
    soft_cap: float
    sinks: torch.Tensor | None  # [query_heads]

    @property
    def are_plain(self) -> bool:
        """Returns whether the fused kernel can compute these scores."""
        return self.soft_cap == 0 and self.sinks is None

    def attend_by_head(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Computes attention with plain scores, head by head.

        Queries and result are `[sequences, queries, query_heads, head_dim]`; for keys, values and mask see `attend`.
        """
        attended = scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=mask, is_causal=is_causal, scale=self.scale, enable_gqa=True
        )
        return attended.transpose(1, 2)

    def attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Computes attention with any scores, with shapes as in `attend_by_head`.

        All query heads of a KV head become rows of one call: the heads of the first query, then those of the second.
        """
        sequences, queries, _, head_dim = query.shape
        kv_heads = key.shape[1]
        by_head = query.reshape(sequences, queries, kv_heads, -1, head_dim).transpose(1, 2)
        attended = self.attend(by_head.reshape(sequences, kv_heads, -1, head_dim), key, value, mask)
        return attended.view(by_head.shape).transpose(1, 2).reshape(query.shape)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes attention with any scores. The result has the shape of the queries.

        Args:
            query: `[sequences, kv_heads, rows, head_dim]`; the rows are queries x query heads of the KV head.
            key: `[sequences, kv_heads, keys, head_dim]`, any strides.
            value: like `key`.
            mask: 0 or -inf, broadcast to `[sequences, kv_heads, rows, keys]`.
        """
        if self.are_plain:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        scores = torch.matmul(query, key.transpose(2, 3)).float() * self.scale
        if self.soft_cap > 0:
            scores = (scores / self.soft_cap).tanh() * self.soft_cap
        if mask is not None:
            scores = scores + mask
        if self.sinks is not None:
            sinks = self.sinks.float().view(key.shape[1], -1)  # [kv_heads, group]
            column = sinks.repeat(1, query.shape[2] // sinks.shape[1])[None, :, :, None]
            scores = torch.cat([scores, column.expand(*scores.shape[:3], 1)], dim=3)
        weights = scores.softmax(3)[..., : key.shape[2]]
        return torch.matmul(weights.to(value.dtype), value)


class _CausalMasks:
    """Masks of blocks of queries. The last query of a block is at the position of the last key.

    Counting from the end, query i sees the keys from i on. With a window it sees only keys up to i + window_left. So
    the mask of a block is the lower right corner of a larger block's mask. One mask, as large as the largest block so
    far, serves all layers of all forward passes.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def of(self, queries: int, keys: int, group: int, window_left: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the mask `[queries * group, keys]`: 0 where a query sees a key, else -inf.

        Each query gets `group` equal rows.
        """
        place = (group, window_left, dtype)
        mask = self._masks.get(place)
        if mask is None or mask.shape[1] < keys:
            with torch.inference_mode(False):
                query = torch.arange(query_block(dtype) - 1, -1, -1).repeat_interleave(group)[:, None]
                # The number of keys is rounded up to a power of two, so that a growing prompt seldom needs a new mask.
                key = torch.arange((1 << (keys - 1).bit_length()) - 1, -1, -1)
                is_hidden = key < query
                if window_left >= 0:
                    is_hidden |= key > query + window_left
                mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
            self._masks[place] = mask
        return mask[mask.shape[0] - queries * group :, mask.shape[1] - keys :]


class _Place(NamedTuple):
    """Views of the workspace for one unit's keys and values. Every layer uses the same views."""

    buffer: torch.Tensor
    key_pages: torch.Tensor  # [pages, elements of a page]
    value_pages: torch.Tensor
    slots: torch.Tensor  # [2, gathered slots, kv_heads * head_dim]
    key: torch.Tensor  # [sequences, kv_heads, keys, head_dim]
    value: torch.Tensor

    def gather(self, pages: torch.Tensor, unit: GatheredBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a unit's keys and values, each `[sequences, kv_heads, keys, head_dim]`, valid until the next call."""
        halves = rows_of(pages, self.key_pages.shape[1])  # rows: keys, values, perhaps other layers' rows, keys, ...
        torch.index_select(halves, 0, unit.key_pages, out=self.key_pages)
        has_values = pages.shape[1] == KEY_AND_VALUE
        if has_values:
            torch.index_select(halves[1:], 0, unit.key_pages, out=self.value_pages)
        if unit.unseen is not None:
            self.slots.index_fill_(1, unit.unseen, 0)
        return self.key, self.value if has_values else self.key


class _Workspace:
    """Memory that keys and values are gathered into, kept between calls and grown when needed.

    New memory for each call would cost more than the gather itself, because its pages would have to be faulted in.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0)

    def place(self, pages: torch.Tensor, unit: GatheredBatch) -> _Place:
        """Returns the views for a unit. All units start at the beginning of the workspace."""
        _, _, page_size, kv_heads, head_dim = pages.shape
        shape = (KEY_AND_VALUE, unit.key_pages.shape[0], page_size * kv_heads * head_dim)
        element_count = shape[0] * shape[1] * shape[2]
        # Allocates outside of inference mode, so that the buffer is an ordinary tensor and can be reused anywhere.
        with torch.inference_mode(False):
            if self.buffer.dtype != pages.dtype or self.buffer.numel() < element_count:
                self.buffer = torch.empty(element_count, dtype=pages.dtype)
            gathered = self.buffer[:element_count].view(shape)
            slots = gathered.view(KEY_AND_VALUE, unit.sequence_count, -1, kv_heads, head_dim)
            key, value = slots[:, :, unit.keys].transpose(2, 3)
            return _Place(
                self.buffer, gathered[0], gathered[1], slots.view(KEY_AND_VALUE, -1, kv_heads * head_dim), key, value
            )
