"""Interface of paged attention: the arguments and results of every implementation.

There are two steps, as in FlashInfer. Once per forward pass, `plan` turns the batch into the indices that the
implementation needs. Then each layer calls `append` and `attend` with its own pages.

Layout: pages are NHD, 5-D (see `quire_worker.cache`); queries, keys and values are ragged, the tokens of all sequences
one after another, `[tokens, heads, head_dim]`. Each group of layers has its own pages, and so its own batch and plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quire_worker.cache import PageSpec
from quire_worker.page_format import UNSCALED, Scales
from quire_worker.sampling.choice import Look
from quire_worker.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """A flat batch's layout: which tokens belong to which sequence, and where their keys and values are.

    All tensors are on the host. An implementation uploads its kernels' inputs, and plans without waiting for the
    device.

    Sequence i owns the tokens `[query_indptr[i], query_indptr[i + 1])` of the batch, possibly none. The queries of a
    sequence are its last tokens, and their keys are included in its `kv_lengths[i]` keys. The last query sees all keys,
    the previous query all but one, and so on (causal, right-aligned).

    Entries of `block_tables` past the block that holds a sequence's last key are padding and never read.
    """

    query_indptr: torch.Tensor  # int32 [batch + 1], from 0 to tokens
    kv_lengths: torch.Tensor  # int32 [batch], in tokens
    block_tables: torch.Tensor  # int32 [batch, blocks], page indices
    slot_mapping: torch.Tensor  # int64 [tokens], slot = page * page_size + offset, no slot twice
    query_length_max: int  # tokens of the longest chunk
    kv_length_max: int  # tokens of the longest sequence

    @property
    def sequence_count(self) -> int:
        """Returns the number of sequences, "batch" in the shapes."""
        return self.kv_lengths.shape[0]

    @property
    def token_count(self) -> int:
        """Returns the number of tokens of all sequences, "tokens" in the shapes."""
        return self.slot_mapping.shape[0]


class AttentionPlan(Protocol):
    """The plan of one forward pass over one batch."""

    def append(self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, *, scales: Scales = UNSCALED) -> None:
        """Writes the new tokens' keys and values to their slots.

        Args:
            key: `[tokens, kv_heads, head_dim]`, of the spec's `query_dtype`, any strides.
            value: like `key`; ignored for latent attention, where values are a part of the keys.
            pages: one layer, `[pages, 2, page_size, kv_heads, head_dim]`, each page contiguous, the spec's
                `page_stride` from one page to the next; written in place.
            scales: fp8 pages hold keys and values divided by these; other pages ignore them.
        """
        ...

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
        """Computes softmax(scale * Q K^T + causal mask) V per sequence, after `append` for the same layer.

        Query head h reads the KV head `h // (query_heads / kv_heads)`; the ratio may be any whole number. Slots past a
        sequence's last key are ignored, even if they hold NaN. The options have the names and meaning of
        `quire_kernels.shared.options`.

        Args:
            query: `[tokens, query_heads, head_dim]`, of the spec's `query_dtype`, any strides.
            pages: one layer, see `append`.
            scale: factor of the dot products.
            window_left: number of keys before its own position that a query sees; -1: all.
            soft_cap: replaces each scaled score x by soft_cap * tanh(x / soft_cap), before the mask; 0: no cap.
            sinks: float32 `[query_heads]`, natural logarithms of terms that are added to the softmax's denominator.
            scales: see `append`.

        For latent attention, an implementation may refuse window, soft cap and sinks with ValueError.

        Returns:
            `[tokens, query_heads, head_dim]` of the query's dtype; for latent attention `latent_dim` is the last
            dimension.
        """
        ...


class PagedAttention(Protocol):
    """The operations of one device that are not part of the model: attention, copies of blocks, and choice of tokens.

    The object serves one forward pass at a time: a new plan invalidates the previous one.
    """

    def plan(self, batch: AttentionBatch, spec: PageSpec) -> AttentionPlan:
        """Prepares the data that all layers of a forward pass share.

        Args:
            batch: layout of the forward pass.
            spec: shape of the pages that the plan will be used with.
        """
        ...

    def copy_blocks(self, buffers: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole blocks in every buffer, for copy-on-write.

        All sources are read before any destination is written, so a block may be the source of one pair and the
        destination of another. Must run before the forward pass that writes to the destinations.

        Args:
            buffers: the cache's buffers, `[blocks, ...]` of any dtype, all with the same number of blocks.
            sources: block ids.
            destinations: one block id for each source; no id twice.

        Raises:
            ValueError: the lengths differ, a destination comes twice, or an id is outside the pool.
        """
        ...

    def look(self, logits: torch.Tensor) -> Look | None:
        """Returns the greedy choice of each row and whether the row is finite, if one fast kernel computes both.

        Returns None if callers must use `choose_tokens` and `sampling.choice.are_finite`.

        Args:
            logits: float32 `[rows, vocabulary]`.
        """
        return None

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Returns the greedy choice of each row, int32 `[rows]` on the logits' device, without waiting for this device.

        The token of a row that is not finite is negative. Returns None if the device's kernels run synchronously.

        Args:
            logits: float32 `[rows, vocabulary]`; may have no rows, to find out whether the result is None.
        """
        return None

    def choose_tokens(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns one token per row, chosen greedily or drawn as `sampling.choice` describes.

        The tokens are int32 or int64 `[rows]`, on the device of the logits.

        Args:
            logits: float32 `[rows, vocabulary]`, at least one row; if a row is not `sampling.choice.are_finite`, its
                token may be any number.
            params: valid parameters of each row.
            draw: called once if a row is not greedy, after the last allocation that can fail. Returns a number in
                [0, 1) for each row that is not greedy, float64 on the CPU, in the order of the rows.
        """
        ...
