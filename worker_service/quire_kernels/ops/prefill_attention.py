"""Prefill: ragged queries attend to paged or ragged keys. Serves whole prompts, chunks, and drafts to verify.

    out_i = softmax(score(q_i, K)) V over the keys that query i sees      scores, sinks and lse: see `options`

There is one program per block of query rows and KV head; `prefill_rows` has the masks and the attention of a block.
Blocks run from the last to the first: under a causal mask the last ones take longest, and the short ones then fill the
gaps at the end. Without pages, the keys of a request are adjacent in memory. The head dims of keys and values may
differ: 192 and 128 for the prefill of multi-head latent attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire_kernels.ops.prefill_hopper import launch_on_hopper, runs_on_hopper
from quire_kernels.shared.launch import as_kernel_sees, check_devices, device_of, is_interpreted, strides_of
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache, check_index_tensor
from quire_kernels.shared.prefill_launch import PrefillLaunch, prepare_prefill
from quire_kernels.shared.prefill_rows import Masking, PrefillWork, attend_requests, attend_rows
from quire_kernels.shared.reference import gather
from quire_kernels.shared.tile import Keys, Shape


# fmt: off
@triton.jit(
    do_not_specialize=["batch", "window_left", "chunk_size"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "kv_indptr", "page_indices", "last_page_len", "units", "unit_indptr", "lse",
        "mask", "mask_indptr",
    ],
)
def prefill_kernel(
    q,  # [tokens, heads, HEAD_DIM]
    k, v,  # [pages, PAGE_SIZE, kv_heads, HEAD_DIM or V_DIM] or, if PAGE_SIZE is 0, [kv_tokens, kv_heads, ...]
    qo_indptr, kv_indptr,  # int32 [batch + 1]; the second in pages or, if PAGE_SIZE is 0, in tokens
    page_indices, last_page_len,  # int32 or, if PAGE_SIZE is 0, None
    units, unit_indptr,  # see `work_units`; items are rows
    out, lse,  # out: [tokens, heads, V_DIM]; lse: float32 [tokens, heads] or None; both contiguous
    sinks, slopes,  # float32 [heads] or None
    k_scale, v_scale,  # float32 [kv_heads] or None
    sm_scale, soft_cap, window_left, chunk_size, batch,
    mask, mask_indptr,  # uint8 or None, int64 [batch + 1] or None
    stride_q_token, stride_q_head, stride_q_dim,
    stride_k_page, stride_k_token, stride_k_head, stride_k_dim,  # stride_k_page is None if PAGE_SIZE is 0
    stride_v_page, stride_v_token, stride_v_head, stride_v_dim,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,  # query heads of a KV head
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, MASK_KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr, UPCAST: tl.constexpr,
):
    """Runs one program per unit (outermost, from last to first) and KV head."""
    unit_count = tl.load(unit_indptr + batch)
    unit = unit_count - 1 - tl.program_id(0) // KV_HEADS
    if unit < 0:
        return
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    request = tl.load(units + unit * 4)
    row_start = tl.load(units + unit * 4 + 1)
    row_stop = tl.load(units + unit * 4 + 2)
    q_begin = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - q_begin
    if PAGE_SIZE == 0:
        kv_begin = tl.load(kv_indptr + request)
        kv_len = tl.load(kv_indptr + request + 1) - kv_begin
        keys = Keys(
            k + kv_begin.to(tl.int64) * stride_k_token + kv_head * stride_k_head,
            v + kv_begin.to(tl.int64) * stride_v_token + kv_head * stride_v_head, kv_indptr,
            (0, stride_k_token, stride_k_dim), (0, stride_v_token, stride_v_dim),
        )
    else:
        first_page = tl.load(kv_indptr + request)
        page_count = tl.load(kv_indptr + request + 1) - first_page
        kv_len = (page_count - 1) * PAGE_SIZE + tl.load(last_page_len + request)
        kv_len = tl.where(page_count > 0, kv_len, 0)
        keys = Keys(
            k + kv_head * stride_k_head, v + kv_head * stride_v_head, page_indices + first_page,
            (stride_k_page, stride_k_token, stride_k_dim), (stride_v_page, stride_v_token, stride_v_dim),
        )
    attend_rows(
        q, q_begin, q_len, (stride_q_token, stride_q_head, stride_q_dim), keys, kv_len, kv_head,
        out, lse, row_start, row_stop, sinks, slopes, k_scale, v_scale, sm_scale, soft_cap, window_left, chunk_size,
        mask, mask_indptr, request,
        Shape(PAGE_SIZE, HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_V, UPCAST, False),
        KV_HEADS, GROUP, BLOCK_M, CAUSAL, WINDOW, CHUNKED, MASK_KIND, SOFT_CAP,
    )
# fmt: on


def prefill_paged(
    q: torch.Tensor,
    cache: PagedCache,
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    options: AttentionOptions,
    masking: Masking,
    division: PrefillWork,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends ragged queries to paged keys. Does not wait for the device; the page table must have been checked.

    Args:
        q: `[tokens, query_heads, head_dim]`, float16, bfloat16 or float32, any strides.
        cache: of q's dtype, float8_e4m3fn or float8_e5m2.
        qo_indptr: int32 `[batch + 1]`, from 0 to tokens.
        indptr: int32 `[batch + 1]`.
        indices: int32, page ids.
        last_page_len: int32 `[batch]`.
        options: scale, soft cap, window and so on.
        masking: causal, chunks, custom mask.
        division: the result of `divide_prefill` for this qo_indptr.
        out: `[tokens, query_heads, v_head_dim]`, of q's dtype, contiguous; None allocates it.
        lse: float32 `[tokens, query_heads]`, contiguous; None allocates it.

    Returns:
        out, and lse in base 2; zeros and -inf for a query that sees no key.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; the message names the argument.
    """
    batch = division.work.batch
    check_index_tensor("indptr", indptr, length=batch + 1)
    check_index_tensor("indices", indices)
    check_index_tensor("last_page_len", last_page_len, length=batch)
    check_devices(q.device, cache=cache.k, indptr=indptr, indices=indices, last_page_len=last_page_len)
    launch = prepare_prefill(
        q, qo_indptr, cache.num_kv_heads, (cache.head_dim, cache.v_head_dim), cache.dtype, options, masking, division,
        out=out, lse=lse, interpreted=is_interpreted(prefill_kernel),
    )  # fmt: skip
    if not launch.is_empty and runs_on_hopper(q, cache, options, masking, division):
        with torch.cuda.device(q.device):
            launch_on_hopper(q, cache, qo_indptr, indptr, indices, last_page_len, options, masking, division, launch)
    else:
        table = (qo_indptr, indptr, indices, last_page_len)
        _launch(q, cache.k, cache.v, table, division, launch, page_size=cache.page_size)
    return launch.out, launch.lse


def prefill_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    options: AttentionOptions,
    masking: Masking,
    division: PrefillWork,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends ragged queries to ragged keys. Does not wait for the device; the indptrs must have been checked.

    Args:
        q: `[tokens, query_heads, head_dim]`, float16, bfloat16 or float32, any strides.
        k: `[kv_tokens, kv_heads, head_dim]`, of q's dtype, float8_e4m3fn or float8_e5m2, any strides.
        v: `[kv_tokens, kv_heads, v_head_dim]`, of k's dtype.
        qo_indptr: int32 `[batch + 1]`, from 0 to tokens.
        kv_indptr: int32 `[batch + 1]`, from 0 to kv_tokens.
        options: scale, soft cap, window and so on.
        masking: causal, chunks, custom mask.
        division: the result of `divide_prefill` for this qo_indptr.
        out: `[tokens, query_heads, v_head_dim]`, of q's dtype, contiguous; None allocates it.
        lse: float32 `[tokens, query_heads]`, contiguous; None allocates it.

    Returns:
        out, and lse in base 2; zeros and -inf for a query that sees no key.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; the message names the argument.
    """
    if k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2] or 0 in k.shape[1:] or 0 in v.shape[1:]:
        raise ValueError(f"k and v must be [tokens, kv_heads, dim], not {tuple(k.shape)} and {tuple(v.shape)}")
    if v.dtype != k.dtype:
        raise ValueError(f"v must have the dtype of k, {k.dtype}, not {v.dtype}")
    check_index_tensor("kv_indptr", kv_indptr, length=division.work.batch + 1)
    check_devices(q.device, k=k, v=v, kv_indptr=kv_indptr)
    launch = prepare_prefill(
        q, qo_indptr, k.shape[1], (k.shape[2], v.shape[2]), k.dtype, options, masking, division,
        out=out, lse=lse, interpreted=is_interpreted(prefill_kernel),
    )  # fmt: skip
    _launch(q, k, v, (qo_indptr, kv_indptr, None, None), division, launch, page_size=0)
    return launch.out, launch.lse


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    division: PrefillWork,
    launch: PrefillLaunch,
    *,
    page_size: int,
) -> None:
    """Launches the kernel, unless there is nothing to compute. `table` has all index tensors, from qo_indptr on."""
    if launch.is_empty:
        return
    interpreted = is_interpreted(prefill_kernel)
    strides = {"stride_k_page": None, "stride_v_page": None, **strides_of(q, k, v)}
    with device_of(prefill_kernel, q=q):
        prefill_kernel[launch.grid](
            q, as_kernel_sees(k, interpreted=interpreted), as_kernel_sees(v, interpreted=interpreted), *table,
            division.work.units, division.work.indptr, launch.out, launch.lse, **launch.arguments, **strides,
            PAGE_SIZE=page_size,
        )  # fmt: skip


def prefill_paged_reference(
    q: torch.Tensor,
    cache: PagedCache,
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    options: AttentionOptions,
    masking: Masking,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes prefill over pages in plain torch, request by request: out and base-2 lse, both float64."""
    starts = qo_indptr.tolist()
    return attend_requests(
        q,
        starts,
        lambda request: gather(cache, indptr, indices, last_page_len, request),
        options,
        masking,
    )


def prefill_ragged_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    options: AttentionOptions,
    masking: Masking,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes prefill without pages in plain torch, request by request: out and base-2 lse, both float64."""
    starts = kv_indptr.tolist()
    if k.dtype.itemsize == 1:
        k, v = k.float(), v.float()
    return attend_requests(
        q,
        qo_indptr.tolist(),
        lambda request: (k[starts[request] : starts[request + 1]], v[starts[request] : starts[request + 1]]),
        options,
        masking,
    )
