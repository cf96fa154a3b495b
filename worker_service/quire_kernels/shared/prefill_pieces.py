"""Pieces of work of the prefill kernel for Hopper (`ops/prefill_hopper`).

Functions for taking pieces, and for loading their keys, values and queries.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quire_kernels.shared.prefill_tiles import keys_of_block, tiles_of_keys, unit_of_piece

GROUP_ROWS = gl.constexpr(64)  # rows per group of warps, as in one wgmma
QUEUE_SLOTS = gl.constexpr(2)

# Synchronizes the warps of a group, not all warps of the program. Triton 3.6 and 3.7 name this function differently.
synchronize_group = getattr(gl, "barrier", None) or gl.thread_barrier


# fmt: off
@gluon.jit
def piece(number, work, KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Loads a piece: its KV head, and the rows and keys of its block of rows."""
    units, unit_count, qo_indptr, page_indptr, last_page_len = work
    unit = unit_of_piece(number, unit_count, KV_HEADS)
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
def publish(number, turn, queue):
    """Puts the piece that follows a turn into the queue, after all warps have read the slot's old piece. One warp."""
    numbers, published, read = queue
    slot = turn % QUEUE_SLOTS
    mbarrier.wait(read.index(slot), turn // QUEUE_SLOTS % 2 ^ 1)
    numbers.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    synchronize_group()
    mbarrier.arrive(published.index(slot), count=1)


@gluon.jit
def published_piece(turn, queue, WARPS: gl.constexpr):
    """Waits for the piece that follows a turn, and returns it; `release` then frees the slot."""
    numbers, published, _ = queue
    slot = turn % QUEUE_SLOTS
    mbarrier.wait(published.index(slot), turn // QUEUE_SLOTS % 2)
    return gl.sum(numbers.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def release(turn, queue):
    """Signals that this group of warps has read the piece that follows a turn."""
    synchronize_group()
    mbarrier.arrive(queue[2].index(turn % QUEUE_SLOTS), count=1)


@gluon.jit
def copy_keys(
    part, page_indices, work, window_left, rows, ring, full, empty, queue, taken,
    PROGRAMS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):
    """Takes pieces, publishes them, and copies their tiles of K. One warp."""
    total = work[1] * KV_HEADS
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    number = gl.program_id(0)
    turn = 0
    count = 0
    while number < total:
        # The ticket is used only after the copies, so the warp does not wait for the atomic operation here.
        ticket = gl.atomic_add(taken + lane, lane * 0 + 1, mask=lane == 0, sem="relaxed")
        count = copy_tiles(
            part, page_indices, number, work, window_left, rows, ring, full, empty, count,
            KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, WINDOW,
        )
        # Each of `total` tickets is drawn once: one for every piece after the first `PROGRAMS`, and one by every
        # program to learn that no piece is left. The program that draws the last ticket resets the counter to 0.
        gl.store(taken + lane, lane * 0, mask=(lane == 0) & (ticket == total - 1))
        number = PROGRAMS + gl.sum(gl.where(lane == 0, ticket, 0), 0)
        publish(number, turn, queue)
        turn += 1


@gluon.jit
def copy_values(
    part, page_indices, work, window_left, rows, ring, full, empty, queue,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):
    """Copies the tiles of V of published pieces. One warp."""
    total = work[1] * KV_HEADS
    number = gl.program_id(0)
    turn = 0
    count = 0
    while number < total:
        count = copy_tiles(
            part, page_indices, number, work, window_left, rows, ring, full, empty, count,
            KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, WINDOW,
        )
        number = published_piece(turn, queue, 1)
        release(turn, queue)
        turn += 1


@gluon.jit
def copy_tiles(
    part, page_indices, number, work, window_left, rows, ring, full, empty, count,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):
    """Copies a piece's tiles of K, or of V, into their ring. Returns the number of tiles so far. One warp."""
    BOX: gl.constexpr = part.block_shape[0]
    BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    rows_per_page, rows_per_head, columns_per_head = rows
    kv_head, row_start, row_stop, _, q_len, first_page, kv_len = piece(number, work, KV_HEADS, PAGE_SIZE)
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
    return count


@gluon.jit
def load_queries(
    q, q_strides, number, work, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Loads a group's 64 query rows of a piece; zeros past the last row."""
    kv_head, row_start, row_stop, q_begin, _, _, _ = piece(number, work, KV_HEADS, PAGE_SIZE)
    row = row_start + HALF * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LAYOUT))
    token = (q_begin + row // GROUP).to(gl.int64)
    offset = token * q_strides[0].to(gl.uint32).to(gl.int64) + (kv_head * GROUP + row % GROUP) * q_strides[1]
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    return gl.load(q + offset[:, None] + dim[None, :], mask=(row < row_stop)[:, None], other=0.0)
# fmt: on
