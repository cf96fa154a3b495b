"""Addresses of a cache's pages for TMA: in either layout, pages are boxes of rows of one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PAGE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # for tiles of 16-bit numbers
TMA_BYTES = 16  # TMA requires addresses and strides that are multiples of this number
TMA_ROWS_MAX = 2**31  # a matrix must have fewer rows, because TMA's coordinates are int32
BOX_ROWS_MIN = 8  # least rows of a TMA box, because swizzled shared memory repeats its pattern every 8 rows


@dataclass(frozen=True, slots=True)
class PageRows:
    """The cache's keys as rows of one matrix. The matrix's row stride is the distance of two tokens of a page."""

    per_page: int  # rows from one page to the next
    per_head: int  # rows from one KV head to the next, if heads are whole rows apart (HND)
    columns_per_head: int  # columns from one KV head to the next, if heads are side by side (NHD)
    count: int
    width: int  # columns that TMA may read


def page_rows(part: torch.Tensor) -> PageRows | None:
    """Returns how TMA can address `[pages, page_size, kv_heads, head_dim]`; None if that is impossible.

    Example: pages of 16 tokens, 8 heads of 128, keys and values interleaved. NHD has rows of 1024 elements, 32 rows
    from page to page, and heads 128 columns apart. HND has rows of 128 elements, 256 rows from page to page, and heads
    16 rows apart.
    """
    (pages, page_size, heads, head_dim), (page, token, head, element) = part.shape, part.stride()
    head = head if heads > 1 else 0
    page = page if pages > 1 else 0
    aligned = (token * part.element_size()) % TMA_BYTES == 0 and part.data_ptr() % TMA_BYTES == 0
    if element != 1 or not aligned or token < head_dim or page < 0 or head < 0 or page % token:
        return None
    if head % token == 0:
        per_head, columns = head // token, 0
    elif head * part.element_size() % TMA_BYTES == 0 and (heads - 1) * head + head_dim <= token:
        per_head, columns = 0, head
    else:
        return None
    count = (pages - 1) * (page // token) + (heads - 1) * per_head + page_size
    if count >= TMA_ROWS_MAX:
        return None
    return PageRows(page // token, per_head, columns, count, (heads - 1) * columns + head_dim)


def pages_by_tma(part: torch.Tensor, rows: PageRows, block_n: int) -> TensorDescriptor:
    """Returns a TMA descriptor of K or V. The descriptor is passed by value, so a CUDA graph stores it."""
    box = [min(part.shape[1], block_n), part.shape[3]]
    return TensorDescriptor(part, [rows.count, rows.width], [part.stride(1), 1], box, PAGE_LAYOUT)
