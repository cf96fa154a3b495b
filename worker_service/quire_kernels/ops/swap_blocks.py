"""Gathers whole blocks into one contiguous buffer, and scatters them: for host memory, disk or another pool.

    gather:   staging[i] = buffers[0][blocks[i]], buffers[1][blocks[i]], ...        scatter: the reverse

`staging[i]` holds block `blocks[i]` of all buffers, one after another. The staging memory may be on the buffers' device
or in pinned host memory, which the GPU reads and writes over the bus. So one launch replaces a copy per block and
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from quire_kernels.shared.block_buffers import (
    NUM_WARPS,
    BlockBuffers,
    Buffers,
    check_blocks,
    describe_buffers,
    upload,
    word_constexprs,
    words_at,
)


@triton.jit(do_not_specialize=["staging_stride", "buffer_count", "chunk_count"])
def swap_blocks_kernel(
    table_ptr,
    staging_stride,
    buffer_count,
    chunk_count,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Moves one chunk of one block of one buffer; chunk is the innermost index, then buffer, then row of staging."""
    # The table has four parts: the address of staging; [buffers, 3] fields of buffers; [buffers] offsets in a row of
    # staging; [rows] blocks.
    program = tl.program_id(0)
    chunk = program % chunk_count
    buffer = (program // chunk_count) % buffer_count
    row = (program // chunk_count // buffer_count).to(tl.int64)
    buffers_ptr = table_ptr + 1
    base = tl.load(buffers_ptr + buffer * 3)
    stride = tl.load(buffers_ptr + buffer * 3 + 1)
    size = tl.load(buffers_ptr + buffer * 3 + 2)
    offset = tl.load(buffers_ptr + buffer_count * 3 + buffer)
    block = tl.load(buffers_ptr + buffer_count * 4 + row)
    word = chunk * CHUNK_WORDS + tl.arange(0, CHUNK_WORDS)
    mask = word < size // WORD_BYTES
    in_pool = words_at(base + block * stride, WORD) + word
    in_staging = words_at(tl.load(table_ptr) + row * staging_stride + offset, WORD) + word
    if GATHER:
        tl.store(in_staging, tl.load(in_pool, mask=mask), mask=mask)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=mask), mask=mask)


def gather_blocks(buffers: Buffers, blocks: Sequence[int], staging: torch.Tensor) -> None:
    """Copies blocks of all buffers into `staging`, one row per block.

    Makes one upload and one launch on the current stream, and does not wait for the device. The host must wait for the
    stream before it reads pinned memory.

    Args:
        buffers: each `[blocks, ...]` of any dtype, all on one device; a block is contiguous; there may be gaps between
            blocks. Or the result of `describe_buffers`, which saves checking each tensor again.
        blocks: block ids, in any order; repetitions are allowed.
        staging: uint8 `[blocks, bytes]` or longer, written in place, on the buffers' device or in pinned memory.
            `bytes` is the sum of a block's bytes in all buffers.

    Raises:
        ValueError: an id is outside the pool, or `buffers` or `staging` are not as described.
    """
    table = describe_buffers(buffers)
    check_blocks("blocks", blocks, table.block_count, unique=False)
    _swap(table, blocks, staging, gather=True)


def scatter_blocks(staging: torch.Tensor, buffers: Buffers, blocks: Sequence[int]) -> None:
    """Copies the rows of `staging` into blocks of all buffers, the reverse of `gather_blocks`.

    Args:
        staging: uint8 `[blocks, bytes]` or longer, as `gather_blocks` fills it; its bytes must not change until the
            stream is done.
        buffers: as for `gather_blocks`; written in place.
        blocks: block ids, each at most once.

    Raises:
        ValueError: an id is outside the pool or repeated, or `buffers` or `staging` are not as described.
    """
    table = describe_buffers(buffers)
    check_blocks("blocks", blocks, table.block_count, unique=True)
    _swap(table, blocks, staging, gather=False)


def gather_blocks_reference(buffers: Sequence[torch.Tensor], blocks: Sequence[int], staging: torch.Tensor) -> None:
    """Gathers blocks in plain torch."""
    for row, block in enumerate(blocks):
        parts = [buffer[block].reshape(-1).view(torch.uint8) for buffer in buffers]
        staging[row] = torch.cat(parts)


def _swap(table: BlockBuffers, blocks: Sequence[int], staging: torch.Tensor, *, gather: bool) -> None:
    row_bytes = sum(table.block_bytes)
    if staging.dtype != torch.uint8 or staging.dim() != 2 or staging.shape[1] != row_bytes:
        raise ValueError(f"staging must be uint8 [blocks, {row_bytes}], not {staging.dtype} {tuple(staging.shape)}")
    if staging.shape[0] < len(blocks):
        raise ValueError(f"staging must have at least {len(blocks)} rows, one per block, not {staging.shape[0]}")
    if not staging.is_contiguous():
        raise ValueError(f"staging must be contiguous, not have strides {staging.stride()}")
    if staging.device != table.device and not staging.is_pinned():
        raise ValueError(f"staging must be on {table.device} or pinned, not pageable memory on {staging.device}")
    if not blocks:
        return
    offsets = [0, *accumulate(table.block_bytes[:-1])]
    word_bytes = table.word_bytes(staging.data_ptr(), row_bytes, *offsets)
    with table.current(swap_blocks_kernel):
        swap_blocks_kernel[(len(blocks) * table.buffer_count * table.chunk_count(word_bytes),)](
            upload([staging.data_ptr(), *table.fields, *offsets, *blocks], table.device),
            row_bytes,
            table.buffer_count,
            table.chunk_count(word_bytes),
            **word_constexprs(word_bytes),
            GATHER=gather,
            num_warps=NUM_WARPS,
        )
