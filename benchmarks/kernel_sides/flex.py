"""Flex attention over scattered pages. A block mask names the pages, which it reads in place.

The page of values follows the page of keys, so both have the same block numbers in two views of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

QUERY_BLOCK = 128
NOWHERE = 1 << 40  # position for pages of other requests: later than every query, so masked

Side = Callable[[], torch.Tensor]


def flex_side(
    pages: torch.Tensor, table: torch.Tensor, query: torch.Tensor, context: int, *, packed: bool = False,
    query_block: int = QUERY_BLOCK, kernel_options: Any = None,
) -> Side:  # fmt: skip
    """Returns a side for one batch of sequences of one length. The first call compiles the function.

    Args:
        pages: `[pool, 2, page_size, kv_heads, head_dim]`.
        table: int64 `[batch, pages of a sequence]`.
        query: `[batch * queries, query_heads, head_dim]`, the last queries of each context.
        context: keys of each sequence.
        packed: packs the query heads of a KV head into the rows of one head; decode only.
        query_block: query rows in a block of the mask.
        kernel_options: flex attention's `kernel_options`.
    """
    batch, block, (_, query_heads, head_dim) = table.shape[0], pages.shape[2], query.shape
    kv_heads, queries = pages.shape[3], query.shape[0] // batch
    rows = pages.view(-1, kv_heads, head_dim)
    key, value = (part.transpose(0, 1).unsqueeze(0) for part in (rows[:-block], rows[block:]))
    folded = query.view(batch, queries, query_heads, head_dim).transpose(1, 2)
    if packed:
        folded = query.view(batch, kv_heads, query_heads // kv_heads, head_dim)
    mask = page_mask(
        table, key_length=key.shape[2], block=block, query_length=folded.shape[2], queries=queries, context=context,
        query_block=query_block,
    )  # fmt: skip
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> torch.Tensor:
        output = compiled(folded, key, value, block_mask=mask, enable_gqa=not packed, kernel_options=kernel_options)
        return (output if packed else output.transpose(1, 2)).reshape(query.shape)

    return run


def page_mask(
    table: torch.Tensor, *, key_length: int, block: int, query_length: int, queries: int, context: int,
    query_block: int,
) -> BlockMask:  # fmt: skip
    """Returns the mask: for each block of queries, the pages that all of its queries see, and the pages that only some
    see.

    Args:
        table: int64 `[batch, pages of a sequence]`.
        key_length: rows of the pool, pages of keys and values alternately, without the last page.
        block: tokens of a page.
        query_length: rows of queries; equals `queries` unless heads are packed.
        queries: number of queries of a sequence, the last of its context.
        context: keys of a sequence.
        query_block: query rows of a block.
    """
    device, before = table.device, context - queries
    place = torch.full((table.shape[0], key_length // block), NOWHERE, dtype=torch.int64, device=device)
    place.scatter_(1, table * 2, torch.arange(table.shape[1], device=device).expand(table.shape))

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        position = place[b, k // block] * block + k % block
        return position < context if queries == 1 else position <= q + before

    blocks = -(-query_length // query_block)
    shape = (table.shape[0], 1, blocks, key_length // block)
    parts = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2)]
    counts = [torch.zeros(shape[:3], dtype=torch.int32, device=device) for _ in range(2)]
    for number in range(blocks):
        first, last = before + number * query_block, before + min((number + 1) * query_block, queries)
        whole, seen = (first + 1) // block, -(-last // block)
        if queries == 1:
            whole, seen = context // block, -(-context // block)
        for part, count, chosen in zip(parts, counts, (slice(whole, seen), slice(whole)), strict=True):
            of_pool = table[:, chosen] * 2
            part[:, 0, number, : of_pool.shape[1]] = of_pool
            count[:, 0, number] = of_pool.shape[1]
    return BlockMask.from_kv_blocks(
        counts[0], parts[0], counts[1], parts[1], BLOCK_SIZE=(query_block, block), mask_mod=visible,
        seq_lengths=(query_length, key_length),
    )  # fmt: skip
