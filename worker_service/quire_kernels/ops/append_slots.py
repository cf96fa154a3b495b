"""Writes new tokens' keys and values to slots, as the worker appends.

    page, offset = divmod(slot_mapping[t], page_size)
    k_cache[page, offset, h, :] = append_key[t, h, :]         v_cache likewise; fp8 caches quantize, see `append_token`

There is one program per token and block of heads. A token with a negative slot is padding of a batch of fixed size, and
is skipped. Two tokens must not share a slot: either token could remain.
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
from quire_kernels.shared.paged_cache import PagedKVCache, unpack_paged_cache


@triton.jit(do_not_specialize=["slot_count"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def append_slots_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_mapping_ptr,
    slot_count,
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
    """Program (t, b) writes block b of the heads of token t, unless its slot is negative or outside the pool."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot >= 0) & (slot < slot_count):
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
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


def append_slots(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: PagedKVCache,
    kv_layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
    *,
    check: bool = True,
) -> None:
    """Writes keys and values of new tokens to their slots, in place.

    With `check=False` the host does not wait for the device, as CUDA graphs require, and slots outside the pool are
    skipped. Call `check_slots` once per batch instead, when the batch is planned.

    Args:
        append_key: `[tokens, num_kv_heads, head_dim]`, any strides; of the cache's dtype, or bf16, fp16 or fp32 if the
            cache is float8_e4m3fn or float8_e5m2.
        append_value: as `append_key`, for values.
        slot_mapping: int64 `[tokens]`, slot = page * page_size + offset; a negative slot skips the token.
        paged_kv_cache: 5-D or a pair of 4-D tensors, any strides, see `append_paged_kv_cache`.
        kv_layout: "NHD" or "HND".
        k_scale: only for an fp8 cache that quantizes, which stores key / k_scale: a number, or fp32 `[num_kv_heads]`.
        v_scale: as `k_scale`, for values.
        check: whether the slots are read and checked (see `check_slots`).

    Raises:
        ValueError: shape, dtype, device or layout do not fit; with `check`, also the refusals of `check_slots`.
    """
    append = prepare(append_key, append_value, paged_kv_cache, kv_layout, k_scale, v_scale)
    cache = append.cache
    if slot_mapping.dtype != torch.int64 or slot_mapping.device != cache.device:
        raise ValueError(
            f"slot_mapping must be int64 on {cache.device}, not {slot_mapping.dtype} on {slot_mapping.device}"
        )
    if slot_mapping.shape != (append.token_count,) or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous, [{append.token_count}], not {tuple(slot_mapping.shape)}")
    slot_count = cache.page_count * cache.page_size
    if check:
        check_slots(slot_mapping, slot_count=slot_count)
    append.launch(append_slots_kernel, slot_mapping, slot_count)


def check_slots(slot_mapping: torch.Tensor, *, slot_count: int) -> None:
    """Refuses slots that would lose a token.

    Reads the tensor, so on a GPU the host waits: call it once per batch, not once per layer.

    Args:
        slot_mapping: int64 `[tokens]`.
        slot_count: slots of the pool, pages * page_size.

    Raises:
        ValueError: a slot is outside the pool, or two tokens have the same slot.
    """
    slots = [slot for slot in slot_mapping.tolist() if slot >= 0]
    if slots and max(slots) >= slot_count:
        raise ValueError(f"slot_mapping must be below {slot_count}, the number of slots, not {max(slots)}")
    if len(set(slots)) != len(slots):
        raise ValueError("slot_mapping: two tokens have the same slot")


def append_slots_reference(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: PagedKVCache,
    kv_layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Appends in plain torch, token by token; the arguments must be valid."""
    cache = unpack_paged_cache(paged_kv_cache, kv_layout)
    slots = [None if slot < 0 else divmod(slot, cache.page_size) for slot in slot_mapping.tolist()]
    store_reference(append_key, append_value, slots, cache, k_scale, v_scale)
