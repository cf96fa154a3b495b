"""Multi-head latent attention over pages: one latent vector per token is key and value of all heads.

With the up-projections absorbed into the queries, for every head:

    x_ij = sm_scale * (q_nope_i . ckv_j + q_pe_i . kpe_j)
    out_i = softmax(x_i) ckv                 lse_i = log2(sum_j exp(x_ij))

A row is one head of one token, as in `prefill_rows` with a single KV head. Decode (one query per request) cuts the keys
into units and merges their results, as `decode_paged` does. Prefill cuts the rows (`mla_work`). A tile of latents is
read once for both products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire_kernels.ops.merge_splits import merge_splits
from quire_kernels.ops.mla_hopper import fits_hopper, launch_hopper
from quire_kernels.shared.launch import check_devices, device_of, is_interpreted, output_like
from quire_kernels.shared.mla_work import MlaWork
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache, check_index_tensor
from quire_kernels.shared.reference import attend, gather, visible
from quire_kernels.shared.tile import (
    LOG2_E,
    as_operand,
    finish_softmax,
    load_queries,
    load_tile,
    page_ids_of_tile,
    softmax_step,
    start_softmax,
    store_rows,
    token_offsets,
)


# fmt: off
@triton.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "page_indptr", "page_indices", "kv_lengths", "units", "unit_indptr", "lse", "partial_lse",
    ],
)
def mla_paged_kernel(
    q_nope, q_pe,  # [tokens, HEADS, CKV_DIM] and [tokens, HEADS, KPE_DIM]
    ckv, kpe,  # [pages, PAGE_SIZE, CKV_DIM] and [pages, PAGE_SIZE, KPE_DIM]
    qo_indptr, page_indptr, page_indices, kv_lengths,  # int32
    units, unit_indptr,  # see `work_units`; items are keys (SPLIT_KEYS) or rows
    out, lse,  # [tokens, HEADS, CKV_DIM] and float32 [tokens, HEADS], contiguous
    partial_out, partial_lse,  # float32 [capacity, HEADS, CKV_DIM] and [capacity, HEADS]; unused without SPLIT_KEYS
    sm_scale, batch,
    stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head,
    stride_ckv_page, stride_ckv_token, stride_kpe_page, stride_kpe_token,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, CKV_DIM: tl.constexpr, KPE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, SPLIT_KEYS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Runs one program per unit or, with SPLIT_KEYS, per unit (outermost) and block of heads."""
    blocks_per_unit: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M if SPLIT_KEYS else 1
    unit_count = tl.load(unit_indptr + batch)
    unit = unit_count - 1 - tl.program_id(0) // blocks_per_unit
    if unit < 0:
        return
    request = tl.load(units + unit * 4)
    start = tl.load(units + unit * 4 + 1)
    stop = tl.load(units + unit * 4 + 2)
    siblings = tl.load(units + unit * 4 + 3)
    q_begin = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - q_begin
    kv_len = tl.load(kv_lengths + request)
    page_ids = page_indices + tl.load(page_indptr + request)
    if SPLIT_KEYS:
        row_start = tl.program_id(0) % blocks_per_unit * BLOCK_M
        row_stop = HEADS
    else:
        row_start = start
        row_stop = stop
        start = kv_len * 0
        stop = kv_len
    row = row_start + tl.arange(0, BLOCK_M)
    valid = row < row_stop
    token = row // HEADS
    head = (row % HEADS).to(tl.int64)
    row_high = tl.where(valid, stop, 0)
    if CAUSAL:  # never set with SPLIT_KEYS, because a single query sees all keys anyway
        row_high = tl.minimum(row_high, kv_len - q_len + token + 1)
        stop = tl.minimum(stop, kv_len - q_len + (tl.minimum(row_start + BLOCK_M, row_stop) - 1) // HEADS + 1)
    q_row = (q_begin + token).to(tl.int64)
    q, _ = load_queries(
        q_nope, q_row * stride_q_nope_token + head * stride_q_nope_head, valid, 1, CKV_DIM, CKV_DIM, 0, UPCAST
    )
    q_rope, _ = load_queries(
        q_pe, q_row * stride_q_pe_token + head * stride_q_pe_head, valid, 1, KPE_DIM, KPE_DIM, 0, UPCAST
    )
    acc, row_max, row_sum = start_softmax(None, head, valid, False, BLOCK_M, CKV_DIM)
    acc, row_max, row_sum = attend_latents(
        acc, row_max, row_sum, q, q_rope, start, stop, row_high, ckv, kpe, page_ids,
        (stride_ckv_page, stride_ckv_token), (stride_kpe_page, stride_kpe_token), sm_scale,
        PAGE_SIZE, CKV_DIM, KPE_DIM, BLOCK_N, UPCAST,
    )
    result, result_lse = finish_softmax(acc, row_max, row_sum, 1.0)
    if SPLIT_KEYS:
        if siblings == 1:
            store_rows(out, lse, q_row * HEADS + head, valid, result, result_lse, CKV_DIM, CKV_DIM)
        else:
            partial_row = unit.to(tl.int64) * HEADS + head
            store_rows(partial_out, partial_lse, partial_row, valid, result, result_lse, CKV_DIM, CKV_DIM)
    else:
        store_rows(out, lse, q_row * HEADS + head, valid, result, result_lse, CKV_DIM, CKV_DIM)


@triton.jit
def attend_latents(
    acc, row_max, row_sum, q, q_rope, start, stop, row_high, ckv, kpe, page_ids, ckv_strides, kpe_strides, sm_scale,
    PAGE_SIZE: tl.constexpr, CKV_DIM: tl.constexpr, KPE_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attends rows to the latents `[start, stop)`; a row sees only latents below `row_high`."""
    pages = page_ids_of_tile(page_ids, start, start, stop, PAGE_SIZE, BLOCK_N)
    for tile in range(start, stop, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        key_valid = keys < stop
        next_pages = page_ids_of_tile(page_ids, tile + BLOCK_N, start, stop, PAGE_SIZE, BLOCK_N)
        offsets = token_offsets(pages, tile, ckv_strides, PAGE_SIZE, BLOCK_N)
        latent = load_tile(ckv, offsets, key_valid, 1, 0, CKV_DIM, CKV_DIM, True)
        offsets = token_offsets(pages, tile, kpe_strides, PAGE_SIZE, BLOCK_N)
        rope = load_tile(kpe, offsets, key_valid, 1, 0, KPE_DIM, KPE_DIM, True)
        s = tl.dot(q, tl.trans(as_operand(latent, q, UPCAST)), input_precision="ieee")
        s = tl.dot(q_rope, tl.trans(as_operand(rope, q, UPCAST)), s, input_precision="ieee")
        s = tl.where(keys[None, :] < row_high[:, None], s * (sm_scale * LOG2_E), float("-inf"))
        acc, row_max, row_sum = softmax_step(s, latent, q, acc, row_max, row_sum, True, UPCAST)
        pages = next_pages
    return acc, row_max, row_sum
# fmt: on


def mla_paged(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_lengths: torch.Tensor,
    division: MlaWork,
    *,
    sm_scale: float,
    causal: bool,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends absorbed queries to latents. Does not wait for the device; the page table must have been checked.

    Args:
        q_nope: `[tokens, heads, ckv_dim]`, float16, bfloat16 or float32; the last dimension contiguous.
        q_pe: `[tokens, heads, kpe_dim]`, of q_nope's dtype.
        ckv_cache: `[pages, page_size, ckv_dim]`, of q_nope's dtype; ckv_dim a power of two.
        kpe_cache: `[pages, page_size, kpe_dim]`; may be a slice of one tensor with ckv_cache.
        qo_indptr: int32 `[batch + 1]`.
        kv_indptr: int32 `[batch + 1]`, pages.
        kv_indices: int32, page ids.
        kv_lengths: int32 `[batch]`, tokens.
        division: the result of `divide_mla`.
        sm_scale: factor of the dot products.
        causal: whether masks are causal; the last query of a request sees its last key.
        out: `[tokens, heads, ckv_dim]`, contiguous; None allocates it.
        lse: float32 `[tokens, heads]`, contiguous; None allocates it.

    Returns:
        out, and lse in base 2; zeros and -inf for a query that sees no key.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; the message names the argument.
    """
    tokens, heads, ckv_dim = q_nope.shape
    parts = {"q_nope": q_nope, "q_pe": q_pe, "ckv": ckv_cache, "kpe": kpe_cache}
    check_mla_tensors(parts)
    batch = division.work.batch
    check_index_tensor("qo_indptr", qo_indptr, length=batch + 1)
    check_index_tensor("kv_indptr", kv_indptr, length=batch + 1)
    check_index_tensor("kv_indices", kv_indices)
    check_index_tensor("kv_lengths", kv_lengths, length=batch)
    indices = (qo_indptr, kv_indptr, kv_indices, kv_lengths)
    check_devices(q_nope.device, **parts, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices)
    if division.heads != heads or division.token_count < tokens or (division.split_keys and tokens != batch):
        raise ValueError("division was made for other heads, fewer tokens or one query per request")
    out = output_like("out", out, (tokens, heads, ckv_dim), q_nope.dtype, q_nope.device)
    lse = output_like("lse", lse, (tokens, heads), torch.float32, q_nope.device)
    if tokens == 0:
        return out, lse
    tiling, interpreted = division.tiling, is_interpreted(mla_paged_kernel)
    strides = [stride for tensor in parts.values() for stride in tensor.stride()[:2]]
    programs = division.work.capacity * (triton.cdiv(heads, tiling.block_m) if division.split_keys else 1)
    with device_of(mla_paged_kernel, q_nope=q_nope):
        if fits_hopper(parts, division):
            launch_hopper(parts, indices[:3], division, out, lse, sm_scale)
        else:
            mla_paged_kernel[(programs,)](
                *parts.values(), *indices, division.work.units, division.work.indptr, out, lse,
                division.partial_out, division.partial_lse, float(sm_scale), batch, *strides,
                HEADS=heads, PAGE_SIZE=ckv_cache.shape[1], CKV_DIM=ckv_dim, KPE_DIM=q_pe.shape[2],
                BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, CAUSAL=causal and not division.split_keys,
                SPLIT_KEYS=division.split_keys, UPCAST=interpreted, num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
            )  # fmt: skip
    if division.partial_out is not None and division.partial_lse is not None:
        merge_splits(division.partial_out, division.partial_lse, division.work, out, lse)
    return out, lse


def check_mla_tensors(parts: dict[str, torch.Tensor]) -> None:
    """Refuses tensors that do not fit each other.

    Args:
        parts: "q_nope", "q_pe", "ckv" and "kpe", all of 3 dimensions.

    Raises:
        ValueError: a shape, dtype or stride does not fit, or a head dim is no power of two; the message names the
            argument.
    """
    q_nope, ckv = parts["q_nope"], parts["ckv"]
    for name, tensor in parts.items():
        if tensor.dim() != 3 or tensor.dtype != q_nope.dtype or tensor.stride(2) != 1:
            raise ValueError(f"{name} must be 3-D of {q_nope.dtype}, its last dim contiguous, not {tensor.dtype}")
        first, like = ("q_nope", q_nope) if name.startswith("q") else ("ckv", ckv)
        if tensor.shape[:2] != like.shape[:2]:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, but {first} is {tuple(like.shape)}")
        if tensor.shape[2] < 16 or tensor.shape[2] & (tensor.shape[2] - 1):
            raise ValueError(f"the last dim of {name} must be a power of two, at least 16, not {tensor.shape[2]}")
    if q_nope.shape[2] != ckv.shape[2] or parts["q_pe"].shape[2] != parts["kpe"].shape[2]:
        raise ValueError(
            f"the last dims of ckv and kpe must equal those of the queries: ckv has {ckv.shape[2]}, q_nope "
            f"{q_nope.shape[2]}"
        )


def mla_paged_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    qo_indptr: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    sm_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to latents in plain torch, and returns out and base-2 lse, both float64.

    `table` is indptr, indices and last_page_len.
    """
    ckv, kpe = cache
    paged = PagedCache(torch.cat([ckv, kpe], 2).unsqueeze(2), ckv.unsqueeze(2))
    q, starts = torch.cat([q_nope, q_pe], 2), qo_indptr.tolist()
    outs, lses = [], []
    for request in range(len(starts) - 1):
        k, v = gather(paged, *table, request)
        part = q[starts[request] : starts[request + 1]]
        out, lse = attend(part, k, v, visible(len(part), len(k), causal=causal), AttentionOptions(sm_scale))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
