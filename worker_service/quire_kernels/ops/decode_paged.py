"""Decode: one query per request attends to its paged keys; long requests are split by keys.

    out_i = softmax(score(q_i, K_i)) V_i         scores, sinks and lse: see `options`

The keys of a request are cut into units (`decode_work`). One program attends the query heads of one KV head to the keys
of one unit. These heads are the rows of a block of at least 16, so tensor cores serve any ratio of heads. A request of
one unit is written directly. For several units, float32 partial results are written and merged (`merge_splits`).
Division and lengths stay on the device, and the grid has a fixed size, so a CUDA graph can be replayed after the page
table's contents changed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from quire_kernels.ops.merge_splits import merge_splits
from quire_kernels.shared.decode_work import DecodeWork
from quire_kernels.shared.launch import (
    as_kernel_sees,
    can_overlap,
    check_devices,
    check_queries,
    device_of,
    head_dim_blocks,
    is_interpreted,
    option_arguments,
    output_like,
    strides_of,
)
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache, check_index_tensor
from quire_kernels.shared.reference import attend, gather, visible
from quire_kernels.shared.tile import (
    MASK_NONE,
    Keys,
    Rows,
    Scoring,
    Shape,
    Span,
    attend_keys,
    finish_softmax,
    load_queries,
    score_factors,
    start_softmax,
    store_rows,
)


# fmt: off
@triton.jit(
    do_not_specialize=["batch", "window_left"],
    do_not_specialize_on_alignment=[
        "page_indptr", "page_indices", "last_page_len", "units", "unit_indptr", "lse", "partial_lse",
    ],
)
def decode_paged_kernel(
    q,  # [batch, heads, HEAD_DIM]
    k, v,  # [pages, PAGE_SIZE, kv_heads, HEAD_DIM or V_DIM]
    page_indptr, page_indices, last_page_len,
    units, unit_indptr,  # see `work_units`
    out, lse,  # out: [batch, heads, V_DIM]; lse: float32 [batch, heads] or None; both contiguous
    partial_out, partial_lse,  # float32 [capacity, heads, V_DIM] and [capacity, heads], contiguous
    sinks, slopes,  # float32 [heads] or None
    k_scale, v_scale,  # float32 [kv_heads] or None
    sm_scale, soft_cap, window_left, batch,
    stride_q_token, stride_q_head, stride_q_dim,
    stride_k_page, stride_k_token, stride_k_head, stride_k_dim,
    stride_v_page, stride_v_token, stride_v_head, stride_v_dim,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,  # query heads of a KV head
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, UPCAST: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Runs one program per unit (outermost), block of a KV head's query heads, and KV head (innermost)."""
    if OVERLAP:
        gdc_launch_dependents()  # lets `merge_splits` start now and wait for these results
    blocks_per_unit: tl.constexpr = KV_HEADS * ((GROUP + BLOCK_M - 1) // BLOCK_M)
    once_a_page: tl.constexpr = GROUP & (GROUP - 1) == 0  # With groups of 5 or 7 heads, True would spill a register.
    heads: tl.constexpr = KV_HEADS * GROUP
    unit = tl.program_id(0) // blocks_per_unit
    # These loads are issued together, before the program waits for any. A row of `units` past the last unit exists, but
    # its contents are arbitrary.
    unit_count = tl.load(unit_indptr + batch)
    request = tl.load(units + unit * 4).to(tl.int64)
    start = tl.load(units + unit * 4 + 1)
    stop = tl.load(units + unit * 4 + 2)
    siblings = tl.load(units + unit * 4 + 3)
    if unit >= unit_count:
        return
    block = tl.program_id(0) % blocks_per_unit
    kv_head = (block % KV_HEADS).to(tl.int64)
    first_page = tl.load(page_indptr + request)
    page_count = tl.load(page_indptr + request + 1) - first_page
    length = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request)
    load_low = start
    if WINDOW:
        load_low = tl.maximum(start, length - 1 - window_left)
    row = block // KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < GROUP
    head = kv_head * GROUP + row
    q_row = request * stride_q_token + head * stride_q_head
    queries = load_queries(q, q_row, valid, stride_q_dim, HEAD_DIM, BLOCK_D, BLOCK_TAIL, UPCAST)
    is_first = unit == tl.load(unit_indptr + request)
    softmax = start_softmax(sinks, head, valid, is_first, BLOCK_M, BLOCK_V)
    slope, scale, output_scale = score_factors(slopes, head, valid, k_scale, v_scale, kv_head, sm_scale, BLOCK_M)
    keys = Keys(
        k + kv_head * stride_k_head, v + kv_head * stride_v_head, page_indices + first_page,
        (stride_k_page, stride_k_token, stride_k_dim), (stride_v_page, stride_v_token, stride_v_dim),
    )
    zero = tl.zeros((BLOCK_M,), dtype=tl.int32)
    rows = Rows(zero + load_low, zero + stop, zero + (length - 1))
    softmax = attend_keys(
        softmax, queries, keys, Span(start, stop, load_low, stop), rows,
        Scoring(scale, soft_cap, slope, None, zero, SOFT_CAP, slopes is not None, MASK_NONE),
        Shape(PAGE_SIZE, HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_V, UPCAST, once_a_page), True,
    )
    result, result_lse = finish_softmax(softmax[0], softmax[1], softmax[2], output_scale)
    if siblings == 1:
        store_rows(out, lse, request * heads + head, valid, result, result_lse, V_DIM, BLOCK_V)
    else:
        partial_row = unit.to(tl.int64) * heads + head
        store_rows(partial_out, partial_lse, partial_row, valid, result, result_lse, V_DIM, BLOCK_V)
# fmt: on


def decode_paged(
    q: torch.Tensor,
    cache: PagedCache,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    options: AttentionOptions,
    division: DecodeWork,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends one query per request to its keys. Does not wait for the device; the page table must have been checked.

    Args:
        q: `[batch, query_heads, head_dim]`, float16, bfloat16 or float32, any strides.
        cache: of q's dtype, float8_e4m3fn or float8_e5m2.
        indptr: int32 `[batch + 1]`.
        indices: int32, page ids.
        last_page_len: int32 `[batch]`.
        options: scale, soft cap, window and so on.
        division: the result of `divide_decode` for this page table, these heads and this window.
        out: `[batch, query_heads, v_head_dim]`, of q's dtype, contiguous; None allocates it.
        lse: float32 `[batch, query_heads]`, contiguous; None allocates it.

    Returns:
        out, and lse in base 2; zeros and -inf for a request without keys.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; the message names the argument.
    """
    batch, heads = q.shape[0], q.shape[1]
    kv_heads, group = cache.num_kv_heads, q.shape[1] // cache.num_kv_heads
    check_queries(q, head_dim=cache.head_dim, kv_heads=kv_heads, kv_dtype=cache.dtype)
    check_index_tensor("indptr", indptr, length=batch + 1)
    check_index_tensor("indices", indices)
    check_index_tensor("last_page_len", last_page_len, length=batch)
    check_devices(q.device, cache=cache.k, indptr=indptr, indices=indices, last_page_len=last_page_len)
    options.check_heads(heads, kv_heads, q.device)
    if division.work.batch != batch or division.partial_out.shape[1:] != (heads, cache.v_head_dim):
        raise ValueError("division was made for another batch or other heads")
    if division.window_left != options.window_left:
        raise ValueError(f"window_left must be {division.window_left}, like the division's, not {options.window_left}")
    out = output_like("out", out, (batch, heads, cache.v_head_dim), q.dtype, q.device)
    lse = output_like("lse", lse, (batch, heads), torch.float32, q.device)
    if batch == 0:
        return out, lse
    tiling, interpreted = division.tiling, is_interpreted(decode_paged_kernel)
    programs = division.work.capacity * kv_heads * triton.cdiv(group, tiling.block_m)
    with device_of(decode_paged_kernel, q=q):
        decode_paged_kernel[(programs,)](
            q, as_kernel_sees(cache.k, interpreted=interpreted), as_kernel_sees(cache.v, interpreted=interpreted),
            indptr, indices, last_page_len, division.work.units, division.work.indptr,
            out, lse, division.partial_out, division.partial_lse, **option_arguments(options),
            window_left=options.window_left, batch=batch, **strides_of(q, cache.k, cache.v),
            KV_HEADS=kv_heads, GROUP=group, PAGE_SIZE=cache.page_size, WINDOW=options.window_left >= 0,
            **head_dim_blocks(cache.head_dim, cache.v_head_dim), BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
            UPCAST=interpreted, OVERLAP=can_overlap(q.device), num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )  # fmt: skip
    merge_splits(division.partial_out, division.partial_lse, division.work, out, lse)
    return out, lse


def decode_paged_reference(
    q: torch.Tensor,
    cache: PagedCache,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes in plain torch, request by request: out and base-2 lse, both float64."""
    outs, lses = [], []
    for request in range(q.shape[0]):
        k, v = gather(cache, indptr, indices, last_page_len, request)
        seen = visible(1, k.shape[0], window_left=options.window_left)
        out, lse = attend(q[request : request + 1], k, v, seen, options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
