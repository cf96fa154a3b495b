"""Copies of tiles of latents and queries to shared memory, for the kernel of `ops/mla_hopper`.

Index arithmetic has its own function, whose `fn` tests call as plain Python: Gluon has no interpreter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # the name in Triton 3.7 and in 3.6


@gluon.jit
def page_of_box(key, box, last_page, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr):
    """Says which page holds the keys from `key + box * ROWS` on, and at which slot; never past the last page."""
    first = key + box * ROWS
    page = first // PAGE_SIZE
    return min(page, last_page), first % PAGE_SIZE


# fmt: off
@gluon.jit
def load_heads(q, token_offset, stride_head, head, heads, target, layout: gl.constexpr):
    """Copies the queries of a block of heads to shared memory, zeros past the last head."""
    dims = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    offset = token_offset + head.to(gl.int64) * stride_head
    target.store(gl.load(q + offset[:, None] + dims[None, :], mask=(head < heads)[:, None], other=0.0))


@gluon.jit
def clear_rows(latents, first, layout: gl.constexpr):
    """Clears the rows of a tile from `first` on: slots without a token may hold NaN, and 0 * NaN is NaN."""
    rows = gl.arange(0, latents.shape[0], gl.SliceLayout(1, layout))
    for box in gl.static_range(latents.shape[1] // 64):
        part = latents.slice(box * 64, 64, dim=1)
        values = part.load(layout)
        part.store(gl.where((rows < first)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def copy_piece(source, column, rows, target, full, ROWS: gl.constexpr):
    """Copies the boxes of a tile from one column on."""
    for box in gl.static_range(target.shape[0] // ROWS):
        tma.async_copy_global_to_shared(source, [rows[box], column], full, target.slice(box * ROWS, ROWS, dim=0))


@gluon.jit
def rows_of_tile(page_ids, key, last_page, KEYS: gl.constexpr, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr):
    """Loads the rows at which the boxes of a tile begin."""
    rows = ()
    for box in gl.static_range(KEYS // ROWS):
        page, slot = page_of_box(key, box, last_page, PAGE_SIZE, ROWS)
        rows = rows + (gl.load(page_ids + page) * PAGE_SIZE + slot,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def copy_pairs(
    ckv, kpe, near, far, ropes, full, empty, page_ids, last_page, start, stop,
    PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr,
):
    """Copies the pairs of tiles of a unit, each piece as soon as its memory is not read any more."""
    ROWS: gl.constexpr = ckv.block_shape[0]
    HALF: gl.constexpr = ckv.block_shape[1]
    NEAR_BYTES: gl.constexpr = KEYS * HALF * 2
    FAR_BYTES: gl.constexpr = KEYS * (HALF + kpe.block_shape[1]) * 2
    for pair in range((stop - start + 2 * KEYS - 1) // (2 * KEYS)):
        free = (pair & 1) ^ 1
        rows0 = rows_of_tile(page_ids, start + 2 * pair * KEYS, last_page, KEYS, PAGE_SIZE, ROWS)
        mbarrier.wait(empty.index(0), free)
        mbarrier.expect(full.index(0), NEAR_BYTES)
        copy_piece(ckv, 0, rows0, near.index(0), full.index(0), ROWS)
        rows1 = rows_of_tile(page_ids, start + (2 * pair + 1) * KEYS, last_page, KEYS, PAGE_SIZE, ROWS)
        mbarrier.wait(empty.index(1), free)
        mbarrier.expect(full.index(1), NEAR_BYTES)
        copy_piece(ckv, HALF, rows1, near.index(1), full.index(1), ROWS)
        mbarrier.wait(empty.index(3), free)
        mbarrier.expect(full.index(3), FAR_BYTES)
        copy_piece(ckv, 0, rows1, far.index(1), full.index(3), ROWS)
        copy_piece(kpe, 0, rows1, ropes.index(1), full.index(3), ROWS)
        mbarrier.wait(empty.index(2), free)
        mbarrier.expect(full.index(2), FAR_BYTES)
        copy_piece(ckv, HALF, rows0, far.index(0), full.index(2), ROWS)
        copy_piece(kpe, 0, rows0, ropes.index(0), full.index(2), ROWS)
# fmt: on
