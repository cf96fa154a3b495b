"""Latent decode for Hopper in Gluon, with the same result as `mla_paged` with split keys.

A program fills a multiprocessor. The program takes one item after another: 64 heads that attend to the latents of a
unit, two tiles of 64 keys at a time. Two groups of four warps take turns. Group 0 has the scores of the first tile and
the dims [0, 256) of the result. Group 1 has the scores of the second tile and the dims [256, 512). While one group
computes its softmax, the products of the other group keep the tensor cores busy:

    group 0                                        group 1
    S0 = Q K0^T;  m0 = max(m, S0)                  S1 = Q K1^T
    P0 = 2^(S0 - m0);  O = O 2^(m - m0) + P0 V0    O = O 2^(m - m0) + P0 V0;  meanwhile m1 = max(m0, S1)
    O = O 2^(m0 - m1) + P1 V1                      P1 = 2^(S1 - m1);  O = O 2^(m0 - m1) + P1 V1
    m = m1                                         m = m1

Both groups multiply with the first tile first. The next tile is copied while they multiply with the second tile. A
group has its weights P in registers, and passes them to the other group in the memory of its tile's ropes, which is not
read after the scores. Shared memory and barriers, each completed once per pair of tiles:

    near0   K0 [0, 256)                  scores of group 0, V of group 0        empty: group 0, after its first product
    far0    K0 [256, 512) and its rope   scores of group 0, V of group 1, P0    empty: group 1, after its first
    near1   K1 [256, 512)                scores of group 1, V of group 1        empty: group 1, after its second
    far1    K1 [0, 256) and its rope     scores of group 1, V of group 0, P1    empty: group 0, after its second
    ready 0: m0 and P0 are written       ready 1: m1 and P1 are written

A separate warp copies queries and whole pages by TMA. The warp copies the next item's tiles while the groups write the
results of this item. Gluon has no interpreter: `mla_paged_kernel` is the reference, and runs if `fits_hopper` is False.
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

from quire_kernels.shared.latent_tiles import clear_rows, copy_items, keys_of, store_half, synchronize
from quire_kernels.shared.launch import is_hopper, multiprocessor_count
from quire_kernels.shared.mla_work import HOPPER_HEADS, HOPPER_KEYS, MlaWork

# A program computes 64 heads with tiles of 64 keys. In shared memory, two tiles of 64 x 576 latents and a tile of
# 64 x 576 queries take 216 of the chip's 227 KiB, with 2 bytes per element.
HEADS, KEYS = HOPPER_HEADS, HOPPER_KEYS
CKV_DIM, KPE_DIM = 512, 64
NUM_WARPS = 4  # warps per group
REGISTERS = 168  # per thread of all 12 warps; the groups then take the registers that the copying warps release
# Registers per thread of the copying warp, and of a group. With fewer than 40, the copying warp would spill addresses.
COPY_REGISTERS, GROUP_REGISTERS = 40, 232
PIECES = 4  # pieces per half of a tile's dims: products start when the first piece has arrived
PAGE_SIZE_MIN = 16
TMA_ALIGNMENT = 16  # bytes; required of addresses and strides
SWITCH = "QUIRE_HOPPER"  # environment variable, read at each launch: "0" selects the Triton kernels, as for prefill
# Layouts of tensors in shared memory, by number of dimensions.
LAYOUTS = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3)}
LOG2_E = gl.constexpr(1.4426950408889634)


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
def sum_of_groups(row_sum, sums, ready, group: gl.constexpr, phase, SCORES: gl.constexpr):
    """Adds the other group's sum of weights."""
    sums.index(group).store(row_sum)
    synchronize()
    mbarrier.arrive(ready.index(3 + group), count=1)
    mbarrier.wait(ready.index(4 - group), phase)
    return row_sum + sums.index(1 - group).load(gl.SliceLayout(1, SCORES))


@gluon.jit
def attend_first(
    work, shared, bars, result, scale,
    HEADS: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr, PIECES: gl.constexpr,
):
    """Runs group 0: attends to the first tile of each pair, and computes the first half of the dims."""
    near, far, ropes, queries, query_ropes, maxima, sums = shared
    full, empty, ready = bars
    BLOCK: gl.constexpr = query_ropes.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    element: gl.constexpr = query_ropes.dtype
    turn = 0  # round of the barriers that every pair of tiles completes
    rounds = 0  # round of the barriers that every item with keys completes
    for item in range(gl.program_id(0), work[1], gl.num_programs(0)):
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
            zero = pair >> 30  # 0, but not for the compiler: with a constant 0, 40 addresses would occupy registers
            seen = stop - start - 2 * pair * KEYS
            s = scores_of_pieces(queries.index(zero), queries.index(1 + zero), query_ropes, near.index(zero),
                                 far.index(zero), ropes.index(zero), full, 0, phase, scale, KEYS, PIECES, SCORES)
            synchronize()  # all warps have their scores, so the rope and the rows to clear may be overwritten
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
        if pairs > 0:  # without keys neither group has sums to exchange
            row_sum = sum_of_groups(row_sum, sums, ready, 0, rounds & 1, SCORES)
            rounds += 1
        store_half(acc, row_max, row_sum, result, item, 0, HEADS, SCORES, RESULT)


@gluon.jit
def attend_second(
    work, shared, bars, result, scale,
    HEADS: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr, PIECES: gl.constexpr,
):
    """Runs group 1: attends to the second tile of each pair, and computes the second half of the dims."""
    near, far, ropes, queries, query_ropes, maxima, sums = shared
    full, empty, ready = bars
    BLOCK: gl.constexpr = query_ropes.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    element: gl.constexpr = query_ropes.dtype
    turn = 0  # round of the barriers that every pair of tiles completes
    rounds = 0  # round of the barriers that every item with keys completes
    for item in range(gl.program_id(0), work[1], gl.num_programs(0)):
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
            zero = pair >> 30  # 0, but not for the compiler: with a constant 0, 40 addresses would occupy registers
            seen = stop - start - (2 * pair + 1) * KEYS
            s = scores_of_pieces(queries.index(1 + zero), queries.index(zero), query_ropes, near.index(1 + zero),
                                 far.index(1 + zero), ropes.index(1 + zero), full, 1, phase, scale, KEYS, PIECES,
                                 SCORES)
            synchronize()  # all warps have their scores, so the rope and the rows to clear may be overwritten
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
        if pairs > 0:  # without keys neither group has sums to exchange
            row_sum = sum_of_groups(row_sum, sums, ready, 1, rounds & 1, SCORES)
            rounds += 1
        store_half(acc, row_max, row_sum, result, item, HALF, HEADS, SCORES, RESULT)


@gluon.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "page_indptr", "page_indices", "units", "unit_indptr", "lse", "partial_lse",
    ],
)
def mla_hopper_kernel(
    q_nope, q_pe,  # descriptors of [tokens, HEADS, CKV_DIM] (boxes have half of CKV_DIM) and [tokens, HEADS, KPE_DIM]
    ckv, kpe,  # descriptors of [pages * PAGE_SIZE, CKV_DIM] (boxes as for q_nope) and [pages * PAGE_SIZE, KPE_DIM]
    qo_indptr, page_indptr, page_indices,  # int32
    units, unit_indptr,  # see `work_units`; items are keys
    out, lse,  # [tokens, HEADS, CKV_DIM] and float32 [tokens, HEADS], contiguous
    partial_out, partial_lse,  # float32 [capacity, HEADS, CKV_DIM] and [capacity, HEADS]
    sm_scale, batch,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr,
    PIECES: gl.constexpr, COPY_REGISTERS: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
):
    """Runs at most one program per multiprocessor. Item i is unit i // blocks and block of heads i % blocks."""
    blocks: gl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    work = (units, gl.load(unit_indptr + batch) * blocks)
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
    # Barriers. full: the pieces of near0, far0, near1, far1, and the queries; empty: near0, near1, far0, far1, queries
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


def fits_hopper(parts: dict[str, torch.Tensor], division: MlaWork) -> bool:
    """Returns whether `launch_hopper` can take a batch: latents of 512 + 64, in pages that are adjacent in memory.

    Args:
        parts: "q_nope", "q_pe", "ckv" and "kpe", checked by `check_mla_tensors`.
        division: the batch's division, by `divide_mla`.
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
        and all(is_matrix(part) for part in (ckv, kpe))
        and all(is_aligned(part) for part in parts.values())
    )


def is_matrix(cache: torch.Tensor) -> bool:
    """Returns whether the rows of `[pages, page_size, dim]` form one matrix that TMA can address."""
    pages, page_size, _ = cache.shape
    return 0 < pages * page_size < 2**31 and cache.stride(0) == page_size * cache.stride(1)


def is_aligned(part: torch.Tensor) -> bool:
    """Returns whether TMA can copy rows of a tensor of 3 dimensions."""
    starts = (part.stride(0) * part.element_size(), part.stride(1) * part.element_size(), part.data_ptr())
    return all(start % TMA_ALIGNMENT == 0 for start in starts)


def describe(cache: torch.Tensor, columns: int) -> TensorDescriptor:
    """Describes a cache `[pages, page_size, dim]` as a matrix. A box is a page or `KEYS` rows, times `columns`."""
    pages, page_size, dim = cache.shape
    return TensorDescriptor(
        cache, [pages * page_size, dim], [cache.stride(1), 1], [min(page_size, KEYS), columns], LAYOUTS[2]
    )


def describe_queries(queries: torch.Tensor, columns: int) -> TensorDescriptor:
    """Describes queries `[tokens, heads, dim]`. A box is `HEADS` heads of a token, zero-padded, times `columns`."""
    return TensorDescriptor(queries, list(queries.shape), list(queries.stride()), [1, HEADS, columns], LAYOUTS[3])


def launch_hopper(
    parts: dict[str, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    division: MlaWork,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
) -> None:
    """Attends one query per request to its latents. The caller must merge requests of several units.

    Args:
        parts: the tensors for which `fits_hopper` returned True.
        indices: qo_indptr, kv_indptr and kv_indices, as for `mla_paged`.
        division: the result of `divide_mla`.
        out: `[tokens, heads, 512]`, contiguous.
        lse: float32 `[tokens, heads]`, contiguous.
        sm_scale: factor of the dot products.
    """
    q_nope, q_pe, ckv, kpe = parts.values()
    heads = q_nope.shape[1]
    items = division.work.capacity * triton.cdiv(heads, HEADS)
    mla_hopper_kernel[(min(items, multiprocessor_count(q_nope.device)),)](
        describe_queries(q_nope, CKV_DIM // 2), describe_queries(q_pe, KPE_DIM), describe(ckv, CKV_DIM // 2 // PIECES),
        describe(kpe, KPE_DIM), *indices, division.work.units, division.work.indptr, out, lse, division.partial_out,
        division.partial_lse, float(sm_scale), division.work.batch, HEADS=heads, PAGE_SIZE=ckv.shape[1], BLOCK=HEADS,
        KEYS=KEYS, PIECES=PIECES, COPY_REGISTERS=COPY_REGISTERS, GROUP_REGISTERS=GROUP_REGISTERS,
        num_warps=NUM_WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
