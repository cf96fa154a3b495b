"""Latent decode for Hopper by programs that stay: the order of `mla_early`, and the next unit on its way meanwhile.

Chosen by QUIRE_LATENT_VARIANT, to be measured; see `mla_hopper`. A program takes the items (a block of heads of a unit)
program, program + programs, ... TMA copies the queries, too: those of the next item as soon as both groups have the
last scores of this one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire_kernels.ops.mla_hopper import LOG2_E
from quire_kernels.shared.latent_tiles import clear_rows, rows_of_tile, synchronize


# fmt: off
@gluon.jit
def scores_of_pieces(queries_near, queries_far, query_ropes, near, far, rope, full, tile: gl.constexpr, phase, scale,
                     KEYS: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """Multiplies the queries with a tile of keys, piece by piece as they arrive."""
    BLOCK: gl.constexpr = queries_near.shape[0]
    WIDTH: gl.constexpr = near.shape[1] // PIECES
    s = gl.zeros([BLOCK, KEYS], gl.float32, LAYOUT)
    for piece in gl.static_range(PIECES):
        mbarrier.wait(full.index(2 * tile * PIECES + piece), phase)
        keys = near.slice(piece * WIDTH, WIDTH, dim=1).permute((1, 0))
        s = warpgroup_mma(queries_near.slice(piece * WIDTH, WIDTH, dim=1), keys, s, use_acc=piece > 0, is_async=True)
    for piece in gl.static_range(PIECES):
        mbarrier.wait(full.index((2 * tile + 1) * PIECES + piece), phase)
        keys = far.slice(piece * WIDTH, WIDTH, dim=1).permute((1, 0))
        s = warpgroup_mma(queries_far.slice(piece * WIDTH, WIDTH, dim=1), keys, s, is_async=True)
    s = warpgroup_mma(query_ropes, rope.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,)) * scale


@gluon.jit
def keys_of(work, item, HEADS: gl.constexpr, BLOCK: gl.constexpr):
    """Loads the keys of an item: the first, and past the last."""
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    row = work[0] + item // blocks * 4
    return gl.load(row + 1), gl.load(row + 2)


@gluon.jit
def attend_first(
    work, shared, bars, result, scale,
    HEADS: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr, PIECES: gl.constexpr,
):
    """Attends to the first tile of each pair, and computes the first half of the dims: group 0."""
    near, far, ropes, queries, query_ropes, maxima, sums = shared
    full, empty, ready = bars
    BLOCK: gl.constexpr = query_ropes.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    element: gl.constexpr = query_ropes.dtype
    turn = 0  # of the barriers that each pair of tiles completes
    rounds = 0  # of those that each item with keys completes
    for item in range(gl.program_id(0), work[2], gl.num_programs(0)):
        start, stop = keys_of(work, item, HEADS, BLOCK)
        row_max = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        row_sum = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([BLOCK, HALF], gl.float32, RESULT)
        pairs = (stop - start + 2 * KEYS - 1) // (2 * KEYS)
        if pairs > 0:
            mbarrier.wait(full.index(4 * PIECES), rounds & 1)
        for pair in range(pairs):
            phase = turn & 1
            turn += 1
            zero = pair >> 30  # addresses that do not change would be kept in registers, forty of them, and spill
            seen = stop - start - 2 * pair * KEYS
            s = scores_of_pieces(queries.index(zero), queries.index(1 + zero), query_ropes, near.index(zero),
                                 far.index(zero), ropes.index(zero), full, 0, phase, scale, KEYS, PIECES, SCORES)
            synchronize()  # all warps have their scores: the rope and the rows to clear are not read any more
            mbarrier.arrive(empty.index(4), count=1, pred=pair == pairs - 1)
            if seen < KEYS:
                clear_rows(near.index(0), seen, NARROW)
                clear_rows(far.index(0), seen, NARROW)
                fence_async_shared()
                s = gl.where((gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)) < seen)[None, :], s, float("-inf"))
            first_max = gl.maximum(row_max, gl.max(s, 1))
            maxima.index(0).store(first_max)
            base = gl.where(first_max == float("-inf"), 0.0, first_max)
            p = gl.exp2(s - base[:, None])
            weights = p.to(element)
            ropes.index(0).store(weights)
            fence_async_shared()
            synchronize()
            mbarrier.arrive(ready.index(0), count=1)
            alpha = gl.exp2(row_max - base)
            row_sum = row_sum * alpha + gl.sum(p, 1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))[:, None]
            acc_token = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), near.index(zero), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            synchronize()
            mbarrier.arrive(empty.index(0), count=1)
            mbarrier.wait(ready.index(1), phase)
            row_max = maxima.index(1).load(gl.SliceLayout(1, SCORES))
            alpha = gl.exp2(first_max - gl.where(row_max == float("-inf"), 0.0, row_max))
            row_sum = row_sum * alpha
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))[:, None]
            acc_token = warpgroup_mma(ropes.index(1 + zero), far.index(1 + zero), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            synchronize()
            mbarrier.arrive(empty.index(3), count=1)
        if pairs > 0:  # else both groups have nothing to say
            sums.index(0).store(row_sum)
            synchronize()
            mbarrier.arrive(ready.index(3), count=1)
            mbarrier.wait(ready.index(4), rounds & 1)
            row_sum += sums.index(1).load(gl.SliceLayout(1, SCORES))
            rounds += 1
        store_half(acc, row_max, row_sum, result, item, 0, HEADS, SCORES, RESULT)


@gluon.jit
def attend_second(
    work, shared, bars, result, scale,
    HEADS: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr, PIECES: gl.constexpr,
):
    """Attends to the second tile of each pair, and computes the second half of the dims: group 1."""
    near, far, ropes, queries, query_ropes, maxima, sums = shared
    full, empty, ready = bars
    BLOCK: gl.constexpr = query_ropes.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    element: gl.constexpr = query_ropes.dtype
    turn = 0  # of the barriers that each pair of tiles completes
    rounds = 0  # of those that each item with keys completes
    for item in range(gl.program_id(0), work[2], gl.num_programs(0)):
        start, stop = keys_of(work, item, HEADS, BLOCK)
        row_max = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        row_sum = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([BLOCK, HALF], gl.float32, RESULT)
        pairs = (stop - start + 2 * KEYS - 1) // (2 * KEYS)
        if pairs > 0:
            mbarrier.wait(full.index(4 * PIECES), rounds & 1)
        for pair in range(pairs):
            phase = turn & 1
            turn += 1
            zero = pair >> 30  # addresses that do not change would be kept in registers, forty of them, and spill
            seen = stop - start - (2 * pair + 1) * KEYS
            s = scores_of_pieces(queries.index(1 + zero), queries.index(zero), query_ropes, near.index(1 + zero),
                                 far.index(1 + zero), ropes.index(1 + zero), full, 1, phase, scale, KEYS, PIECES,
                                 SCORES)
            synchronize()  # all warps have their scores: the rope and the rows to clear are not read any more
            mbarrier.arrive(empty.index(4), count=1, pred=pair == pairs - 1)
            if seen < KEYS:
                clear_rows(near.index(1), seen, NARROW)
                clear_rows(far.index(1), seen, NARROW)
                s = gl.where((gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)) < seen)[None, :], s, float("-inf"))
            own_max = gl.max(s, 1)
            mbarrier.wait(ready.index(0), phase)
            first_max = maxima.index(0).load(gl.SliceLayout(1, SCORES))
            first_base = gl.where(first_max == float("-inf"), 0.0, first_max)
            alpha = gl.exp2(row_max - first_base)
            row_sum = row_sum * alpha
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))[:, None]
            acc_token = warpgroup_mma(ropes.index(zero), far.index(zero), acc, is_async=True)
            row_max = gl.maximum(first_max, own_max)
            maxima.index(1).store(row_max)
            base = gl.where(row_max == float("-inf"), 0.0, row_max)
            p = gl.exp2(s - base[:, None])
            weights = p.to(element)
            ropes.index(1).store(weights)
            fence_async_shared()
            synchronize()
            mbarrier.arrive(ready.index(1), count=1)
            alpha = gl.exp2(first_max - base)
            row_sum = row_sum * alpha + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            synchronize()
            mbarrier.arrive(empty.index(2), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))[:, None]
            acc_token = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), near.index(1 + zero), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            synchronize()
            mbarrier.arrive(empty.index(1), count=1)
        if pairs > 0:  # else both groups have nothing to say
            sums.index(1).store(row_sum)
            synchronize()
            mbarrier.arrive(ready.index(4), count=1)
            mbarrier.wait(ready.index(3), rounds & 1)
            row_sum += sums.index(0).load(gl.SliceLayout(1, SCORES))
            rounds += 1
        store_half(acc, row_max, row_sum, result, item, HALF, HEADS, SCORES, RESULT)


@gluon.jit
def store_half(acc, row_max, row_sum, result, item, dim_start: gl.constexpr, HEADS: gl.constexpr,
               SCORES: gl.constexpr, RESULT: gl.constexpr):
    """Writes the half of the result that a group has, and, from group 0, lse."""
    out, lse, partial_out, partial_lse, units, qo_indptr = result
    BLOCK: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1]
    CKV_DIM: gl.constexpr = 2 * HALF
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    # A thread has 8 elements of a row side by side, after an exchange within its warp: whole sectors are written.
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


@gluon.jit
def copy_pieces(source, column, rows, target, empty, free, full, first: gl.constexpr, PIECES: gl.constexpr,
                ROWS: gl.constexpr):
    """Copies half the dims of a tile, each piece with a barrier of its own; the last far one waits for ropes."""
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
    """Copies the queries and the pairs of tiles of each item, as soon as their memory is not read any more."""
    near, far, ropes, queries, query_ropes, _, _ = shared
    full, empty, _ = bars
    BLOCK: gl.constexpr = q_nope.block_shape[1]
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    ROWS: gl.constexpr = ckv.block_shape[0]
    HALF: gl.constexpr = q_nope.block_shape[2]
    QUERY_BYTES: gl.constexpr = BLOCK * (2 * HALF + kpe.block_shape[1]) * 2
    turn = 0
    rounds = 0
    for item in range(gl.program_id(0), work[2], gl.num_programs(0)):
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


@gluon.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "page_indptr", "page_indices", "units", "unit_indptr", "lse", "partial_lse",
    ],
)
def mla_persistent_kernel(
    q_nope, q_pe,  # descriptors of [tokens, HEADS, CKV_DIM], half of the dims a box, and [tokens, HEADS, KPE_DIM]
    ckv, kpe,  # descriptors of [pages * PAGE_SIZE, CKV_DIM], half of the dims a box, and [pages * PAGE_SIZE, KPE_DIM]
    qo_indptr, page_indptr, page_indices,  # int32
    units, unit_indptr,  # see `work_units`; items are keys
    out, lse,  # [tokens, HEADS, CKV_DIM] and float32 [tokens, HEADS], contiguous
    partial_out, partial_lse,  # float32 [capacity, HEADS, CKV_DIM] and [capacity, HEADS]
    sm_scale, batch,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr,
    PIECES: gl.constexpr, COPY_REGISTERS: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
):
    """Runs as many programs as there are multiprocessors, or fewer."""
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    work = (units, batch, gl.load(unit_indptr + batch) * blocks)
    element: gl.constexpr = ckv.dtype
    HALF: gl.constexpr = q_nope.block_shape[2]
    KPE_DIM: gl.constexpr = kpe.block_shape[1]
    near = gl.allocate_shared_memory(element, [2, KEYS, HALF], ckv.layout)
    far = gl.allocate_shared_memory(element, [2, KEYS, HALF], ckv.layout)
    ropes = gl.allocate_shared_memory(element, [2, KEYS, KPE_DIM], kpe.layout)
    queries = gl.allocate_shared_memory(element, [2, BLOCK, HALF], ckv.layout)
    query_ropes = gl.allocate_shared_memory(element, [BLOCK, KPE_DIM], kpe.layout)
    maxima = gl.allocate_shared_memory(gl.float32, [2, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [4 * PIECES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(4 * PIECES + 1):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(5):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(empty.index(4), count=2)
    fence_async_shared()
    shared = (near, far, ropes, queries, query_ropes, maxima, sums)
    bars = (full, empty, ready)
    result = (out, lse, partial_out, partial_lse, units, qo_indptr)
    scale = sm_scale * LOG2_E
    gl.warp_specialize(
        [
            (attend_first, (work, shared, bars, result, scale, HEADS, KEYS, HALF, PIECES)),
            (attend_second, (work, shared, bars, result, scale, HEADS, KEYS, HALF, PIECES)),
            (copy_items, (
                work, q_nope, q_pe, ckv, kpe, shared, bars, page_indptr, page_indices, qo_indptr, HEADS, PAGE_SIZE,
                KEYS, PIECES,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, COPY_REGISTERS],
    )
# fmt: on
