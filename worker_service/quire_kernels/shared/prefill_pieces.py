"""Pieces of work of the prefill kernel for Hopper (`ops/prefill_hopper`): blocks, keys and queries of each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quire_kernels.shared.prefill_tiles import keys_of_block, piece_of_turn, tiles_of_keys, turns_of_program

GROUP_ROWS = gl.constexpr(64)  # of a group of warps: the rows of one wgmma


# fmt: off
@gluon.jit
def piece(turn, work, PROGRAMS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Loads the piece of a turn: the last blocks of rows first, the KV heads of a block side by side."""
    units, unit_count, qo_indptr, page_indptr, last_page_len = work
    number = piece_of_turn(turn, gl.program_id(0), PROGRAMS)
    unit = unit_count - 1 - number // KV_HEADS
    request = gl.load(units + unit * 4)
    row_start = gl.load(units + unit * 4 + 1)
    row_stop = gl.load(units + unit * 4 + 2)
    q_begin = gl.load(qo_indptr + request)
    q_len = gl.load(qo_indptr + request + 1) - q_begin
    first_page = gl.load(page_indptr + request)
    page_count = gl.load(page_indptr + request + 1) - first_page
    kv_len = (page_count - 1) * PAGE_SIZE + gl.load(last_page_len + request)
    kv_len = gl.where(page_count > 0, kv_len, 0)
    return number % KV_HEADS, row_start, row_stop, q_begin, q_len, first_page, kv_len


@gluon.jit
def turns(work, PROGRAMS: gl.constexpr, KV_HEADS: gl.constexpr):
    """Returns how many pieces this program does."""
    return turns_of_program(work[1] * KV_HEADS, gl.program_id(0), PROGRAMS)


@gluon.jit
def copy_tiles(
    part, page_indices, work, window_left, rows, ring, full, empty,
    PROGRAMS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):
    """Copies the tiles of K, or of V, of all pieces into their ring. One warp."""
    BOX: gl.constexpr = part.block_shape[0]
    BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    rows_per_page, rows_per_head, columns_per_head = rows
    count = 0
    for turn in range(turns(work, PROGRAMS, KV_HEADS)):
        kv_head, row_start, row_stop, _, q_len, first_page, kv_len = piece(turn, work, PROGRAMS, KV_HEADS, PAGE_SIZE)
        low, high, free_low, free_high = keys_of_block(
            kv_len, q_len, row_start, row_stop, window_left, GROUP, CAUSAL, WINDOW
        )
        start, stop, _, _ = tiles_of_keys(low, high, free_low, free_high, BLOCK_N)
        first_box = low // BOX
        last_box = (high - 1) // BOX
        column = kv_head * columns_per_head
        first_row = kv_head * rows_per_head
        for tile in range(start, stop):
            slot = count % STAGES
            parity = count // STAGES % 2 ^ 1
            box_rows = ()
            for i in gl.static_range(BLOCK_N // BOX):
                box = min(max(tile * (BLOCK_N // BOX) + i, first_box), last_box)
                page = gl.load(page_indices + first_page + box * BOX // PAGE_SIZE)
                box_rows += (page * rows_per_page + first_row + box * BOX % PAGE_SIZE,)  # type: ignore[assignment]
            mbarrier.wait(empty.index(slot), parity)
            mbarrier.expect(full.index(slot), BYTES)
            for i in gl.static_range(BLOCK_N // BOX):
                place = ring.index(slot).slice(i * BOX, BOX, dim=0)
                tma.async_copy_global_to_shared(part, [box_rows[i], column], full.index(slot), place)
            count += 1


@gluon.jit
def load_queries(
    q, q_strides, turn, work, PROGRAMS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Loads the 64 rows of a group for a piece, zero past the last row."""
    kv_head, row_start, row_stop, q_begin, _, _, _ = piece(turn, work, PROGRAMS, KV_HEADS, PAGE_SIZE)
    row = row_start + HALF * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LAYOUT))
    token = (q_begin + row // GROUP).to(gl.int64)
    offset = token * q_strides[0].to(gl.uint32).to(gl.int64) + (kv_head * GROUP + row % GROUP) * q_strides[1]
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    return gl.load(q + offset[:, None] + dim[None, :], mask=(row < row_stop)[:, None], other=0.0)
# fmt: on
