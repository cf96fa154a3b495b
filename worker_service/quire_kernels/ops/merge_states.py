"""Merges attention over parts of the keys into attention over all of them.

The state of attention over some keys is the output v and s = log2(sum of 2^score) over these keys. Scores are in base 2
as in FlashInfer: s is the natural log-sum-exp divided by ln 2.

    s = log2(sum_i 2^s_i)        v = sum_i 2^(s_i - s) v_i

Weights are computed as 2^(s_i - max s), which neither overflows nor vanishes. A state over no keys has s = -inf: its
weight is 0, and its v is not read. If all states are empty, s = -inf and v = 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import check_runnable, device_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE_ELEMENTS_MAX = 2048  # elements of the heads that one program merges
NUM_WARPS = 4


@triton.jit(do_not_specialize=["state_count"])
def merge_states_kernel(
    v_ptr,
    s_ptr,
    v_out_ptr,
    s_out_ptr,
    state_count,
    v_row_stride,
    v_state_stride,
    v_head_stride,
    v_element_stride,
    s_row_stride,
    s_state_stride,
    s_head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Merges all states of row r for block b of the heads, in program (r, b)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    element = tl.arange(0, BLOCK_DIM)
    heads = head < HEADS
    mask = heads[:, None] & (element < DIM)[None, :]
    v_row = v_ptr + row * v_row_stride + head[:, None].to(tl.int64) * v_head_stride
    v_row += element[None, :].to(tl.int64) * v_element_stride
    s_row = s_ptr + row * s_row_stride + head.to(tl.int64) * s_head_stride
    largest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    merged = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    state = 0
    while state < state_count:
        offset = tl.cast(state, tl.int64)
        s = tl.load(s_row + offset * s_state_stride, mask=heads, other=float("-inf"))
        exists = s != float("-inf")
        v = tl.load(v_row + offset * v_state_stride, mask=mask & exists[:, None], other=0.0).to(tl.float32)
        before = largest
        largest = tl.maximum(before, s)
        # -inf - -inf would be NaN, so 0 replaces the maximum until the first state that has keys.
        anchor = tl.where(largest == float("-inf"), 0.0, largest)
        old = tl.exp2(before - anchor)
        new = tl.exp2(s - anchor)
        total = total * old + new
        merged = merged * old[:, None] + v * new[:, None]
        state += 1
    is_empty = total == 0.0
    v = merged / tl.where(is_empty, 1.0, total)[:, None]
    s = tl.where(is_empty, float("-inf"), largest + tl.log2(tl.where(is_empty, 1.0, total)))
    row_head = row * HEADS + head
    tl.store(s_out_ptr + row_head, s, mask=heads)
    tl.store(v_out_ptr + row_head[:, None] * DIM + element[None, :], v.to(v_out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["mask_ptr"])
def merge_state_kernel(
    v_a_ptr,
    s_a_ptr,
    v_b_ptr,
    s_b_ptr,
    v_out_ptr,
    s_out_ptr,
    mask_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Merges both states of row r for block b of the heads, in program (r, b), unless the mask is 0."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    element = tl.arange(0, BLOCK_DIM)
    heads = head < HEADS
    if mask_ptr is not None:
        heads = heads & (tl.load(mask_ptr + row) != 0)
    mask = heads[:, None] & (element < DIM)[None, :]
    row_head = row * HEADS + head
    place = row_head[:, None] * DIM + element[None, :]
    s_a = tl.load(s_a_ptr + row_head, mask=heads, other=float("-inf"))
    s_b = tl.load(s_b_ptr + row_head, mask=heads, other=float("-inf"))
    has_a = s_a != float("-inf")
    has_b = s_b != float("-inf")
    v_a = tl.load(v_a_ptr + place, mask=mask & has_a[:, None], other=0.0).to(tl.float32)
    v_b = tl.load(v_b_ptr + place, mask=mask & has_b[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(s_a, s_b)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a = tl.exp2(s_a - anchor)
    weight_b = tl.exp2(s_b - anchor)
    total = weight_a + weight_b
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    v = (v_a * weight_a[:, None] + v_b * weight_b[:, None]) / divisor[:, None]
    s = tl.where(is_empty, float("-inf"), largest + tl.log2(divisor))
    # When merging in place, another thread may still be reading the words that this thread is about to overwrite.
    tl.debug_barrier()
    tl.store(s_out_ptr + row_head, s, mask=heads)
    tl.store(v_out_ptr + place, v.to(v_out_ptr.dtype.element_ty), mask=mask)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over two disjoint sets of keys.

    Args:
        v_a: bf16, fp16 or fp32 `[rows, heads, head_dim]`, any strides.
        s_a: fp32 `[rows, heads]`, base 2; -inf if there was no key.
        v_b: as `v_a`, of its dtype and shape.
        s_b: as `s_a`.

    Returns:
        v and s, of the dtypes and shapes of `v_a` and `s_a`, contiguous.

    Raises:
        ValueError: shapes, dtypes or devices differ; the message names the argument.
    """
    _check_state("v_a", v_a, "s_a", s_a, dimensions=3)
    _check_state("v_b", v_b, "s_b", s_b, dimensions=3)
    _check_alike("v_b", v_b, "v_a", v_a)
    v = torch.empty(v_a.shape, dtype=v_a.dtype, device=v_a.device)
    s = torch.empty(s_a.shape, dtype=s_a.dtype, device=s_a.device)
    _launch_pair(v_a.contiguous(), s_a.contiguous(), v_b.contiguous(), s_b.contiguous(), v, s, None)
    return v, s


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merges another state into `v` and `s`.

    Args:
        v: bf16, fp16 or fp32 `[rows, heads, head_dim]`, contiguous; written in place.
        s: fp32 `[rows, heads]`, base 2, contiguous; written in place.
        v_other: of the dtype and shape of `v`, any strides.
        s_other: of the shape of `s`, any strides.
        mask: bool `[rows]`; rows with False are not changed.

    Raises:
        ValueError: shapes, dtypes or devices differ, or `v` or `s` is not contiguous; the message names the argument.
    """
    _check_state("v", v, "s", s, dimensions=3)
    _check_state("v_other", v_other, "s_other", s_other, dimensions=3)
    _check_alike("v_other", v_other, "v", v)
    for name, tensor in (("v", v), ("s", s)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous to be written in place, not have strides {tensor.stride()}")
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != v.shape[:1] or mask.device != v.device:
            raise ValueError(f"mask must be bool [{v.shape[0]}] on {v.device}, not {mask.dtype} {tuple(mask.shape)}")
        mask = mask.contiguous().view(torch.uint8)
    _launch_pair(v, s, v_other.contiguous(), s_other.contiguous(), v, s, mask)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges any number of states, such as the states of the parts of a long sequence.

    Args:
        v: bf16, fp16 or fp32 `[rows, states, heads, head_dim]`, any strides. Zero states give empty results.
        s: fp32 `[rows, states, heads]`, base 2, any strides; -inf if there was no key.

    Returns:
        v `[rows, heads, head_dim]` of its dtype and s fp32 `[rows, heads]`, contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    _check_state("v", v, "s", s, dimensions=4)
    rows, state_count, heads, dim = v.shape
    merged = torch.empty(rows, heads, dim, dtype=v.dtype, device=v.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=v.device)
    if merged.numel() == 0:
        return merged, lse
    sizes = tile_sizes(heads, dim)
    with device_of(merge_states_kernel, v=v):
        merge_states_kernel[(rows, triton.cdiv(heads, sizes["BLOCK_HEADS"]))](
            v, s, merged, lse, state_count, *v.stride(), *s.stride(), **sizes, num_warps=NUM_WARPS
        )
    return merged, lse


def merge_states_reference(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `merge_states` in plain torch and float64."""
    s64 = s.to(torch.float64)
    v64 = torch.where((s == float("-inf")).unsqueeze(-1), 0.0, v.to(torch.float64))
    total = torch.logsumexp(s64 * torch.log(torch.tensor(2.0, dtype=torch.float64)), dim=1)
    total = total / torch.log(torch.tensor(2.0, dtype=torch.float64))  # [rows, heads]
    weight = torch.exp2(s64 - total.unsqueeze(1))
    weight = torch.where((s == float("-inf")), 0.0, weight)
    return (v64 * weight.unsqueeze(-1)).sum(1).to(v.dtype), total.to(torch.float32)


def _launch_pair(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    rows, heads, dim = v.shape
    if v.numel() == 0:
        return
    sizes = tile_sizes(heads, dim)
    with device_of(merge_state_kernel, v=v):
        merge_state_kernel[(rows, triton.cdiv(heads, sizes["BLOCK_HEADS"]))](
            v_a, s_a, v_b, s_b, v, s, mask, **sizes, num_warps=NUM_WARPS
        )


def _check_state(v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor, *, dimensions: int) -> None:
    if v.dim() != dimensions:
        raise ValueError(f"{v_name} must have {dimensions} dimensions, not {tuple(v.shape)}")
    if v.dtype not in DTYPES:
        raise ValueError(f"{v_name} must be one of {DTYPES}, not {v.dtype}")
    if s.dtype != torch.float32 or s.shape != v.shape[:-1]:
        raise ValueError(f"{s_name} must be float32 {tuple(v.shape[:-1])}, not {s.dtype} {tuple(s.shape)}")
    if s.device != v.device:
        raise ValueError(f"{s_name} must be on {v.device}, like {v_name}, not {s.device}")
    check_runnable(merge_state_kernel, **{v_name: v})


def _check_alike(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.shape != other.shape or tensor.dtype != other.dtype or tensor.device != other.device:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, but {other_name} is {other.dtype} "
            f"{tuple(other.shape)} on {other.device}: they must be equal"
        )


def tile_sizes(heads: int, dim: int) -> dict[str, Any]:
    """Returns the constexprs that size a program's work: at most `TILE_ELEMENTS_MAX` elements, but at least a head."""
    block_dim = triton.next_power_of_2(dim)
    block_heads = min(triton.next_power_of_2(heads), max(1, TILE_ELEMENTS_MAX // block_dim))
    return {"HEADS": heads, "DIM": dim, "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim}
