"""Prefill without pages: ragged queries attend to ragged keys.

    out_i = softmax(score(q_i, K)) V over the keys that query i sees      scores, sinks and lse: see `options`

The blocks of rows are the same as in `prefill_paged` (see `prefill_rows`). The keys of a request are adjacent in
memory. The head dims of keys and values may differ: 192 and 128 for the prefill of multi-head latent attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import as_kernel_sees, check_devices, device_of, is_interpreted
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import check_index_tensor
from quire_kernels.shared.prefill_launch import prepare_prefill
from quire_kernels.shared.prefill_rows import Masking, PrefillWork, attend_requests, attend_rows
from quire_kernels.shared.tile import Keys, Shape

AXES = ("token", "head", "dim")


# fmt: off
@triton.jit(
    do_not_specialize=["batch", "window_left", "chunk_size"],
    do_not_specialize_on_alignment=[
        "qo_indptr", "kv_indptr", "units", "unit_indptr", "lse", "mask", "mask_indptr",
    ],
)
def prefill_ragged_kernel(
    q,  # [tokens, heads, HEAD_DIM]
    k, v,  # [kv_tokens, kv_heads, HEAD_DIM or V_DIM]
    qo_indptr, kv_indptr,  # int32 [batch + 1]
    units, unit_indptr,  # see `work_units`; items are rows
    out, lse,  # [tokens, heads, V_DIM] and, float32 or None, [tokens, heads]; contiguous
    sinks, slopes,  # float32 [heads] or None
    k_scale, v_scale,  # float32 [kv_heads] or None
    sm_scale, soft_cap, window_left, chunk_size, batch,
    mask, mask_indptr,  # uint8 or None, int64 [batch + 1] or None
    stride_q_token, stride_q_head, stride_q_dim,
    stride_k_token, stride_k_head, stride_k_dim,
    stride_v_token, stride_v_head, stride_v_dim,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
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
    kv_begin = tl.load(kv_indptr + request)
    kv_len = tl.load(kv_indptr + request + 1) - kv_begin
    attend_rows(
        q, q_begin, q_len, (stride_q_token, stride_q_head, stride_q_dim),
        Keys(
            k + kv_begin.to(tl.int64) * stride_k_token + kv_head * stride_k_head,
            v + kv_begin.to(tl.int64) * stride_v_token + kv_head * stride_v_head, kv_indptr,
            (0, stride_k_token, stride_k_dim), (0, stride_v_token, stride_v_dim),
        ),
        kv_len, kv_head,
        out, lse, row_start, row_stop, sinks, slopes, k_scale, v_scale, sm_scale, soft_cap, window_left, chunk_size,
        mask, mask_indptr, request,
        Shape(0, HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_TAIL, BLOCK_V, UPCAST, False),
        KV_HEADS, GROUP, BLOCK_M, CAUSAL, WINDOW, CHUNKED, MASK_KIND, SOFT_CAP,
    )
# fmt: on


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
    interpreted = is_interpreted(prefill_ragged_kernel)
    check_index_tensor("kv_indptr", kv_indptr, length=division.work.batch + 1)
    check_devices(q.device, k=k, v=v, kv_indptr=kv_indptr)
    launch = prepare_prefill(
        q, qo_indptr, k.shape[1], (k.shape[2], v.shape[2]), k.dtype, options, masking, division,
        out=out, lse=lse, interpreted=interpreted,
    )  # fmt: skip
    strides = {
        f"stride_{name}_{axis}": stride
        for name, tensor in (("q", q), ("k", k), ("v", v))
        for axis, stride in zip(AXES, tensor.stride(), strict=True)
    }
    if not launch.is_empty:
        with device_of(prefill_ragged_kernel, q=q):
            prefill_ragged_kernel[launch.grid](
                q, as_kernel_sees(k, interpreted=interpreted), as_kernel_sees(v, interpreted=interpreted),
                qo_indptr, kv_indptr, division.work.units, division.work.indptr, launch.out, launch.lse,
                **launch.arguments, **strides,
            )  # fmt: skip
    return launch.out, launch.lse


def prefill_ragged_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    options: AttentionOptions,
    masking: Masking,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes prefill in plain torch, request by request: out and base-2 lse, both float64."""
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
