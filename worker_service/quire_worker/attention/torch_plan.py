"""Units: groups of sequences that the CPU gathers and attends to together, and the pages that each sequence reads.

A unit is one gather and one attention call. The sequences of a unit have the same number of queries:

    one new token each (decode)   and similar lengths, so that padding costs less than a further call
    several (prefill, chunks)     and equal lengths

The size of the workspace limits a unit. Pages that a window hides from all queries of a sequence are not gathered.
Everything that depends only on lengths and block tables is computed here, once per forward pass and window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire_worker.attention.interface import AttentionBatch
from quire_worker.cache import KEY_AND_VALUE, PageSpec

# Most bytes of keys and values in a unit: so few are still in the CPU's cache when attention reads them after the
# gathering. A sequence with more bytes is a unit alone.
GATHER_BYTES_MAX = 8 << 20
# Most bytes of padding per sequence in a unit: more padding would cost more than another call.
PADDING_BYTES_MAX = 128 << 10
# Most queries in one call. A call skips keys that none of its queries sees. Blocks are larger in half precision,
# because each call rearranges all its keys.
QUERY_BLOCK, QUERY_BLOCK_HALF = 128, 256


class QueryBlock(NamedTuple):
    """The queries `[start, stop)` of each sequence in a unit, and the keys `[key_start, key_stop)` that they see."""

    start: int
    stop: int
    key_start: int
    key_stop: int


@dataclass(frozen=True, slots=True, eq=False)
class GatheredBatch:
    """A unit: sequences that are attended to together.

    Pages are gathered whole. If the lengths differ, the slots past a sequence's last key are cleared and masked. A mask
    alone is not enough: these slots may hold NaN, and 0 * NaN is NaN.
    """

    tokens: slice | torch.Tensor  # the tokens in the flat batch, sequences x queries; int64 if not contiguous
    sequence_count: int
    query_length: int  # queries of each sequence
    key_pages: torch.Tensor  # int64 [sequences * pages], row of each page's keys (`rows_of`); the next row has values
    keys: slice  # the slots that attention reads, among a sequence's gathered slots
    unseen: torch.Tensor | None  # int64, the gathered slots to clear
    mask: torch.Tensor | None  # [sequences, 1, 1, keys], of the cache's dtype: -inf where unseen; None: all are seen
    blocks: tuple[QueryBlock, ...]
    is_prompt: bool  # the queries are all the keys, and there is no window: plain causal attention


class _Part(NamedTuple):
    """A sequence, and the keys `[first_key, first_key + key_count)` that its queries see."""

    sequence: int
    first_token: int  # index in the flat batch
    query_length: int
    first_key: int
    key_count: int


def plan_units(
    batch: AttentionBatch, spec: PageSpec, window_left: int, *, query_length_min: int
) -> tuple[GatheredBatch, ...]:
    """Divides the sequences of a batch into units.

    Args:
        batch: layout of the forward pass.
        spec: shape of the pages.
        window_left: keys before its own position that a query sees, inclusive; -1: all.
        query_length_min: sequences with fewer queries are left out; at least 1.
    """
    starts = batch.query_indptr.tolist()
    parts = []
    for index, kv_length in enumerate(batch.kv_lengths.tolist()):
        query_length = starts[index + 1] - starts[index]
        if query_length >= query_length_min:
            first = max(0, kv_length - query_length - window_left) if window_left >= 0 else 0
            parts.append(_Part(index, starts[index], query_length, first, kv_length - first))
    return tuple(_plan_unit(batch, spec, group, window_left) for group in _groups(parts, spec))


def _groups(parts: Sequence[_Part], spec: PageSpec) -> list[list[_Part]]:
    """Groups parts that may share a unit. In each group the longest part comes first."""
    token_bytes = KEY_AND_VALUE * spec.kv_head_count * spec.head_dim * spec.dtype.itemsize
    groups: list[list[_Part]] = []
    for part in sorted(parts, key=lambda part: (part.query_length, -part.key_count)):
        if groups:
            longest = groups[-1][0]
            fits = (len(groups[-1]) + 1) * longest.key_count * token_bytes <= GATHER_BYTES_MAX
            if fits and longest.query_length == part.query_length and _are_alike(longest, part, spec, token_bytes):
                groups[-1].append(part)
                continue
        groups.append([part])
    return groups


def _are_alike(longest: _Part, part: _Part, spec: PageSpec, token_bytes: int) -> bool:
    if part.query_length > 1:
        leads = part.first_key % spec.block_size, longest.first_key % spec.block_size
        return part.key_count == longest.key_count and leads[0] == leads[1]
    return (longest.key_count - part.key_count) * token_bytes <= PADDING_BYTES_MAX


def _plan_unit(batch: AttentionBatch, spec: PageSpec, parts: Sequence[_Part], window_left: int) -> GatheredBatch:
    """Plans a unit. Each sequence has the pages from its first to its last key, padded with its last page again."""
    page_size = spec.block_size
    first_pages = [part.first_key // page_size for part in parts]
    starts = [part.first_key % page_size for part in parts]  # index of each sequence's first key in its gathered slots
    stops = [start + part.key_count for start, part in zip(starts, parts, strict=True)]
    page_counts = [-(-stop // page_size) for stop in stops]
    page_count = max(page_counts)
    last_pages = torch.tensor([first + count - 1 for first, count in zip(first_pages, page_counts, strict=True)])
    place = torch.tensor(first_pages)[:, None] + torch.arange(page_count)
    tables = batch.block_tables[[part.sequence for part in parts]].to(torch.int64)
    pages = tables.gather(1, place.minimum(last_pages[:, None]))  # [sequences, pages]
    keys = slice(min(starts), max(stops))
    query_length, key_count = parts[0].query_length, keys.stop - keys.start
    unseen, mask = None, None
    if min(stops) < keys.stop or max(starts) > keys.start:
        slot = torch.arange(page_count * page_size)
        is_unseen = (slot < torch.tensor(starts)[:, None]) | (slot >= torch.tensor(stops)[:, None])
        unseen = is_unseen.flatten().nonzero().flatten()
        mask = torch.zeros(is_unseen.shape, dtype=spec.dtype).masked_fill_(is_unseen, float("-inf"))
        mask = mask[:, None, None, keys].contiguous()
    return GatheredBatch(
        tokens=_tokens(parts),
        sequence_count=len(parts),
        query_length=query_length,
        key_pages=pages.flatten() * (spec.page_stride // spec.half_elements),
        keys=keys,
        unseen=unseen,
        mask=mask,
        blocks=_query_blocks(query_length, key_count, window_left, query_block(spec.dtype)),
        is_prompt=window_left < 0 and 1 < query_length == key_count,
    )


def _tokens(parts: Sequence[_Part]) -> slice | torch.Tensor:
    """Returns the tokens of some sequences in the flat batch.

    The result is a slice if they lie side by side, because indexing by a slice makes no copy.
    """
    query_length, first = parts[0].query_length, parts[0].first_token
    if all(part.first_token == first + number * query_length for number, part in enumerate(parts)):
        return slice(first, first + len(parts) * query_length)
    return (torch.tensor([part.first_token for part in parts])[:, None] + torch.arange(query_length)).flatten()


def query_block(dtype: torch.dtype) -> int:
    """Returns the largest number of queries in a block."""
    return QUERY_BLOCK_HALF if dtype.itemsize == 2 else QUERY_BLOCK


def _query_blocks(query_length: int, key_count: int, window_left: int, block: int) -> tuple[QueryBlock, ...]:
    """Divides queries into blocks, each with the keys that at least one of its queries sees.

    The last query is at the position of the last key.
    """
    if query_length == 1:
        return (QueryBlock(0, 1, 0, key_count),)
    before = key_count - query_length
    blocks = []
    for start in range(0, query_length, block):
        stop = min(start + block, query_length)
        key_start = max(0, before + start - window_left) if window_left >= 0 else 0
        blocks.append(QueryBlock(start, stop, key_start, before + stop))
    return tuple(blocks)
