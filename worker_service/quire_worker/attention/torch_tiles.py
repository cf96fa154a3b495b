"""Decode on a CPU without copying keys or values: sequences of one query each, in float32 or float64.

    scores   sampled_addmm: the product of queries and rows of the pages, computed only where a sparse pattern has an
             entry. For every query head, the pattern names the rows of the keys that the head sees
    result   embedding_bag: for every query head, the weighted sum of its values' rows

Both operators read the rows in place. Keys are cut into tiles, and all heads of a tile come before the next tile. A
token's heads are adjacent in its page, so all query heads that share a tile's keys find the keys in the CPU's cache.
Each tile has its own softmax, and the results are merged over the tiles of a sequence, so sequences of any lengths form
one batch. The padding of the last tile repeats the sequence's last key and is masked. Any other slot may hold NaN, and
0 * NaN is NaN.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding_bag

from quire_worker.attention.interface import AttentionBatch
from quire_worker.cache import PageSpec, rows_of

# Bytes of a tile's keys, all heads together. Measured with 4/2 (query/KV) heads of 64 and 32/8 heads of 128 elements:
# shorter tiles cost calls and merging, longer tiles do not fit into the CPU's cache.
TILE_BYTES_MAX = 512 << 10
TILE_TOKENS_MIN = 128
# Up to this many bytes of keys (sequence count times the longest's), gathering is faster than preparing a sparse call.
GATHERED_BYTES_MAX = 256 << 10
PADDING_MAX = 1 / 8  # share of the keys; with more padding, tiles are halved
DTYPES = (torch.float32, torch.float64)  # dtypes that sampled_addmm supports
INT32_MAX = 2**31 - 1

for beta in ("Sparse CSR tensor support is in beta state", r"index_reduce\(\) is in beta"):
    warnings.filterwarnings("ignore", message=beta)


def key_rows(slots: torch.Tensor, spec: PageSpec) -> torch.Tensor:
    """Returns the row of each slot's key, if a layer is viewed as rows of `kv_heads * head_dim` elements (`rows_of`).

    `slots` is int64 of any shape. A value's row is `block_size` rows after its key's.
    """
    between = spec.page_stride // spec.row_elements - spec.block_size
    return slots + slots // spec.block_size * between  # page * (rows between page starts) + index in the page


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The keys of a batch's decoding sequences for one window, cut into tiles."""

    tokens: torch.Tensor  # int64 [sequences], indices in the flat batch
    sequence_of_tile: torch.Tensor  # int64 [tiles]
    rows: torch.Tensor  # int64 [tiles, tile], rows of the keys' first heads if rows have `head_dim` elements
    padding: torch.Tensor | None  # bool [tiles, 1, tile]; None: all tiles are full
    patterns: dict[tuple[int, int], Pattern] = field(default_factory=dict)  # by number of query heads and of rows

    def pattern(self, query_heads: int, kv_heads: int, row_count: int, dtype: torch.dtype) -> Pattern:
        """Returns the rows that each query head of each tile reads. The first layer's call computes the pattern."""
        known = self.patterns.get((query_heads, row_count))
        if known is not None:
            return known
        index_dtype = torch.int32 if max(row_count, self.rows.numel() * query_heads) <= INT32_MAX else torch.int64
        with torch.inference_mode(False):  # every layer writes to these tensors, inside and outside inference mode
            heads = torch.arange(query_heads) // (query_heads // kv_heads)
            indices = (self.rows[:, None] + heads[:, None]).to(index_dtype).flatten()
            starts = torch.arange(0, indices.shape[0] + 1, self.rows.shape[1], dtype=index_dtype)
            size = (starts.shape[0] - 1, row_count)
            scores = torch.sparse_csr_tensor(
                starts, indices, torch.zeros(indices.shape[0], dtype=dtype), size=size, check_invariants=False
            )
            pattern = Pattern(indices, starts[:-1], scores)
        self.patterns[query_heads, row_count] = pattern
        return pattern


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Rows of keys that each query head reads, if a layer is viewed as rows of `head_dim` elements (`rows_of`)."""

    indices: torch.Tensor  # int32 or int64 [tiles * query_heads * tile]
    starts: torch.Tensor  # same dtype, [tiles * query_heads], start of each query head's indices
    scores: torch.Tensor  # sparse CSR [tiles * query_heads, rows]; each layer overwrites its values


def plan_tiles(batch: AttentionBatch, spec: PageSpec, window_left: int) -> Tiles | None:
    """Plans the sequences of one query each. Returns None if there are none, or too few keys for tiles to pay.

    Args:
        batch: layout of the forward pass.
        spec: shape of the pages.
        window_left: keys before its own position that a query sees, inclusive; -1: all.
    """
    sequences = (batch.query_indptr.diff() == 1).nonzero().flatten()
    if sequences.shape[0] == 0:
        return None
    lengths = batch.kv_lengths[sequences].to(torch.int64)
    firsts = (lengths - 1 - window_left).clamp_(min=0) if window_left >= 0 else torch.zeros_like(lengths)
    counts = lengths - firsts
    token_bytes = spec.kv_head_count * spec.head_dim * spec.dtype.itemsize
    if int(counts.max()) * counts.shape[0] * token_bytes <= GATHERED_BYTES_MAX:
        return None
    tile = _tile_tokens(counts, token_bytes)
    tile_counts = (counts + tile - 1) // tile
    of_tile = torch.arange(sequences.shape[0]).repeat_interleave(tile_counts)
    number = torch.arange(of_tile.shape[0]) - (tile_counts.cumsum(0) - tile_counts)[of_tile]
    place = (number * tile)[:, None] + torch.arange(tile)  # [tiles, tile]
    padding = place >= counts[of_tile][:, None]
    position = firsts[of_tile][:, None] + place.minimum(counts[of_tile][:, None] - 1)
    width = batch.block_tables.shape[1]
    entry = (sequences[of_tile] * width)[:, None] + position // spec.block_size
    slots = batch.block_tables.flatten()[entry].to(torch.int64) * spec.block_size + position % spec.block_size
    return Tiles(
        tokens=batch.query_indptr[sequences].to(torch.int64),
        sequence_of_tile=of_tile,
        rows=key_rows(slots, spec) * spec.kv_head_count,
        padding=padding[:, None] if bool(padding.any()) else None,
    )


def _tile_tokens(counts: torch.Tensor, token_bytes: int) -> int:
    """Returns the number of keys in a tile.

    Tiles are as few as the cache's size allows, and as even as possible. The tiles get shorter if much of them would be
    padding.
    """
    longest, total = int(counts.max()), int(counts.sum())
    most = max(TILE_TOKENS_MIN, TILE_BYTES_MAX // token_bytes)
    while True:
        tile = -(-longest // -(-longest // most))
        padded = int(((counts + tile - 1) // tile).sum()) * tile
        if most <= TILE_TOKENS_MIN or padded <= (1 + PADDING_MAX) * total:
            return tile
        most = max(TILE_TOKENS_MIN, most // 2)


def attend_tiles(
    tiles: Tiles,
    query: torch.Tensor,
    pages: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the results of the decoding sequences.

    Args:
        tiles: the tiles of the layer's window.
        query: `[sequences, query_heads, head_dim]`.
        pages: one layer, see `AttentionPlan.append`.
        scale: see `AttentionPlan.attend`.
        soft_cap: see `AttentionPlan.attend`.
        sinks: see `AttentionPlan.attend`.

    Returns:
        `[sequences, query_heads, head_dim]`.
    """
    _, _, page_size, kv_heads, head_dim = pages.shape
    sequences, query_heads, _ = query.shape
    keys = rows_of(pages, head_dim)
    pattern = tiles.pattern(query_heads, kv_heads, keys.shape[0], pages.dtype)
    values = keys[(pages.shape[1] - 1) * page_size * kv_heads :]  # row i is key i's value; a latent is key and value
    of_tile = tiles.sequence_of_tile
    is_whole = of_tile.shape[0] == sequences
    queries = query if is_whole else query[of_tile]
    torch.sparse.sampled_addmm(
        pattern.scores, queries.reshape(-1, head_dim), keys.t(), beta=0.0, alpha=scale, out=pattern.scores
    )
    scores = pattern.scores.values().view(-1, query_heads, tiles.rows.shape[1])
    if soft_cap > 0:
        scores = (scores / soft_cap).tanh() * soft_cap
    if tiles.padding is not None:
        scores = scores.masked_fill(tiles.padding, float("-inf"))
    if is_whole and sinks is None:
        return _weighted(scores.softmax(2), pattern, values).view(query.shape)
    largest = scores.new_full((sequences, query_heads), float("-inf")) if sinks is None else sinks.to(scores.dtype)
    largest = largest.expand(sequences, -1).clone().index_reduce_(0, of_tile, scores.amax(2), "amax")
    weights = (scores - largest[of_tile][:, :, None]).exp_()
    total = torch.zeros_like(largest) if sinks is None else (sinks.to(scores.dtype) - largest).exp_()
    total = total.index_add_(0, of_tile, weights.sum(2))
    parts = _weighted(weights, pattern, values).view(-1, query_heads, head_dim)
    return torch.zeros_like(query).index_add_(0, of_tile, parts) / total[:, :, None]


def _weighted(weights: torch.Tensor, pattern: Pattern, values: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sums of rows of values, `[tiles * query_heads, head_dim]`.

    `values` must start at the value of the first key.
    """
    return embedding_bag(pattern.indices, values, pattern.starts, mode="sum", per_sample_weights=weights.flatten())
