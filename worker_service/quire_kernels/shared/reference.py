"""Attention of one request in plain torch and float64: the reference for every kernel."""

from __future__ import annotations

import torch

from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import PagedCache

LOG2_E = 1.4426950408889634

# Largest absolute and relative error that tests allow, by the dtype of the queries. Results are means of normal
# numbers, so they rarely exceed 3. Half precision rounds the results, and on a GPU also the weights before the second
# product. fp8 caches are compared with their stored values, so the tolerance of the queries' dtype applies. Measured
# differences: `docs/attention.md`.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 1e-4
# Tolerances of the worker's CPU path. They are below `TOLERANCE`, because PyTorch rounds bfloat16, while Triton's
# interpreter truncates, and because no GPU takes part.
CPU_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}
# Tolerances of merging, which rounds each result once. Triton's interpreter truncates bfloat16 instead of rounding.
MERGE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SAMPLE_TOLERANCE = 1e-5  # how far a uniform number may lie outside the probability interval of the drawn token


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention by the formulas at the top of `options`.

    Args:
        q: `[q_len, query_heads, head_dim]`, any dtype.
        k: `[kv_len, kv_heads, head_dim]`.
        v: `[kv_len, kv_heads, v_head_dim]`.
        seen: bool `[q_len, kv_len]`, on any device. The mask must include the window: `options.window_left` is ignored.
        options: scale, soft cap and so on.

    Returns:
        float64 `[q_len, query_heads, v_head_dim]`, and base-2 lse float64 `[q_len, query_heads]`.
    """
    q_len, heads = q.shape[:2]
    kv_len, kv_heads = k.shape[:2]
    group = heads // kv_heads
    key, value = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    x = torch.einsum("qhd,khd->hqk", q.double(), key) * options.sm_scale
    if options.k_scale is not None:
        x = x * options.k_scale.double().repeat_interleave(group)[:, None, None]
    if options.logits_soft_cap > 0:
        x = options.logits_soft_cap * torch.tanh(x / options.logits_soft_cap)
    if options.alibi_slopes is not None:
        distance = torch.arange(kv_len)[None, :] - (kv_len - q_len + torch.arange(q_len))[:, None]
        x = x + options.alibi_slopes.double()[:, None, None] * distance.to(x.device)
    x = x.masked_fill(~seen.to(x.device), float("-inf"))
    if options.sinks is not None:
        sink = options.sinks.double()[:, None, None].expand(heads, q_len, 1)
        x = torch.cat([x, sink], dim=2)
        value = torch.cat([value, value.new_zeros(1, heads, value.shape[2])])
    lse = x.logsumexp(2) if x.shape[2] else x.new_full((heads, q_len), float("-inf"))
    weight = torch.where(lse[..., None] == float("-inf"), 0.0, (x - lse[..., None]).exp())
    out = torch.einsum("hqk,khd->qhd", weight, value)
    if options.v_scale is not None:
        out = out * options.v_scale.double().repeat_interleave(group)[:, None]
    return out, lse.T * LOG2_E


def visible(
    q_len: int, kv_len: int, *, causal: bool = False, window_left: int = -1, chunk_size: int = 0
) -> torch.Tensor:
    """Returns which keys each query sees, bool `[q_len, kv_len]`; the last query is aligned with the last key."""
    position = (kv_len - q_len + torch.arange(q_len))[:, None]
    key = torch.arange(kv_len)[None, :]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window_left >= 0:
        seen &= key >= position - window_left
    if chunk_size > 0:
        seen &= key >= torch.div(position, chunk_size, rounding_mode="floor") * chunk_size
    return seen


def gather(
    cache: PagedCache, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, request: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers keys and values of a request, `[kv_len, kv_heads, head_dim]`; fp8 is converted to float32."""
    pages = indices[int(indptr[request]) : int(indptr[request + 1])].long()
    length = (pages.shape[0] - 1) * cache.page_size + int(last_page_len[request]) if pages.shape[0] else 0
    k, v = (part[pages].flatten(0, 1)[:length] for part in (cache.k, cache.v))
    return (k.float(), v.float()) if k.dtype.itemsize == 1 else (k, v)
