"""Latent decode for Hopper: the same result as `mla_paged` with split keys, in Gluon.

One program attends 64 heads to the latents of one unit, 64 at a time. A warp of its own copies whole pages into one of
two buffers (TMA), while eight warps multiply from the other:

    S = Q K^T over 512 + 64 dims, 32 keys a warp group;   P = 2^(S - m);   O = O 2^(m' - m) + P V, 256 dims a warp group

V is the first 512 dims of the buffer that holds K. P goes through shared memory, because each group needs all of it.

    full[b]   TMA -> consumers: buffer b holds its tile         one arrival, and the bytes of the tile
    empty[b]  consumers -> TMA: nobody reads buffer b any more  one arrival

Tile i of a unit is in buffer i % BUFFERS, and is the (i // BUFFERS)-th to be there, which is the phase of `full`; the
copy waits for the opposite phase of `empty`, so the first wait of a buffer passes at once.

Gluon has no interpreter: `mla_paged_kernel` is the reference, and runs wherever `fits_hopper` says no.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire_kernels.ops.mla_seesaw import mla_seesaw_kernel
from quire_kernels.shared.latent_tiles import LOG2_E, buffer_of, clear_rows, load_heads, page_of_box, synchronize
from quire_kernels.shared.launch import is_hopper
from quire_kernels.shared.mla_work import HOPPER_HEADS, HOPPER_KEYS, MlaWork

# Of a program. Two buffers of 64 x 576 latents and as many queries, of 2 bytes, are 216 of the chip's 227 KiB.
HEADS, KEYS, BUFFERS = HOPPER_HEADS, HOPPER_KEYS, 2
CKV_DIM, KPE_DIM = 512, 64
NUM_WARPS = 8  # that multiply
REGISTERS = 168  # per thread of all 12 warps; what the copying ones leave goes to the others
# Of `mla_hopper_kernel` and of `mla_seesaw_kernel`: registers per thread of the warp that copies, whose addresses would
# spill with fewer, and of a group of warps.
TOGETHER = {"BUFFERS": BUFFERS, "COPY_REGISTERS": 48}
IN_TURNS = {"COPY_REGISTERS": 40, "GROUP_REGISTERS": 232}
PAGE_SIZE_MIN = 16
TMA_ALIGNMENT = 16  # bytes, of addresses and strides
# In the environment, read at each launch, so that one process can compare the kernels: "0" keeps to the Triton kernels,
# as for prefill; "1" takes `mla_seesaw_kernel`.
SWITCH, TURNS_SWITCH = "QUIRE_HOPPER", "QUIRE_HOPPER_TURNS"


# fmt: off
@gluon.jit
def copy_latents(
    ckv, kpe, latents, ropes, full, empty, page_ids, last_page, start, stop,
    PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, BUFFERS: gl.constexpr,
):
    """Copies the tiles of a unit, each into its buffer as soon as that is free."""
    ROWS: gl.constexpr = ckv.block_shape[0]
    for tile in range((stop - start + KEYS - 1) // KEYS):
        buffer, phase = buffer_of(tile, BUFFERS)
        rows = ()
        for box in gl.static_range(KEYS // ROWS):
            page, slot = page_of_box(start + tile * KEYS, box, last_page, PAGE_SIZE, ROWS)
            rows = rows + (gl.load(page_ids + page) * PAGE_SIZE + slot,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(empty.index(buffer), phase ^ 1)
        mbarrier.expect(full.index(buffer), KEYS * (ckv.block_shape[1] + kpe.block_shape[1]) * 2)
        for box in gl.static_range(KEYS // ROWS):
            tma.async_copy_global_to_shared(
                ckv, [rows[box], 0], full.index(buffer), latents.index(buffer).slice(box * ROWS, ROWS, dim=0)
            )
            tma.async_copy_global_to_shared(
                kpe, [rows[box], 0], full.index(buffer), ropes.index(buffer).slice(box * ROWS, ROWS, dim=0)
            )


@gluon.jit
def attend_latents(
    q_nope, q_pe, q_nope_offset, q_pe_offset, stride_q_nope_head, stride_q_pe_head,
    latents, ropes, full, empty, queries, query_ropes, weights, out, lse, partial_out, partial_lse,
    q_row, unit, siblings, start, stop, head_start, scale,
    HEADS: gl.constexpr, KEYS: gl.constexpr, BUFFERS: gl.constexpr,
):
    """Attends a block of heads to the tiles of a unit, and writes the result."""
    BLOCK: gl.constexpr = queries.shape[0]
    CKV_DIM: gl.constexpr = queries.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, CKV_DIM // 2, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    element: gl.constexpr = queries.dtype
    head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE))
    load_heads(q_nope, q_nope_offset, stride_q_nope_head, head, HEADS, queries, WIDE)
    head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, NARROW))
    load_heads(q_pe, q_pe_offset, stride_q_pe_head, head, HEADS, query_ropes, NARROW)
    fence_async_shared()
    synchronize()
    row_max = gl.full([BLOCK], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros([BLOCK, KEYS], gl.float32, SCORES)  # added up over the keys at the end: that crosses warp groups
    acc = gl.zeros([BLOCK, CKV_DIM], gl.float32, RESULT)
    nothing = gl.zeros([BLOCK, KEYS], gl.float32, SCORES)
    for tile in range((stop - start + KEYS - 1) // KEYS):
        buffer, phase = buffer_of(tile, BUFFERS)
        latent = latents.index(buffer)
        seen = stop - start - tile * KEYS
        mbarrier.wait(full.index(buffer), phase)
        s = warpgroup_mma(queries, latent.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma(query_ropes, ropes.index(buffer).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,)) * scale
        if seen < KEYS:
            clear_rows(latent, seen, NARROW)
            s = gl.where((gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)) < seen)[None, :], s, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(s, 1))  # a barrier of all warps: nobody reads the last tile's weights now
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
        p = gl.exp2(s - base[:, None])
        alpha = gl.exp2(row_max - base)
        sums = sums * alpha[:, None] + p
        row_max = new_max
        weights.store(p.to(element))
        fence_async_shared()
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))[:, None]
        synchronize()
        acc = warpgroup_mma(weights, latent, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        synchronize()  # all warps have read the buffer
        mbarrier.arrive(empty.index(buffer), count=1)
    row_sum = gl.sum(sums, 1)
    is_empty = row_sum == 0.0
    row_sum = gl.where(is_empty, 1.0, row_sum)
    row_lse = gl.where(is_empty, float("-inf"), row_max + gl.log2(row_sum))
    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, RESULT))[:, None]
    head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, RESULT))
    lse_head = head_start + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    dims = gl.arange(0, CKV_DIM, gl.SliceLayout(0, RESULT))
    if siblings == 1:
        offset = (q_row * HEADS + head).to(gl.int64) * CKV_DIM
        gl.store(out + offset[:, None] + dims[None, :], acc.to(element), mask=(head < HEADS)[:, None])
        gl.store(lse + q_row * HEADS + lse_head, row_lse, mask=lse_head < HEADS)
    if siblings > 1:
        offset = (unit * HEADS + head).to(gl.int64) * CKV_DIM
        gl.store(partial_out + offset[:, None] + dims[None, :], acc, mask=(head < HEADS)[:, None])
        gl.store(partial_lse + unit * HEADS + lse_head, row_lse, mask=lse_head < HEADS)


@gluon.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "page_indptr", "page_indices", "units", "unit_indptr", "lse", "partial_lse",
    ],
)
def mla_hopper_kernel(
    q_nope, q_pe,  # [tokens, HEADS, CKV_DIM] and [tokens, HEADS, KPE_DIM]
    ckv, kpe,  # descriptors of [pages * PAGE_SIZE, CKV_DIM] and [pages * PAGE_SIZE, KPE_DIM]
    qo_indptr, page_indptr, page_indices,  # int32
    units, unit_indptr,  # see `work_units`; items are keys
    out, lse,  # [tokens, HEADS, CKV_DIM] and float32 [tokens, HEADS], contiguous
    partial_out, partial_lse,  # float32 [capacity, HEADS, CKV_DIM] and [capacity, HEADS]
    sm_scale, batch,
    stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK: gl.constexpr, KEYS: gl.constexpr, BUFFERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
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
    CKV_DIM: gl.constexpr = ckv.block_shape[1]
    KPE_DIM: gl.constexpr = kpe.block_shape[1]
    latents = gl.allocate_shared_memory(element, [BUFFERS, KEYS, CKV_DIM], ckv.layout)
    ropes = gl.allocate_shared_memory(element, [BUFFERS, KEYS, KPE_DIM], kpe.layout)
    queries = gl.allocate_shared_memory(element, [BLOCK, CKV_DIM], ckv.layout)
    query_ropes = gl.allocate_shared_memory(element, [BLOCK, KPE_DIM], kpe.layout)
    weights = gl.allocate_shared_memory(element, [BLOCK, KEYS], kpe.layout)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_latents, (
                q_nope, q_pe, q_row.to(gl.int64) * stride_q_nope_token, q_row.to(gl.int64) * stride_q_pe_token,
                stride_q_nope_head, stride_q_pe_head, latents, ropes, full, empty, queries, query_ropes, weights,
                out, lse, partial_out, partial_lse, q_row, unit, siblings, start, stop, head_start,
                sm_scale * LOG2_E, HEADS, KEYS, BUFFERS,
            )),
            (copy_latents, (
                ckv, kpe, latents, ropes, full, empty, page_indices + first_page, last_page, start, stop,
                PAGE_SIZE, KEYS, BUFFERS,
            )),
        ],
        [1],
        [COPY_REGISTERS],
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
    given = {"HEADS": heads, "PAGE_SIZE": ckv.shape[1], "BLOCK": HEADS, "KEYS": KEYS, "maxnreg": REGISTERS}
    arguments = (
        *indices, division.work.units, division.work.indptr, out, lse, division.partial_out, division.partial_lse,
        float(sm_scale), division.work.batch, *q_nope.stride()[:2], *q_pe.stride()[:2],
    )  # fmt: skip
    if os.environ.get(TURNS_SWITCH) == "1":
        boxes = (describe(ckv, CKV_DIM // 2), describe(kpe, KPE_DIM))
        mla_seesaw_kernel[(programs,)](q_nope, q_pe, *boxes, *arguments, **given, **IN_TURNS, num_warps=NUM_WARPS // 2)
    else:
        boxes = (describe(ckv, CKV_DIM), describe(kpe, KPE_DIM))
        mla_hopper_kernel[(programs,)](q_nope, q_pe, *boxes, *arguments, **given, **TOGETHER, num_warps=NUM_WARPS)
