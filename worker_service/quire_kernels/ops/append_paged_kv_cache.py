"""Writes new tokens' keys and values to the pages of their requests.

    page   = kv_indices[kv_indptr[batch_indices[t]] + positions[t] // page_size]
    offset = positions[t] % page_size
    k_cache[page, offset, h, :] = append_key[t, h, :]         v_cache likewise; fp8 caches quantize, see `append_token`

There is one program per token and block of heads. A token with a negative batch index or position is padding of a batch
of fixed size, and is skipped. Two tokens must not share a slot: either token could remain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire_kernels.shared.append_token import (
    Scale,
    prepare,
    store_reference,
    write_key_and_value,
)
from quire_kernels.shared.paged_cache import (
    PagedCache,
    PagedKVCache,
    check_index_tensor,
    check_page_table,
    kv_lengths,
    unpack_paged_cache,
)


@triton.jit(
    do_not_specialize=["batch_size", "page_count"],
    do_not_specialize_on_alignment=["batch_indices_ptr", "positions_ptr", "kv_indices_ptr", "kv_indptr_ptr"],
)
def append_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    batch_indices_ptr,
    positions_ptr,
    kv_indices_ptr,
    kv_indptr_ptr,
    batch_size,
    page_count,
    key_token_stride,
    key_head_stride,
    key_element_stride,
    value_token_stride,
    value_head_stride,
    value_element_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    k_element_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    v_element_stride,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_SCALE_STRIDE: tl.constexpr,
    V_SCALE_STRIDE: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """Program (t, b) writes block b of the heads of token t, unless the token is padding or out of range."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(batch_indices_ptr + token)
    position = tl.load(positions_ptr + token)
    if (request >= 0) & (request < batch_size) & (position >= 0):
        entry = tl.load(kv_indptr_ptr + request) + position // PAGE_SIZE
        if entry < tl.load(kv_indptr_ptr + request + 1):
            page = tl.load(kv_indices_ptr + entry).to(tl.int64)
            offset = (position % PAGE_SIZE).to(tl.int64)
            if (page >= 0) & (page < page_count):
                # fmt: off
                write_key_and_value(
                    key_ptr, value_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, token, page, offset,
                    (key_token_stride, key_head_stride, key_element_stride),
                    (value_token_stride, value_head_stride, value_element_stride),
                    (k_page_stride, k_token_stride, k_head_stride, k_element_stride),
                    (v_page_stride, v_token_stride, v_head_stride, v_element_stride),
                    HEADS, K_DIM, V_DIM, BLOCK_HEADS, BLOCK_K, BLOCK_V, K_SCALE_STRIDE, V_SCALE_STRIDE, QUANTISE,
                )
                # fmt: on


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedKVCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
    *,
    check: bool = True,
) -> None:
    """Writes keys and values of new tokens in place, to pages that their requests already own.

    With `check=False` the host does not wait for the device, as CUDA graphs require. A token with an out-of-range
    request, position or page is then skipped. Call `check_append` once per batch instead, when the batch is planned.

    Args:
        append_key: `[tokens, num_kv_heads, head_dim]`, any strides; of the cache's dtype, or bf16, fp16 or fp32 if the
            cache is float8_e4m3fn or float8_e5m2.
        append_value: as `append_key`, for values.
        batch_indices: int32 `[tokens]`, request of each token; a negative index skips the token.
        positions: int32 `[tokens]`, position of each token in its request; a negative position skips the token.
        paged_kv_cache: 5-D `[pages, 2, page_size, num_kv_heads, head_dim]` (NHD) or `[pages, 2, num_kv_heads,
            page_size, head_dim]` (HND), or keys and values as a pair of 4-D tensors without the 2; any strides.
        kv_indices: int32 `[kv_indptr[batch]]` or longer, pages of all requests.
        kv_indptr: int32 `[batch + 1]`.
        kv_last_page_len: int32 `[batch]`, in `1..page_size`, including the new tokens.
        kv_layout: "NHD" or "HND".
        k_scale: only for an fp8 cache that quantizes, which stores key / k_scale: a number, or fp32 `[num_kv_heads]`.
        v_scale: as `k_scale`, for values.
        check: whether the values of the index tensors are read and checked (see `check_append`).

    Raises:
        ValueError: shape, dtype, device or layout do not fit; with `check`, also the refusals of `check_append`.
    """
    append = prepare(append_key, append_value, paged_kv_cache, kv_layout, k_scale, v_scale)
    cache = append.cache
    tokens = {"batch_indices": batch_indices, "positions": positions}
    table = {"kv_indices": kv_indices, "kv_indptr": kv_indptr}
    for name, tensor in {**tokens, **table, "kv_last_page_len": kv_last_page_len}.items():
        check_index_tensor(name, tensor, length=append.token_count if name in tokens else None)
        if tensor.device != cache.device:
            raise ValueError(f"{name} must be on the cache's device, {cache.device}, not {tensor.device}")
    if check:
        check_append(
            batch_indices,
            positions,
            kv_indices,
            kv_indptr,
            kv_last_page_len,
            page_count=cache.page_count,
            page_size=cache.page_size,
        )
    append.launch(append_kernel, *tokens.values(), *table.values(), kv_indptr.shape[0] - 1, cache.page_count)


def check_append(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    *,
    page_count: int,
    page_size: int,
) -> None:
    """Refuses indices that would lose a token.

    Reads the tensors, so on a GPU the host waits: call it once per batch, not once per layer.

    Args:
        batch_indices: int32 `[tokens]`.
        positions: int32 `[tokens]`.
        kv_indices: int32 `[kv_indptr[batch]]` or longer.
        kv_indptr: int32 `[batch + 1]`.
        kv_last_page_len: int32 `[batch]`.
        page_count: pages of the pool.
        page_size: tokens per page.

    Raises:
        ValueError: the page table is invalid, a token's request does not exist or is shorter than its position, or two
            tokens have the same slot; the message names the argument.
    """
    check_page_table(kv_indptr, kv_indices, kv_last_page_len, page_count=page_count, page_size=page_size, prefix="kv_")
    check_index_tensor("batch_indices", batch_indices)
    check_index_tensor("positions", positions, length=batch_indices.shape[0])
    lengths = kv_lengths(kv_indptr, kv_last_page_len, page_size).tolist()
    for request, position in zip(batch_indices.tolist(), positions.tolist(), strict=True):
        if request >= len(lengths):
            raise ValueError(f"batch_indices must be below {len(lengths)}, the number of requests, not {request}")
        if request >= 0 and position >= lengths[request]:
            raise ValueError(
                f"positions of request {request} must be below {lengths[request]}, its length, not {position}"
            )
    slots = [slot for slot in _slots(batch_indices, positions, kv_indices, kv_indptr, page_size) if slot is not None]
    if len(set(slots)) != len(slots):
        raise ValueError("positions: two tokens have the same slot")


def append_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedKVCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Appends in plain torch, token by token; the arguments must be valid."""
    cache: PagedCache = unpack_paged_cache(paged_kv_cache, kv_layout)
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, cache.page_size)
    store_reference(append_key, append_value, slots, cache, k_scale, v_scale)


def _slots(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    page_size: int,
) -> list[tuple[int, int] | None]:
    """Returns (page, offset) of each token; None for a skipped token."""
    pages, starts = kv_indices.tolist(), kv_indptr.tolist()
    return [
        None if request < 0 or position < 0 else (pages[starts[request] + position // page_size], position % page_size)
        for request, position in zip(batch_indices.tolist(), positions.tolist(), strict=True)
    ]
