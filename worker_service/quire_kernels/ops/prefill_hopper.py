"""Prefill over pages on Hopper (compute capability 9), in Gluon; `prefill_paged` launches it if `runs_on_hopper`.

    s = q k^T;  p = 2^(s * scale - m);  out = sum p v / sum p           for the rows and keys of `prefill_rows`

Two warps of a program copy pages into rings of tiles by TMA. One warp copies K and the other V, because a tile in pages
of 16 takes 16 copies, and a single warp starts them too slowly. Two groups of four warps attend 64 rows each to every
tile. A group starts the product of tile j + 1 with K and the product of tile j with V. While the second product runs,
the group computes the softmax of tile j + 1, because the group waits only for the first product.

There are as many programs as multiprocessors. A program takes pieces (a block of rows and a KV head) until none is
left. The warp that copies K increments `taken` and puts the piece into a queue, and the other warps read it there.
Pieces differ in length, so assigning them ahead is unfair: with 16 prompts of 1 k tokens, a program got up to 1.4 times
its share. The ring continues from one piece to the next. The next piece's keys are copied while this piece ends, and
its queries are loaded during this piece's last product.

    barrier     arrives                              waits, once per tile
    k_full      TMA, when all its bytes are there    both groups, before q k^T
    k_empty     both groups, after q k^T             a copying warp, before it fills the slot again
    v_full, v_empty                                  as k_full and k_empty, for V
    published   the warp that copies K               the other warps, once per piece
    read        the other warps                      the warp that copies K

Tile n of a program (counted over all its pieces) is in slot n % STAGES, in that slot's round n // STAGES. A wait names
the round's parity. All warps derive the same tiles from a piece (`prefill_tiles`), so they count the same n.

TMA copies whole pages, or boxes of BLOCK_N keys of a larger page. A slot that no row may see can hold NaN. The mask
removes it from the scores. In the product with V its p is 0, but 0 * NaN is NaN, so both groups zero such rows of the
first and the last tile in shared memory. Page ids outside the visible keys are never read.

The overlap depends on the order of the lines, because ptxas moves a wait for wgmma up to the start of its basic block.
The wait for the V of the next step ends the block of the softmax, so the wait for the product with V stays after the
softmax. At the end of a piece, a second wait for the queue keeps the wait for the product after the loads of queries.
"""

from __future__ import annotations

import os

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire_kernels.shared.launch import multiprocessor_count
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache
from quire_kernels.shared.prefill_launch import PrefillLaunch
from quire_kernels.shared.prefill_pieces import (
    GROUP_ROWS,
    QUEUE_SLOTS,
    copy_keys,
    copy_values,
    load_queries,
    piece,
    published_piece,
    release,
    synchronize_group,
)
from quire_kernels.shared.prefill_rows import Masking, PrefillWork
from quire_kernels.shared.prefill_softmax import clear_values, softmax_tile, thread_sums
from quire_kernels.shared.prefill_tiles import keys_of_block, tiles_of_keys
from quire_kernels.shared.tma_pages import BOX_ROWS_MIN, TMA_BYTES, page_rows, pages_by_tma

BLOCK_M = gl.constexpr(128)
LOG2_E = gl.constexpr(1.4426950408889634)


# fmt: off
@gluon.jit
def load_following(
    q, q_strides, work, queue, turn,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HALF: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Returns number and queries of the piece that follows a turn; after the last piece, the queries are arbitrary."""
    number = published_piece(turn, queue, 4)
    real = min(number, work[1] * KV_HEADS - 1)
    queries = load_queries(q, q_strides, real, work, KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, HALF, LAYOUT)
    return number, queries


@gluon.jit
def attend_tiles(
    acc, row_max, row_sum, count, tiles, limits, scale, cap, q_rows, no_scores, ring, barriers,
    q, q_strides, work, queue, turn,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HALF: gl.constexpr,
    P_LAYOUT: gl.constexpr, ROW_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):
    """Attends the rows of a group to the tiles of a piece.

    Returns acc, row_max, row_sum, the number of tiles so far, and number and queries of the next piece. The queries are
    loaded during the last product.
    """
    O_LAYOUT: gl.constexpr = P_LAYOUT.parent
    S_LAYOUT: gl.constexpr = no_scores.type.layout
    dtype: gl.constexpr = q_rows.dtype
    start, stop, free_start, free_stop, low, kv_len = tiles
    row_low, row_high = limits
    k_ring, v_ring = ring
    k_full, k_empty, v_full, v_empty = barriers
    if start < stop:
        slot = count % STAGES
        parity = count // STAGES % 2
        mbarrier.wait(k_full.index(slot), parity)
        s = warpgroup_mma(q_rows, k_ring.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if WINDOW:
            if low > start * BLOCK_N:
                mbarrier.wait(v_full.index(slot), parity)
                clear_values(v_ring.index(slot), low - start * BLOCK_N, BLOCK_N, ROW_LAYOUT, BLOCK_N)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        is_edge = (start < free_start) | (start >= free_stop)
        p, row_max, row_sum, alpha = softmax_tile(
            s, row_max, row_sum, scale, cap, start, row_low, row_high, is_edge,
            S_LAYOUT, BLOCK_N, WINDOW, SOFT_CAP,
        )
        p = gl.convert_layout(p.to(dtype), P_LAYOUT)
        mbarrier.wait(v_full.index(slot), parity)
        for tile in range(start + 1, stop):
            v_slot = slot
            count += 1
            slot = count % STAGES
            parity = count // STAGES % 2
            mbarrier.wait(k_full.index(slot), parity)
            s = warpgroup_mma(q_rows, k_ring.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            acc = warpgroup_mma(p, v_ring.index(v_slot), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            is_edge = (tile < free_start) | (tile >= free_stop)
            weights, row_max, row_sum, alpha = softmax_tile(
                s, row_max, row_sum, scale, cap, tile, row_low, row_high, is_edge,
                S_LAYOUT, BLOCK_N, WINDOW, SOFT_CAP,
            )
            mbarrier.wait(v_full.index(slot), parity)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        count += 1
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        if stop * BLOCK_N > kv_len:
            clear_values(v_ring.index(slot), 0, kv_len - (stop - 1) * BLOCK_N, ROW_LAYOUT, BLOCK_N)
        acc = warpgroup_mma(p, v_ring.index(slot), acc, is_async=True)
        number, queries = load_following(
            q, q_strides, work, queue, turn, KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, HALF, ROW_LAYOUT
        )
        mbarrier.wait(queue[1].index(turn % QUEUE_SLOTS), turn // QUEUE_SLOTS % 2)  # ends a basic block: see the head
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(slot), count=1)
    else:
        number, queries = load_following(
            q, q_strides, work, queue, turn, KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, HALF, ROW_LAYOUT
        )
    return acc, row_max, row_sum, count, number, queries


@gluon.jit
def attend_pieces(
    q, q_strides, out, lse, sinks, work, window_left, scale, cap, q_rows, ring, barriers, queue,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, HALF: gl.constexpr,
):
    """Attends the rows `[HALF * 64, (HALF + 1) * 64)` of all pieces. Four warps."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    LANES: gl.constexpr = min(HEAD_DIM // 8, 32)  # threads that read a row, 8 elements each
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    no_scores = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ROW_LAYOUT))
    total = work[1] * KV_HEADS
    number = gl.program_id(0)
    queries = gl.zeros([GROUP_ROWS, HEAD_DIM], dtype, ROW_LAYOUT)
    if number < total:
        queries = load_queries(q, q_strides, number, work, KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, HALF, ROW_LAYOUT)
    turn = 0
    count = 0
    while number < total:
        kv_head, row_start, row_stop, q_begin, q_len, _, kv_len = piece(number, work, KV_HEADS, PAGE_SIZE)
        low, high, free_low, free_high = keys_of_block(
            kv_len, q_len, row_start, row_stop, window_left, GROUP, CAUSAL, WINDOW
        )
        start, stop, free_start, free_stop = tiles_of_keys(low, high, free_low, free_high, BLOCK_N)
        synchronize_group()  # all warps have read the previous piece's results from this memory
        q_rows.store(queries)
        fence_async_shared()
        synchronize_group()
        row = row_start + HALF * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S_LAYOUT))
        head = kv_head * GROUP + row % GROUP
        position = kv_len - q_len + row // GROUP
        row_low = position - window_left
        row_high = kv_len + position * 0
        if CAUSAL:
            row_high = gl.minimum(row_high, position + 1)
        row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        row_sum = thread_sums(no_scores, BLOCK_N)  # zeros, because no_scores has only zeros
        if sinks is not None:
            row_max = gl.load(sinks + head) * LOG2_E
            row_sum += 0.25  # Each of the four threads that share a row adds a quarter.
        acc = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, O_LAYOUT)
        acc, row_max, row_sum, count, following, queries = attend_tiles(
            acc, row_max, row_sum, count, (start, stop, free_start, free_stop, low, kv_len), (row_low, row_high),
            scale, cap, q_rows, no_scores, ring, barriers, q, q_strides, work, queue, turn,
            KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, HALF,
            P_LAYOUT, ROW_LAYOUT, BLOCK_N, STAGES, WINDOW, SOFT_CAP,
        )
        release(turn, queue)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S_LAYOUT))
        nothing = row_sum == 0.0
        row_sum = gl.where(nothing, 1.0, row_sum)
        acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, O_LAYOUT))[:, None]
        row_lse = gl.where(nothing, float("-inf"), row_max + gl.log2(row_sum))
        lse_row = (q_begin + row // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head
        gl.store(lse + lse_row, row_lse, mask=row < row_stop)
        synchronize_group()  # no warp of the group still reads its queries
        q_rows.store(acc.to(dtype))
        synchronize_group()
        # Rows are loaded again, because keeping them and their addresses since the queries would cost registers.
        _, row_start, row_stop, _, _, _, _ = piece(number, work, KV_HEADS, PAGE_SIZE)
        io_row = row_start + HALF * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, ROW_LAYOUT))
        out_row = (q_begin + io_row // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + io_row % GROUP
        at = out + (out_row * HEAD_DIM)[:, None] + dim[None, :]
        gl.store(at, q_rows.load(ROW_LAYOUT), mask=(io_row < row_stop)[:, None])
        number = following
        turn += 1


@gluon.jit(
    do_not_specialize=["batch", "window_left", "rows_per_page", "rows_per_head", "columns_per_head"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "page_indptr", "page_indices", "last_page_len", "units", "unit_indptr", "taken", "lse",
    ],
)
def prefill_hopper_kernel(
    q,  # [tokens, heads, HEAD_DIM], elements of a head contiguous, heads at multiples of 16 bytes
    k, v,  # descriptors by `pages_by_tma`
    qo_indptr, page_indptr, page_indices, last_page_len,  # int32
    units, unit_indptr, taken,  # see `work_units`; an item is a query row, and a unit has at most BLOCK_M rows
    out, lse,  # out: [tokens, heads, HEAD_DIM]; lse: float32 [tokens, heads]; both contiguous
    sinks,  # float32 [heads] or None
    scale, cap, window_left, batch,  # scale and cap come from `score_factors`
    rows_per_page, rows_per_head, columns_per_head,  # see `PageRows`
    stride_q_token, stride_q_head,
    PROGRAMS: gl.constexpr,  # number of programs in the launch
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr,  # query heads of a KV head
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):
    """Runs at most one program per multiprocessor; the top of the file describes the work."""
    dtype: gl.constexpr = k.dtype
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], k.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], v.layout)
    q_rows = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, HEAD_DIM], k.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    numbers = gl.allocate_shared_memory(gl.int32, [QUEUE_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    published = gl.allocate_shared_memory(gl.int64, [QUEUE_SLOTS, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [QUEUE_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    for slot in gl.static_range(QUEUE_SLOTS):
        mbarrier.init(published.index(slot), count=1)
        mbarrier.init(read.index(slot), count=3)
    fence_async_shared()
    work = (units, gl.load(unit_indptr + batch), qo_indptr, page_indptr, last_page_len)
    ring = (k_ring, v_ring)
    barriers = (k_full, k_empty, v_full, v_empty)
    queue = (numbers, published, read)
    q_strides = (stride_q_token, stride_q_head)
    rows = (rows_per_page, rows_per_head, columns_per_head)
    gl.warp_specialize(
        [
            (attend_pieces, (
                q, q_strides, out, lse, sinks, work, window_left, scale, cap, q_rows.index(0), ring, barriers, queue,
                KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, WINDOW, SOFT_CAP, 0,
            )),
            (attend_pieces, (
                q, q_strides, out, lse, sinks, work, window_left, scale, cap, q_rows.index(1), ring, barriers, queue,
                KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, WINDOW, SOFT_CAP, 1,
            )),
            (copy_keys, (
                k, page_indices, work, window_left, rows, k_ring, k_full, k_empty, queue, taken,
                PROGRAMS, KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, WINDOW,
            )),
            (copy_values, (
                v, page_indices, work, window_left, rows, v_ring, v_full, v_empty, queue,
                KV_HEADS, GROUP, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, CAUSAL, WINDOW,
            )),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )
# fmt: on


HEAD_DIMS = (64, 128)
CAPABILITY = 9
SWITCH = "QUIRE_HOPPER"  # environment variable, read at each launch: "0" selects the Triton kernels, to compare both
BLOCK_N, STAGES = 128, 3  # keys per tile; tiles of K, and as many of V: with queries 224 KiB, or 112 for head dim 64
MAXNREG = 168  # registers per thread when a program starts; its 12 warps then share 64,512 registers unequally


def runs_on_hopper(
    q: torch.Tensor, cache: PagedCache, options: AttentionOptions, masking: Masking, division: PrefillWork
) -> bool:
    """Returns whether this kernel is on and can take the launch; `prefill_paged` has checked the arguments."""
    return (
        q.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(q.device)[0] == CAPABILITY
        and os.environ.get(SWITCH) != "0"
        and fits_hopper(q, cache, options, masking, division)
    )


def fits_hopper(
    q: torch.Tensor, cache: PagedCache, options: AttentionOptions, masking: Masking, division: PrefillWork
) -> bool:
    """Returns whether the kernel supports this launch, on any chip."""
    rows = page_rows(cache.k)
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and cache.dtype == q.dtype
        and cache.head_dim == cache.v_head_dim
        and cache.head_dim in HEAD_DIMS
        and division.tiling.block_m == BLOCK_M.value
        and masking.custom_mask is None
        and masking.chunk_size == 0
        and options.alibi_slopes is None
        and options.k_scale is None
        and options.v_scale is None
        and options.sm_scale > 0
        and cache.page_size >= BOX_ROWS_MIN
        and (BLOCK_N % cache.page_size == 0 or cache.page_size % BLOCK_N == 0)
        and all(stride * q.element_size() % TMA_BYTES == 0 for stride in q.stride()[:2])
        and q.stride(2) == 1
        and q.data_ptr() % TMA_BYTES == 0
        and rows is not None
        and rows == page_rows(cache.v)
    )


def score_factors(options: AttentionOptions) -> tuple[float, float]:
    """Returns the kernel's scale and cap. Scores in log2 are x * scale, or cap * (1 - 2 / (2^(x * scale) + 1))."""
    scale, cap = options.sm_scale * LOG2_E.value, options.logits_soft_cap
    return (2.0 * scale / cap, cap * LOG2_E.value) if cap > 0 else (scale, 0.0)


def launch_on_hopper(
    q: torch.Tensor,
    cache: PagedCache,
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    options: AttentionOptions,
    masking: Masking,
    division: PrefillWork,
    launch: PrefillLaunch,
) -> None:
    """Launches the kernel on the current device; `fits_hopper` must have returned True."""
    rows = page_rows(cache.k)
    assert rows is not None
    programs = multiprocessor_count(q.device)  # programs without work return at once
    prefill_hopper_kernel[(programs,)](
        q, pages_by_tma(cache.k, rows, BLOCK_N), pages_by_tma(cache.v, rows, BLOCK_N),
        qo_indptr, indptr, indices, last_page_len, division.work.units, division.work.indptr, division.taken,
        launch.out, launch.lse, options.sinks,
        *score_factors(options), options.window_left, division.work.batch,
        rows.per_page, rows.per_head, rows.columns_per_head, q.stride(0), q.stride(1),
        PROGRAMS=programs, KV_HEADS=cache.num_kv_heads, GROUP=division.group,
        PAGE_SIZE=cache.page_size, HEAD_DIM=cache.head_dim, BLOCK_N=BLOCK_N, STAGES=STAGES, CAUSAL=masking.causal,
        WINDOW=options.window_left >= 0, SOFT_CAP=options.logits_soft_cap > 0,
        num_warps=4, maxnreg=MAXNREG,
    )  # fmt: skip
