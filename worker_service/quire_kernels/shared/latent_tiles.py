"""Copies to shared memory, and stores of results, for the kernel in `ops/mla_hopper`.

Index arithmetic is a function of its own, so that tests can call its `fn` as plain Python: Gluon has no interpreter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # one function: its names in Triton 3.7 and 3.6


@gluon.jit
def page_of_box(key, box, last_page, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr):
    """Returns the page that holds the keys from `key + box * ROWS` on, at most the last page, and their slot in it."""
    first = key + box * ROWS
    page = first // PAGE_SIZE
    return min(page, last_page), first % PAGE_SIZE


# fmt: off
@gluon.jit
def clear_rows(latents, first, layout: gl.constexpr):
    """Zeroes the rows of a tile from `first` on: slots without a token may hold NaN, and 0 * NaN is NaN."""
    rows = gl.arange(0, latents.shape[0], gl.SliceLayout(1, layout))
    for box in gl.static_range(latents.shape[1] // 64):
        part = latents.slice(box * 64, 64, dim=1)
        values = part.load(layout)
        part.store(gl.where((rows < first)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def rows_of_tile(page_ids, key, last_page, KEYS: gl.constexpr, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr):
    """Returns the first row of each box of a tile."""
    rows = ()
    for box in gl.static_range(KEYS // ROWS):
        page, slot = page_of_box(key, box, last_page, PAGE_SIZE, ROWS)
        rows = rows + (gl.load(page_ids + page) * PAGE_SIZE + slot,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def keys_of(work, item, HEADS: gl.constexpr, BLOCK: gl.constexpr):
    """Loads the range of keys `[first, last)` of an item."""
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    row = work[0] + item // blocks * 4
    return gl.load(row + 1), gl.load(row + 2)


@gluon.jit
def copy_pieces(source, column, rows, target, empty, free, full, first: gl.constexpr, PIECES: gl.constexpr,
                ROWS: gl.constexpr):
    """Copies half the dims of a tile, each piece with its own barrier; the last far barrier also covers the ropes."""
    KEYS: gl.constexpr = target.shape[0]
    WIDTH: gl.constexpr = target.shape[1] // PIECES
    ROPE: gl.constexpr = 64
    mbarrier.wait(empty, free)
    for piece in gl.static_range(PIECES):
        if piece == PIECES - 1 and first // PIECES % 2 == 1:
            mbarrier.expect(full.index(first + piece), KEYS * (WIDTH + ROPE) * 2)
        else:
            mbarrier.expect(full.index(first + piece), KEYS * WIDTH * 2)
        part = target.slice(piece * WIDTH, WIDTH, dim=1)
        for box in gl.static_range(KEYS // ROWS):
            tma.async_copy_global_to_shared(
                source, [rows[box], column + piece * WIDTH], full.index(first + piece),
                part.slice(box * ROWS, ROWS, dim=0),
            )


@gluon.jit
def copy_rope(source, rows, target, full, ROWS: gl.constexpr):
    """Copies the ropes of a tile."""
    for box in gl.static_range(target.shape[0] // ROWS):
        tma.async_copy_global_to_shared(source, [rows[box], 0], full, target.slice(box * ROWS, ROWS, dim=0))


@gluon.jit
def copy_items(
    work, q_nope, q_pe, ckv, kpe, shared, bars, page_indptr, page_indices, qo_indptr,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, PIECES: gl.constexpr,
):
    """Copies the queries and the pairs of tiles of each item, as soon as the groups have finished with the memory."""
    near, far, ropes, queries, query_ropes, _, _ = shared
    full, empty, _ = bars
    BLOCK: gl.constexpr = q_nope.block_shape[1]
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    ROWS: gl.constexpr = ckv.block_shape[0]
    HALF: gl.constexpr = q_nope.block_shape[2]
    QUERY_BYTES: gl.constexpr = BLOCK * (2 * HALF + kpe.block_shape[1]) * 2
    turn = 0
    rounds = 0
    for item in range(gl.program_id(0), work[1], gl.num_programs(0)):
        start, stop = keys_of(work, item, HEADS, BLOCK)
        request = gl.load(work[0] + item // blocks * 4)
        q_row = gl.load(qo_indptr + request)
        first_page = gl.load(page_indptr + request)
        last_page = gl.load(page_indptr + request + 1) - first_page - 1
        page_ids = page_indices + first_page
        head_start = item % blocks * BLOCK
        if stop > start:
            ready = full.index(4 * PIECES)
            mbarrier.wait(empty.index(4), (rounds & 1) ^ 1)
            mbarrier.expect(ready, QUERY_BYTES)
            for half in gl.static_range(2):
                target = queries.index(half)._reinterpret(q_nope.dtype, q_nope.block_shape, q_nope.layout)
                tma.async_copy_global_to_shared(q_nope, [q_row, head_start, half * HALF], ready, target)
            target = query_ropes._reinterpret(q_pe.dtype, q_pe.block_shape, q_pe.layout)
            tma.async_copy_global_to_shared(q_pe, [q_row, head_start, 0], ready, target)
            rounds += 1
        for pair in range((stop - start + 2 * KEYS - 1) // (2 * KEYS)):
            free = (turn & 1) ^ 1
            turn += 1
            rows = rows_of_tile(page_ids, start + 2 * pair * KEYS, last_page, KEYS, PAGE_SIZE, ROWS)
            copy_pieces(ckv, 0, rows, near.index(0), empty.index(0), free, full, 0, PIECES, ROWS)
            copy_pieces(ckv, HALF, rows, far.index(0), empty.index(2), free, full, PIECES, PIECES, ROWS)
            copy_rope(kpe, rows, ropes.index(0), full.index(2 * PIECES - 1), ROWS)
            rows = rows_of_tile(page_ids, start + (2 * pair + 1) * KEYS, last_page, KEYS, PAGE_SIZE, ROWS)
            copy_pieces(ckv, HALF, rows, near.index(1), empty.index(1), free, full, 2 * PIECES, PIECES, ROWS)
            copy_pieces(ckv, 0, rows, far.index(1), empty.index(3), free, full, 3 * PIECES, PIECES, ROWS)
            copy_rope(kpe, rows, ropes.index(1), full.index(4 * PIECES - 1), ROWS)


@gluon.jit
def store_half(acc, row_max, row_sum, result, item, dim_start: gl.constexpr, HEADS: gl.constexpr,
               SCORES: gl.constexpr, RESULT: gl.constexpr):
    """Writes a group's half of the result; group 0 also writes lse."""
    out, lse, partial_out, partial_lse, units, qo_indptr = result
    BLOCK: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1]
    CKV_DIM: gl.constexpr = 2 * HALF
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    # In this layout a thread has 8 adjacent elements of a row, so whole sectors of memory are written.
    WIDE: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    unit = item // blocks
    head_start = item % blocks * BLOCK
    siblings = gl.load(units + unit * 4 + 3)
    is_empty = row_sum == 0.0
    row_sum = gl.where(is_empty, 1.0, row_sum)
    row_lse = gl.where(is_empty, float("-inf"), row_max + gl.log2(row_sum))
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, RESULT))[:, None]
    lse_head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    if siblings == 1:
        q_row = gl.load(qo_indptr + gl.load(units + unit * 4))
        head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
        dims = dim_start + gl.arange(0, HALF, gl.SliceLayout(0, WIDE))
        offset = (q_row * HEADS + head).to(gl.int64) * CKV_DIM
        values = gl.convert_layout(acc.to(out.dtype.element_ty), WIDE)
        gl.store(out + offset[:, None] + dims[None, :], values, mask=(head < HEADS)[:, None])
        if dim_start == 0:
            gl.store(lse + q_row * HEADS + lse_head, row_lse, mask=lse_head < HEADS)
    if siblings > 1:
        head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, RESULT))
        dims = dim_start + gl.arange(0, HALF, gl.SliceLayout(0, RESULT))
        offset = (unit * HEADS + head).to(gl.int64) * CKV_DIM
        gl.store(partial_out + offset[:, None] + dims[None, :], acc, mask=(head < HEADS)[:, None])
        if dim_start == 0:
            gl.store(partial_lse + unit * HEADS + lse_head, row_lse, mask=lse_head < HEADS)
# fmt: on
