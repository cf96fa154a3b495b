"""Latent decode for Hopper in another order: both groups of warps read the first tile first, and give it back early.

Chosen by QUIRE_LATENT_VARIANT, to be measured; see `mla_hopper`.

    group 0                                        group 1
    S0 = Q K0^T;  m0 = max(m, S0)                  S1 = Q K1^T
    P0 = 2^(S0 - m0);  O = O 2^(m - m0) + P0 V0    O = O 2^(m - m0) + P0 V0;  meanwhile m1 = max(m0, S1)
    O = O 2^(m0 - m1) + P1 V1                      P1 = 2^(S1 - m1);  O = O 2^(m0 - m1) + P1 V1
    m = m1                                         m = m1

    near0   K0 [0, 256)                  empty: group 0, after its first product with V
    far0    K0 [256, 512) and its rope   empty: group 1, after its first
    near1   K1 [256, 512)                empty: group 1, after its second
    far1    K1 [0, 256) and its rope     empty: group 0, after its second
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire_kernels.ops.mla_hopper import LOG2_E, load_half, scores_of_tile, store_half
from quire_kernels.shared.latent_tiles import clear_rows, copy_piece, rows_of_tile, synchronize


# fmt: off
@gluon.jit
def attend_first(
    sources, shared, bars, result, start, stop, head_start, scale,
    HEADS: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr,
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
    load_half(sources, queries, query_ropes, ready.index(5), head_start, 0, HEADS)
    row_max = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([BLOCK, HALF], gl.float32, RESULT)
    for pair in range((stop - start + 2 * KEYS - 1) // (2 * KEYS)):
        phase = pair & 1
        zero = pair >> 30  # addresses that do not change would be kept in registers, forty of them, and spill
        seen = stop - start - 2 * pair * KEYS
        s = scores_of_tile(queries.index(zero), queries.index(1 + zero), query_ropes, near.index(zero), far.index(zero),
                           ropes.index(zero), full.index(0), full.index(2), phase, scale, KEYS, SCORES)
        synchronize()  # all warps have their scores: the rope and the rows to clear are not read any more
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
    sums.index(0).store(row_sum)
    synchronize()
    mbarrier.arrive(ready.index(3), count=1)
    mbarrier.wait(ready.index(4), 0)
    row_sum += sums.index(1).load(gl.SliceLayout(1, SCORES))
    store_half(acc, row_max, row_sum, result, head_start, 0, HEADS, SCORES, RESULT)


@gluon.jit
def attend_second(
    sources, shared, bars, result, start, stop, head_start, scale,
    HEADS: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr,
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
    load_half(sources, queries, query_ropes, ready.index(5), head_start, 1, HEADS)
    row_max = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([BLOCK, HALF], gl.float32, RESULT)
    for pair in range((stop - start + 2 * KEYS - 1) // (2 * KEYS)):
        phase = pair & 1
        zero = pair >> 30  # addresses that do not change would be kept in registers, forty of them, and spill
        seen = stop - start - (2 * pair + 1) * KEYS
        s = scores_of_tile(queries.index(1 + zero), queries.index(zero), query_ropes, near.index(1 + zero),
                           far.index(1 + zero), ropes.index(1 + zero), full.index(1), full.index(3), phase, scale,
                           KEYS, SCORES)
        synchronize()  # all warps have their scores: the rope and the rows to clear are not read any more
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
    sums.index(1).store(row_sum)
    synchronize()
    mbarrier.arrive(ready.index(4), count=1)
    mbarrier.wait(ready.index(3), 0)
    row_sum += sums.index(0).load(gl.SliceLayout(1, SCORES))
    store_half(acc, row_max, row_sum, result, head_start, HALF, HEADS, SCORES, RESULT)


@gluon.jit
def copy_tiles(
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
        rows = rows_of_tile(page_ids, start + 2 * pair * KEYS, last_page, KEYS, PAGE_SIZE, ROWS)
        mbarrier.wait(empty.index(0), free)
        mbarrier.expect(full.index(0), NEAR_BYTES)
        copy_piece(ckv, 0, rows, near.index(0), full.index(0), ROWS)
        mbarrier.wait(empty.index(2), free)
        mbarrier.expect(full.index(2), FAR_BYTES)
        copy_piece(ckv, HALF, rows, far.index(0), full.index(2), ROWS)
        copy_piece(kpe, 0, rows, ropes.index(0), full.index(2), ROWS)
        rows = rows_of_tile(page_ids, start + (2 * pair + 1) * KEYS, last_page, KEYS, PAGE_SIZE, ROWS)
        mbarrier.wait(empty.index(1), free)
        mbarrier.expect(full.index(1), NEAR_BYTES)
        copy_piece(ckv, HALF, rows, near.index(1), full.index(1), ROWS)
        mbarrier.wait(empty.index(3), free)
        mbarrier.expect(full.index(3), FAR_BYTES)
        copy_piece(ckv, 0, rows, far.index(1), full.index(3), ROWS)
        copy_piece(kpe, 0, rows, ropes.index(1), full.index(3), ROWS)


@gluon.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "page_indptr", "page_indices", "units", "unit_indptr", "lse", "partial_lse",
    ],
)
def mla_early_kernel(
    q_nope, q_pe,  # [tokens, HEADS, CKV_DIM] and [tokens, HEADS, KPE_DIM]
    ckv, kpe,  # descriptors of [pages * PAGE_SIZE, CKV_DIM], half of the dims a box, and [pages * PAGE_SIZE, KPE_DIM]
    qo_indptr, page_indptr, page_indices,  # int32
    units, unit_indptr,  # see `work_units`; items are keys
    out, lse,  # [tokens, HEADS, CKV_DIM] and float32 [tokens, HEADS], contiguous
    partial_out, partial_lse,  # float32 [capacity, HEADS, CKV_DIM] and [capacity, HEADS]
    sm_scale, batch,
    stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
):
    """Runs one program for each, unit outermost, then block of heads. Past the last unit it has no keys and no
    siblings, and writes nothing."""
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    unit = gl.program_id(0) // blocks
    head_start = gl.program_id(0) % blocks * BLOCK
    # All loads are on their way before the first is waited for; past the last unit there is a row with anything in it.
    unit_count = gl.load(unit_indptr + batch)
    request = gl.load(units + unit * 4)
    start = gl.load(units + unit * 4 + 1)
    stop = gl.load(units + unit * 4 + 2)
    siblings = gl.load(units + unit * 4 + 3)
    if unit >= unit_count:
        request = 0
        start = 0
        stop = 0
        siblings = 0
    q_row = gl.load(qo_indptr + request)
    first_page = gl.load(page_indptr + request)
    last_page = gl.load(page_indptr + request + 1) - first_page - 1
    element: gl.constexpr = q_nope.dtype.element_ty
    HALF: gl.constexpr = ckv.block_shape[1]
    KPE_DIM: gl.constexpr = kpe.block_shape[1]
    near = gl.allocate_shared_memory(element, [2, KEYS, HALF], ckv.layout)
    far = gl.allocate_shared_memory(element, [2, KEYS, HALF], ckv.layout)
    ropes = gl.allocate_shared_memory(element, [2, KEYS, KPE_DIM], kpe.layout)
    queries = gl.allocate_shared_memory(element, [2, BLOCK, HALF], ckv.layout)
    query_ropes = gl.allocate_shared_memory(element, [BLOCK, KPE_DIM], kpe.layout)
    maxima = gl.allocate_shared_memory(gl.float32, [2, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(5):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(ready.index(5), count=2)
    fence_async_shared()
    sources = (
        q_nope, q_pe, q_row.to(gl.int64) * stride_q_nope_token, q_row.to(gl.int64) * stride_q_pe_token,
        stride_q_nope_head, stride_q_pe_head,
    )
    shared = (near, far, ropes, queries, query_ropes, maxima, sums)
    bars = (full, empty, ready)
    result = (out, lse, partial_out, partial_lse, q_row, unit, siblings)
    scale = sm_scale * LOG2_E
    gl.warp_specialize(
        [
            (attend_first, (sources, shared, bars, result, start, stop, head_start, scale, HEADS, KEYS, HALF)),
            (attend_second, (sources, shared, bars, result, start, stop, head_start, scale, HEADS, KEYS, HALF)),
            (copy_tiles, (
                ckv, kpe, near, far, ropes, full, empty, page_indices + first_page, last_page, start, stop,
                PAGE_SIZE, KEYS,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, COPY_REGISTERS],
    )
# fmt: on
