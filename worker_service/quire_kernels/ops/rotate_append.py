"""Rotates queries and keys by their positions, and writes keys and values to their slots, in one launch.

    x          = head / sqrt(mean(head^2) + eps) * (weight + offset)      if heads are normed (Qwen3, Gemma 3)
    turned(x)  = x * cos + rotate_half(x) * sin                           Su et al., 2021; beyond `rotary_dim`: x

    queries    are rotated in place
    keys       are rotated, and written to page and offset of their slot
    values     are written unchanged

Everything is computed in float32 and rounded once. There is one program per token and head. A token with a negative
slot, or a slot outside the pool, is padding of a batch of fixed size: its keys and values are not written, and its
queries are not used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import QUERY_DTYPES, check_devices, device_of
from quire_kernels.shared.paged_cache import PagedKVCache, unpack_paged_cache

NUM_WARPS = 1  # 32 threads are enough to hold a head of 128


@triton.jit(do_not_specialize=["slot_count"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def rotate_append_kernel(
    heads_ptr,
    cosine_ptr,
    sine_ptr,
    query_weight_ptr,
    key_weight_ptr,
    k_ptr,
    v_ptr,
    slot_mapping_ptr,
    slot_count,
    eps,
    offset,
    token_stride,
    table_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Processes head h of token t in program (t, h): queries come first, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    element = tl.arange(0, BLOCK)
    mask = element < DIM
    source = heads_ptr + token * token_stride + head * DIM
    x = tl.load(source + element, mask=mask, other=0.0)
    slot = tl.load(slot_mapping_ptr + token)
    is_written = (slot >= 0) & (slot < slot_count)
    page = slot // PAGE_SIZE
    place = slot % PAGE_SIZE
    if head >= QUERY_HEADS + KV_HEADS:
        kv_head = head - QUERY_HEADS - KV_HEADS
        target = v_ptr + page * v_page_stride + place * v_token_stride + kv_head * v_head_stride
        tl.store(target + element, x, mask=mask & is_written)
    else:
        half = ROTARY_DIM // 2
        is_turned = element < ROTARY_DIM
        partner = tl.where(element < half, element + half, element - half)
        partner = tl.where(is_turned, partner, element)
        y = tl.load(source + partner, mask=mask, other=0.0).to(tl.float32)
        turned = x.to(tl.float32)
        if NORMED:
            scale = 1.0 / tl.sqrt(tl.sum(turned * turned, axis=0) / DIM + eps)
            weight_ptr = key_weight_ptr
            if head < QUERY_HEADS:
                weight_ptr = query_weight_ptr
            own = tl.load(weight_ptr + element, mask=mask, other=0.0).to(tl.float32)
            other = tl.load(weight_ptr + partner, mask=mask, other=0.0).to(tl.float32)
            turned = turned * scale * (own + offset)
            y = y * scale * (other + offset)
        cosine = tl.load(cosine_ptr + token * table_stride + element, mask=is_turned, other=1.0).to(tl.float32)
        sine = tl.load(sine_ptr + token * table_stride + element, mask=is_turned, other=0.0).to(tl.float32)
        turned = turned * cosine + tl.where(element < half, -y, y) * sine
        if head < QUERY_HEADS:
            # Another thread may still be reading the words that this thread is about to overwrite.
            tl.debug_barrier()
            tl.store(source + element, turned.to(heads_ptr.dtype.element_ty), mask=mask)
        else:
            target = k_ptr + page * k_page_stride + place * k_token_stride + (head - QUERY_HEADS) * k_head_stride
            tl.store(target + element, turned.to(k_ptr.dtype.element_ty), mask=mask & is_written)


class HeadNorms(NamedTuple):
    """The RMSNorm of each query head and each key head before rotation.

    Attributes:
        query: weights `[head_dim]`, of the heads' dtype.
        key: weights `[head_dim]`, of the heads' dtype.
        eps: added to the mean of squares.
        offset: added to the weights of both; 1 for models such as Gemma 3 that store weight - 1.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    offset: float = 0.0


def rotate_append(
    heads: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: PagedKVCache,
    kv_layout: str = "NHD",
    *,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotates queries in place, and writes rotated keys and values to their slots. Does not wait for the device.

    Args:
        heads: float16, bfloat16 or float32 `[tokens, query_heads + 2 * kv_heads, head_dim]`, dense in its last two
            dimensions: queries, keys and values of each token, as one matrix product gives them.
        cosine: `[tokens, rotary_dim]` float16, bfloat16 or float32; the second half repeats the first.
        sine: as `cosine`, with the same strides.
        slot_mapping: int64 `[tokens]`, slot = page * page_size + offset; negative for padding.
        paged_kv_cache: 5-D or a pair of 4-D tensors of the heads' dtype, dense in their last dimension.
        kv_layout: "NHD" or "HND".
        norms: applied to the heads before rotation; None: no norms.

    Returns:
        The queries, `[tokens, query_heads, head_dim]`: a view of `heads`.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names the argument.
    """
    cache = unpack_paged_cache(paged_kv_cache, kv_layout)
    tokens, _, head_dim = heads.shape
    query_heads = heads.shape[1] - 2 * cache.num_kv_heads
    if heads.dtype not in QUERY_DTYPES or heads.stride()[1:] != (head_dim, 1) or query_heads < 1:
        raise ValueError(
            f"heads must be dense {QUERY_DTYPES}, not {heads.dtype} {tuple(heads.shape)}, {heads.stride()}"
        )
    if cache.dtype != heads.dtype or (cache.head_dim, cache.v_head_dim) != (head_dim, head_dim):
        raise ValueError(f"paged_kv_cache must be {heads.dtype} of head dim {head_dim}, not {cache.dtype}")
    if cache.k.stride(3) != 1 or cache.v.stride(3) != 1:
        raise ValueError("paged_kv_cache must be dense in its last dimension")
    rotary_dim = cosine.shape[1]
    if cosine.shape != sine.shape or cosine.shape[0] != tokens or cosine.stride() != sine.stride():
        raise ValueError(f"cosine and sine must be [{tokens}, rotary_dim], not {tuple(cosine.shape)}")
    if rotary_dim > head_dim or rotary_dim % 2 or cosine.stride(1) != 1 or cosine.dtype != sine.dtype:
        raise ValueError(f"cosine: {rotary_dim} dims of {cosine.dtype} cannot rotate heads of {head_dim}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (tokens,) or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [{tokens}], not {slot_mapping.dtype}")
    if norms is not None:
        for name, weight in (("norms.query", norms.query), ("norms.key", norms.key)):
            if weight.shape != (head_dim,) or not weight.is_contiguous():
                raise ValueError(f"{name} must be contiguous [{head_dim}], not {tuple(weight.shape)}")
        check_devices(heads.device, query=norms.query, key=norms.key)
    check_devices(heads.device, cosine=cosine, sine=sine, slot_mapping=slot_mapping, paged_kv_cache=cache.k)
    if tokens:
        query_weight, key_weight, eps, offset = norms or (None, None, 0.0, 0.0)
        with device_of(rotate_append_kernel, heads=heads):
            rotate_append_kernel[(tokens, heads.shape[1])](
                heads, cosine, sine, query_weight, key_weight, cache.k, cache.v, slot_mapping,
                cache.page_count * cache.page_size, float(eps), float(offset), heads.stride(0), cosine.stride(0),
                *cache.k.stride()[:3], *cache.v.stride()[:3],
                **tile_sizes(query_heads, cache.num_kv_heads, head_dim, rotary_dim, cache.page_size),
                NORMED=norms is not None, num_warps=NUM_WARPS,
            )  # fmt: skip
    return heads[:, :query_heads]


def rotate_append_reference(
    heads: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    kv_heads: int,
    *,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rotated queries and keys, float64 `[tokens, heads of each, head_dim]`, in plain torch."""
    query_heads = heads.shape[1] - 2 * kv_heads
    found = []
    for part, weight in (
        (heads[:, :query_heads], norms and norms.query),
        (heads[:, query_heads : query_heads + kv_heads], norms and norms.key),
    ):
        x = part.double()
        if norms is not None and weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + norms.eps).sqrt() * (weight.double() + norms.offset)
        rotary_dim = cosine.shape[1]
        turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cosine.double()[:, None] + torch.cat([-second, first], -1) * sine.double()[:, None]
        found.append(torch.cat([turned, rest], -1))
    return found[0], found[1]


def tile_sizes(query_heads: int, kv_heads: int, head_dim: int, rotary_dim: int, page_size: int) -> dict[str, Any]:
    """Returns the constexprs that size a program's work."""
    return {
        "QUERY_HEADS": query_heads,
        "KV_HEADS": kv_heads,
        "DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "PAGE_SIZE": page_size,
        "BLOCK": triton.next_power_of_2(head_dim),
    }
