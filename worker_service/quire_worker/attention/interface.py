"""Interface of paged attention: the arguments and results of every implementation.

Two steps, as in FlashInfer: once per forward pass, `plan` turns the batch into the indices that the implementation
needs. Then each layer calls `append` and `attend` with its own pages.

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
    """A flat batch's layout: which tokens belong to which sequence, and where their keys and values lie.

    All on the host: an implementation takes to its device what its kernels need, and waits for nothing to plan.

    Sequence i owns the tokens `[query_indptr[i], query_indptr[i + 1])` of the batch, possibly none. They are its last
    tokens: of its `kv_lengths[i]` keys, these tokens' own included, the last query sees all, the one before it all but
    one, and so on (causal, right-aligned).

    Entries of `block_tables` past the block that holds a sequence's last key are padding and never read.
    """

    query_indptr: torch.Tensor  # int32 [batch + 1], from 0 to tokens
    kv_lengths: torch.Tensor  # int32 [batch], in tokens
    block_tables: torch.Tensor  # int32 [batch, blocks], page indices
    slot_mapping: torch.Tensor  # int64 [tokens], slot = page * page_size + offset, no slot twice
    query_length_max: int  # tokens, of the longest chunk
    kv_length_max: int  # tokens, of the longest sequence

    @property
    def sequence_count(self) -> int:
        """Returns the number of sequences, "batch" in the shapes."""
        return self.kv_lengths.shape[0]

    @property
    def token_count(self) -> int:
        """Returns the number of tokens of all sequences, "tokens" in the shapes."""
        return self.slot_mapping.shape[0]


class AttentionPlan(Protocol):
    """One forward pass over one batch."""

    def append(self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, *, scales: Scales = UNSCALED) -> None:
        """Writes the new tokens' keys and values to their slots.

        Args:
            key: `[tokens, kv_heads, head_dim]`, of the dtype that the pages are computed in, any strides.
            value: the same; of latents it is a part of the keys, and not looked at.
            pages: one layer, `[pages, 2, page_size, kv_heads, head_dim]`, each page contiguous and from one to the next
                the spec's `page_stride`; written in place.
            scales: of fp8 pages, which hold keys and values divided by them; elsewhere without effect.
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

        Query head h reads the KV head `h // (query_heads / kv_heads)`; any whole ratio. No slot past a sequence's
        last key takes part, whatever it holds. The options have the words and meaning of
        `quire_kernels.shared.options`.

        Args:
            query: `[tokens, query_heads, head_dim]`, of the dtype that the pages are computed in, any strides.
            pages: one layer, as for `append`.
            scale: factor of the dot products.
            window_left: keys before its own position that a query sees, inclusive; -1: all.
            soft_cap: soft_cap * tanh(x / soft_cap) of the scaled scores x, before the mask; 0: none.
            sinks: float32 `[query_heads]`, natural logarithms of what is added to the softmax's denominator.
            scales: as for `append`.

        Of latents, an implementation may refuse the options with ValueError.

        Returns:
            `[tokens, query_heads, head_dim]`, or `latent_dim` where the pages hold latents, of the query's dtype.
        """
        ...


class PagedAttention(Protocol):
    """An implementation of all that a device does for a worker beside the model itself. Serves one forward pass at a
    time: a new plan ends the one before."""

    def plan(self, batch: AttentionBatch, spec: PageSpec) -> AttentionPlan:
        """Prepares what is the same in all layers of a forward pass.

        Args:
            batch: of the forward pass.
            spec: of the pages that the plan will be used with.
        """
        ...

    def copy_blocks(self, buffers: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole blocks in every buffer: the copy of copy-on-write.

        All sources are read before any destination is written, so a block may be source of one pair and destination of
        another. Must run before the forward pass that writes to the destinations.

        Args:
            buffers: of the cache, `[blocks, ...]` of any dtype, of as many blocks.
            sources: block ids.
            destinations: as many block ids, each at most once.

        Raises:
            ValueError: the lengths differ, a destination comes twice, or an id is outside the pool.
        """
        ...

    def look(self, logits: torch.Tensor) -> Look | None:
        """Returns the greedy choice of each row and whether the row is finite, if one quick kernel computes both
        without waiting for the device. None if callers must use `choose` and `sampling.choice.are_finite`.

        Args:
            logits: float32 `[rows, vocabulary]`.
        """
        return None

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Returns the greedy choice of each row without waiting for it, int32 `[rows]` on the device of the logits,
        negative where a row is not finite; None where the host waits for each pass anyway.

        Args:
            logits: float32 `[rows, vocabulary]`; of no rows, to ask which of both it is.
        """
        return None

    def choose(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns one token per row, as `sampling.choice` describes it: greedy, or temperature, the limits and a draw.

        They are int32 or int64 `[rows]`, on the device of the logits.

        Args:
            logits: float32 `[rows, vocabulary]`, at least one row; the token of one that is not
                `sampling.choice.are_finite` may be any number.
            params: per row, valid.
            draw: called once if a row is not greedy, after the last allocation that can fail. Returns a number in
                [0, 1) for each such row, float64 on the CPU, in the order of the rows.
        """
        ...
