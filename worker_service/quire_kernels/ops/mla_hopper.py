"""Latent decode for Hopper: the same result as `mla_paged` with split keys, in Gluon.

One program attends 64 heads to the latents of one unit, two tiles of 64 keys at a time. Two groups of four warps take
turns: group 0 has the scores of the first tile and the dims [0, 256) of the result, group 1 the scores of the second
and the dims [256, 512). While one computes its softmax, the products of the other keep the tensor cores busy:

    group 0                                        group 1
    S0 = Q K0^T;  m0 = max(m, S0)                  S1 = Q K1^T
    P0 = 2^(S0 - m0);  O = O 2^(m - m0) + P0 V0    m1 = max(m0, S1);  P1 = 2^(S1 - m1)
    P0' = P0 2^(m0 - m1) for the other             O = O 2^(m - m1) + P1 V1
    O = O 2^(m0 - m1) + P1 V1                      O = O + P0' V0
    m = m1                                         m = m1

A group has its own weights in registers. Those for the other group go through the memory of its tile's ropes, which is
not read after the scores. Shared memory, and the barriers, each completed once for a pair of tiles:

    near0   K0 [0, 256)                  copied for group 0 alone        empty: group 0, after its first product with V
    near1   K1 [256, 512)                copied for group 1 alone        empty: group 1, after its first
    far0    K0 [256, 512) and its rope   scores of group 0, V of group 1, P0'   empty: group 1, after its second
    far1    K1 [0, 256) and its rope     scores of group 1, V of group 0, P1    empty: group 0, after its second
    max0_ready: m0 is there       weights1_ready: m1 and P1 are there       weights0_ready: P0' is there

A warp of its own copies whole pages (TMA). Gluon has no interpreter: `mla_paged_kernel` is the reference, and runs
wherever `fits_hopper` says no.
"""

from __future__ import annotations

import os

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire_kernels.shared.latent_tiles import clear_rows, copy_pairs, load_heads, synchronize
from quire_kernels.shared.launch import is_hopper
from quire_kernels.shared.mla_work import HOPPER_HEADS, HOPPER_KEYS, MlaWork

# Shared memory of a program: two tiles of 64 x 576 latents and as many queries, of 2 bytes, are 216 of the chip's
# 227 KiB.
HEADS, KEYS = HOPPER_HEADS, HOPPER_KEYS
CKV_DIM, KPE_DIM = 512, 64
NUM_WARPS = 4  # of a group
REGISTERS = 168  # per thread of all 12 warps; the registers that the copying warps free go to the others
# Registers per thread of the copying warp, whose addresses would spill with fewer, and of a group.
COPY_REGISTERS, GROUP_REGISTERS = 40, 232
PAGE_SIZE_MIN = 16
TMA_ALIGNMENT = 16  # bytes, of addresses and strides
SWITCH = "QUIRE_HOPPER"  # in the environment, read at each launch: "0" keeps to the Triton kernels, as for prefill
LOG2_E = gl.constexpr(1.4426950408889634)


# fmt: off
@gluon.jit
def scores_of_tile(queries_near, queries_far, query_ropes, near, far, rope, near_full, far_full, phase, scale,
                   KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Multiplies the queries with a tile of keys, piece by piece as they arrive."""
    BLOCK: gl.constexpr = queries_near.shape[0]
    nothing = gl.zeros([BLOCK, KEYS], gl.float32, LAYOUT)
    mbarrier.wait(near_full, phase)
    s = warpgroup_mma(queries_near, near.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(far_full, phase)
    s = warpgroup_mma(queries_far, far.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(query_ropes, rope.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,)) * scale


@gluon.jit
def load_half(sources, queries, query_ropes, ready, head_start, GROUP: gl.constexpr, HEADS: gl.constexpr):
    """Copies a half of the queries to shared memory, group 0 the ropes besides, and waits for the other half."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCK: gl.constexpr = query_ropes.shape[0]
    HALF: gl.constexpr = queries.shape[2]
    q_nope, q_pe, q_nope_offset, q_pe_offset, stride_q_nope_head, stride_q_pe_head = sources
    head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
    offset = q_nope_offset + GROUP * HALF
    load_heads(q_nope, offset, stride_q_nope_head, head, HEADS, queries.index(GROUP), WIDE)
    if GROUP == 0:
        head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, NARROW))
        load_heads(q_pe, q_pe_offset, stride_q_pe_head, head, HEADS, query_ropes, NARROW)
    fence_async_shared()
    synchronize()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, 0)


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
        synchronize()
        mbarrier.arrive(ready.index(0), count=1)
        base = gl.where(first_max == float("-inf"), 0.0, first_max)
        p = gl.exp2(s - base[:, None])
        alpha = gl.exp2(row_max - base)
        row_sum = row_sum * alpha + gl.sum(p, 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))[:, None]
        own = gl.convert_layout(p.to(element), WEIGHTS)
        acc_token = warpgroup_mma(own, near.index(zero), acc, is_async=True)
        mbarrier.wait(ready.index(1), phase)
        row_max = maxima.index(1).load(gl.SliceLayout(1, SCORES))
        alpha = gl.exp2(first_max - gl.where(row_max == float("-inf"), 0.0, row_max))
        row_sum = row_sum * alpha
        ropes.index(0).store((p * alpha[:, None]).to(element))
        fence_async_shared()
        synchronize()
        mbarrier.arrive(ready.index(2), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        synchronize()
        mbarrier.arrive(empty.index(0), count=1)
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
        new_max = gl.maximum(maxima.index(0).load(gl.SliceLayout(1, SCORES)), own_max)
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(s - base[:, None])
        alpha = gl.exp2(row_max - base)
        row_max = new_max
        maxima.index(1).store(new_max)
        weights = p.to(element)
        ropes.index(1).store(weights)
        fence_async_shared()
        synchronize()
        mbarrier.arrive(ready.index(1), count=1)
        row_sum = row_sum * alpha + gl.sum(p, 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))[:, None]
        acc_token = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), near.index(1 + zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        synchronize()
        mbarrier.arrive(empty.index(1), count=1)
        mbarrier.wait(ready.index(2), phase)
        acc_token = warpgroup_mma(ropes.index(zero), far.index(zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        synchronize()
        mbarrier.arrive(empty.index(2), count=1)
    sums.index(1).store(row_sum)
    synchronize()
    mbarrier.arrive(ready.index(4), count=1)
    mbarrier.wait(ready.index(3), 0)
    row_sum += sums.index(0).load(gl.SliceLayout(1, SCORES))
    store_half(acc, row_max, row_sum, result, head_start, HALF, HEADS, SCORES, RESULT)


@gluon.jit
def store_half(acc, row_max, row_sum, result, head_start, dim_start: gl.constexpr, HEADS: gl.constexpr,
               SCORES: gl.constexpr, RESULT: gl.constexpr):
    """Writes the half of the result that a group has, and, from group 0, lse."""
    out, lse, partial_out, partial_lse, q_row, unit, siblings = result
    is_empty = row_sum == 0.0
    row_sum = gl.where(is_empty, 1.0, row_sum)
    row_lse = gl.where(is_empty, float("-inf"), row_max + gl.log2(row_sum))
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, RESULT))[:, None]
    BLOCK: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1]
    CKV_DIM: gl.constexpr = 2 * HALF
    head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, RESULT))
    lse_head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    dims = dim_start + gl.arange(0, HALF, gl.SliceLayout(0, RESULT))
    if siblings == 1:
        offset = (q_row * HEADS + head).to(gl.int64) * CKV_DIM
        gl.store(out + offset[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=(head < HEADS)[:, None])
        if dim_start == 0:
            gl.store(lse + q_row * HEADS + lse_head, row_lse, mask=lse_head < HEADS)
    if siblings > 1:
        offset = (unit * HEADS + head).to(gl.int64) * CKV_DIM
        gl.store(partial_out + offset[:, None] + dims[None, :], acc, mask=(head < HEADS)[:, None])
        if dim_start == 0:
            gl.store(partial_lse + unit * HEADS + lse_head, row_lse, mask=lse_head < HEADS)


@gluon.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "page_indptr", "page_indices", "units", "unit_indptr", "lse", "partial_lse",
    ],
)
def mla_hopper_kernel(
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
            (copy_pairs, (
                ckv, kpe, near, far, ropes, full, empty, page_indices + first_page, last_page, start, stop,
                PAGE_SIZE, KEYS,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, COPY_REGISTERS],
    )
# fmt: on


def fits_hopper(parts: dict[str, torch.Tensor], division: MlaWork) -> bool:
    """Says whether `launch_hopper` can take a batch: latents of 512 + 64 in pages that lie one after another.

    Args:
        parts: "q_nope", "q_pe", "ckv" and "kpe", checked by `check_mla_tensors`.
        division: of the batch.
    """
    q_nope, ckv, kpe = parts["q_nope"], parts["ckv"], parts["kpe"]
    page_size = ckv.shape[1]
    return (
        os.environ.get(SWITCH) != "0"
        and is_hopper(q_nope.device)
        and division.split_keys
        and division.tiling.block_m == HEADS
        and q_nope.element_size() == 2
        and (ckv.shape[2], kpe.shape[2]) == (CKV_DIM, KPE_DIM)
        and page_size >= PAGE_SIZE_MIN
        and page_size & (page_size - 1) == 0
        and all(is_copyable(part) for part in (ckv, kpe))
    )


def is_copyable(cache: torch.Tensor) -> bool:
    """Says whether TMA can copy rows of `[pages, page_size, dim]`: they are rows of one matrix, and aligned."""
    pages, page_size, _ = cache.shape
    strides = (cache.stride(0), cache.stride(1))
    return (
        0 < pages * page_size < 2**31
        and strides[0] == page_size * strides[1]
        and strides[1] * cache.element_size() % TMA_ALIGNMENT == 0
        and cache.data_ptr() % TMA_ALIGNMENT == 0
    )


def describe(cache: torch.Tensor, columns: int) -> TensorDescriptor:
    """Describes a cache `[pages, page_size, dim]` as a matrix; boxes of it are a page or `KEYS` rows, and `columns`."""
    pages, page_size, dim = cache.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(
        cache, [pages * page_size, dim], [cache.stride(1), 1], [min(page_size, KEYS), columns], layout
    )


def launch_hopper(
    parts: dict[str, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    division: MlaWork,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
) -> None:
    """Attends one query per request to its latents; requests of several units are still to be merged.

    Args:
        parts: as of `fits_hopper`, which said yes.
        indices: qo_indptr, kv_indptr and kv_indices, as of `mla_paged`.
        division: by `divide_mla`.
        out: `[tokens, heads, 512]`, contiguous.
        lse: float32 `[tokens, heads]`, contiguous.
        sm_scale: factor of the dot products.
    """
    q_nope, q_pe, ckv, kpe = parts.values()
    heads = q_nope.shape[1]
    programs = division.work.capacity * triton.cdiv(heads, HEADS)
    mla_hopper_kernel[(programs,)](
        q_nope, q_pe, describe(ckv, CKV_DIM // 2), describe(kpe, KPE_DIM), *indices, division.work.units,
        division.work.indptr, out, lse, division.partial_out, division.partial_lse, float(sm_scale),
        division.work.batch, *q_nope.stride()[:2], *q_pe.stride()[:2], HEADS=heads, PAGE_SIZE=ckv.shape[1],
        BLOCK=HEADS, KEYS=KEYS, COPY_REGISTERS=COPY_REGISTERS, GROUP_REGISTERS=GROUP_REGISTERS, num_warps=NUM_WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip
