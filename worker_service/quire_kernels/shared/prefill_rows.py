"""Prefill: attention of a block of query rows to all keys that any of them sees.

Row r of a request is head `r % GROUP` (of a KV head's query heads) of token `r // GROUP`. So keys are read once for all
heads that share them, and any ratio of heads fills the block. Token t of a request with q_len queries and kv_len keys
is at position kv_len - q_len + t (right-aligned: the last query sees the last key). The token sees the keys

    [max(0, position - window_left, position // chunk_size * chunk_size), causal ? position + 1 : kv_len)

that the custom mask, if any, allows. Keys that all rows of the block see are attended without a mask. The other keys
are edges: a window makes edges on both sides, causality makes one on the right, and a custom mask makes all keys edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import Tiling, check_devices
from quire_kernels.shared.numbers import require_integer
from quire_kernels.shared.options import AttentionOptions
from quire_kernels.shared.paged_cache import check_index_tensor
from quire_kernels.shared.reference import attend, visible
from quire_kernels.shared.tile import (
    MASK_NONE,
    Rows,
    Scoring,
    Span,
    attend_keys,
    finish_softmax,
    load_queries,
    score_factors,
    start_softmax,
    store_rows,
)
from quire_kernels.shared.work_units import WorkUnits, divide_work


# fmt: off
@triton.jit
def attend_rows(
    q, q_begin, q_len, q_strides,  # q at the request's first token
    keys, kv_len, kv_head,  # `keys` is a `Keys` at the request's KV head
    out, lse, row_start, row_stop,
    sinks, slopes, k_scale, v_scale, sm_scale, soft_cap, window_left, chunk_size,
    mask, mask_indptr, request, shape,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, MASK_KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Attends the rows `[row_start, row_stop)` of a request, at most BLOCK_M, and stores them."""
    row = row_start + tl.arange(0, BLOCK_M)
    valid = row < row_stop
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = kv_len - q_len + token
    first = kv_len - q_len + row_start // GROUP  # positions of the first and the last row
    last = kv_len - q_len + (row_stop - 1) // GROUP
    row_low = visible_from(position, window_left, chunk_size, WINDOW, CHUNKED)
    row_high = tl.where(valid, kv_len, 0)
    load_low = visible_from(first, window_left, chunk_size, WINDOW, CHUNKED)
    load_high = kv_len
    free_low = visible_from(last, window_left, chunk_size, WINDOW, CHUNKED)  # all rows see [free_low, free_high)
    free_high = kv_len
    if CAUSAL:
        row_high = tl.minimum(row_high, position + 1)
        load_high = tl.minimum(kv_len, last + 1)
        free_high = tl.minimum(kv_len, first + 1)
    start = load_low // shape.BLOCK_N * shape.BLOCK_N
    free_start = tl.maximum((free_low + shape.BLOCK_N - 1) // shape.BLOCK_N * shape.BLOCK_N, start)
    free_stop = tl.maximum(tl.maximum(free_high, 0) // shape.BLOCK_N * shape.BLOCK_N, free_start)

    q_row = (q_begin + token).to(tl.int64) * q_strides[0] + head * q_strides[1]
    queries = load_queries(
        q, q_row, valid, q_strides[2], shape.HEAD_DIM, shape.BLOCK_D, shape.BLOCK_TAIL, shape.UPCAST
    )
    softmax = start_softmax(sinks, head, valid, True, BLOCK_M, shape.BLOCK_V)
    slope, scale, output_scale = score_factors(slopes, head, valid, k_scale, v_scale, kv_head, sm_scale, BLOCK_M)
    mask_row = token.to(tl.int64) * kv_len
    if MASK_KIND != MASK_NONE:
        mask += tl.load(mask_indptr + request)
    rows = Rows(row_low, row_high, position)
    for phase in tl.static_range(3):  # phases: left edge, keys that all rows see, right edge
        if phase == 0:
            tile_start, tile_stop = start, free_start if MASK_KIND == MASK_NONE else load_high
        elif phase == 1:
            tile_start, tile_stop = free_start, free_stop
        else:
            tile_start, tile_stop = free_stop, load_high
        if (phase == 0 and (WINDOW or CHUNKED or MASK_KIND != MASK_NONE)) or (phase > 0 and MASK_KIND == MASK_NONE):
            span = Span(tile_start, tile_stop, load_low, load_high)
            softmax = attend_keys(
                softmax, queries, keys, span, rows,
                Scoring(scale, soft_cap, slope, mask, mask_row, SOFT_CAP, slopes is not None, MASK_KIND), shape,
                phase != 1,
            )
    result, result_lse = finish_softmax(softmax[0], softmax[1], softmax[2], output_scale)
    out_row = (q_begin + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    store_rows(out, lse, out_row, valid, result, result_lse, shape.V_DIM, shape.BLOCK_V)
# fmt: on


@triton.jit
def visible_from(position, window_left, chunk_size, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Returns the first key that a query at `position` sees: at 40 with window_left 9 and chunks of 32, max(31, 32)."""
    low = position * 0
    if WINDOW:
        low = tl.maximum(low, position - window_left)
    if CHUNKED:
        low = tl.maximum(low, position // chunk_size * chunk_size)
    return low


@dataclass(frozen=True, slots=True, eq=False)
class Masking:
    """Restricts the keys that each query sees, in addition to the window of `AttentionOptions`.

    Raises:
        ValueError: chunk_size is negative, or a custom mask is combined with `causal`, lacks its indptr, or has another
            dtype.
    """

    causal: bool = False
    chunk_size: int = 0  # tokens; a query sees only keys of its own chunk (Llama 4); 0: no chunks
    custom_mask: torch.Tensor | None = None  # bool, one entry per (query, key); or uint8, eight entries per byte
    mask_indptr: torch.Tensor | None = None  # int64 [batch + 1]: each request's first entry (bool) or byte

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk_size", require_integer("chunk_size", self.chunk_size, 0))
        if self.custom_mask is None:
            return
        if self.causal:
            raise ValueError("custom_mask replaces causal: give one of them")
        if self.custom_mask.dtype not in (torch.bool, torch.uint8) or self.custom_mask.dim() != 1:
            raise ValueError(f"custom_mask must be a flat bool or uint8 tensor, not {self.custom_mask.dtype}")
        if not self.custom_mask.is_contiguous():
            raise ValueError("custom_mask must be contiguous")
        if self.mask_indptr is None or self.mask_indptr.dtype != torch.int64:
            raise ValueError("mask_indptr must be an int64 tensor where there is a custom_mask")

    @property
    def kind(self) -> int:
        """Returns the kind of the custom mask: MASK_NONE, MASK_BYTES or MASK_BITS of `tile`."""
        if self.custom_mask is None:
            return 0
        return 1 if self.custom_mask.dtype == torch.bool else 2

    def check(self, batch: int, device: torch.device) -> None:
        """Refuses a mask that is on another device, or has another batch size.

        Raises:
            ValueError: the mask does not fit; the message names the argument.
        """
        check_devices(device, custom_mask=self.custom_mask, mask_indptr=self.mask_indptr)
        if self.mask_indptr is not None and self.mask_indptr.shape != (batch + 1,):
            raise ValueError(f"mask_indptr must have {batch + 1} entries, not {tuple(self.mask_indptr.shape)}")

    def arguments(self) -> dict[str, Any]:
        """Returns the masking arguments of the kernels."""
        mask = self.custom_mask
        return {
            "mask": mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask,
            "mask_indptr": self.mask_indptr,
            "chunk_size": self.chunk_size,
            "CAUSAL": self.causal,
            "CHUNKED": self.chunk_size > 0,
            "MASK_KIND": self.kind,
        }


def mask_indptr_of(qo_indptr: torch.Tensor, kv_lengths: torch.Tensor, *, packed: bool) -> torch.Tensor:
    """Computes on the device where each request's part of a flat mask starts.

    Args:
        qo_indptr: int32 `[batch + 1]`.
        kv_lengths: int32 `[batch]`.
        packed: True: eight entries per byte, and each request starts at a new byte. False: one entry per byte.

    Returns:
        int64 `[batch + 1]`.
    """
    sizes = qo_indptr.diff().long() * kv_lengths.long()
    if packed:
        sizes = (sizes + 7) // 8
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def prefill_tiling(
    chip: str,
    rows_per_request: int,
    head_dim: int,
    v_head_dim: int,
    element_bytes: int,
    *,
    masked: bool = False,
    is_fp8: bool = False,
) -> Tiling:
    """Chooses tile sizes for blocks of query rows, so that no registers spill.

    Args:
        chip: the result of `launch.chip_of`.
        rows_per_request: the mean over the batch, which needs no lengths.
        head_dim: the head dim of keys.
        v_head_dim: the head dim of values.
        element_bytes: bytes per element of the queries. Products of 4-byte elements run without tensor cores, which
            takes more registers.
        masked: whether there is a custom mask; its addresses take registers.
        is_fp8: whether the keys are fp8; converting them takes registers.
    """
    block_m = 16 if rows_per_request <= 16 else 64 if rows_per_request <= 64 else 128
    widest = max(head_dim, v_head_dim)
    if element_bytes == 4:
        num_stages = 1 if is_fp8 and chip != "gfx942" else 2
        return Tiling(min(block_m, 16 if widest > 192 else 32), 16, num_warps=8, num_stages=num_stages)
    if chip == "gfx942":
        return Tiling(min(block_m, 32 if widest > 192 else 64), 32, num_warps=4, num_stages=2)
    if widest > 192:
        block_m = min(block_m, 32 if is_fp8 or (masked and chip == "sm_80") else 64)
        num_warps = 8 if is_fp8 or block_m > 16 else 4
        return Tiling(block_m, 16 if is_fp8 and masked else 32, num_warps, num_stages=3)
    if chip == "sm_80" and (is_fp8 or block_m > 16):
        num_stages = 2 if widest > 128 or (is_fp8 and masked) else 3
        return Tiling(min(block_m, 64), 32, num_warps=8, num_stages=num_stages)
    if is_fp8 and masked:
        return Tiling(min(block_m, 64), 32, num_warps=8 if block_m > 16 else 4, num_stages=2 if widest > 128 else 3)
    num_warps = 8 if block_m == 128 or (block_m == 64 and (masked or widest > 128)) else 4
    return Tiling(block_m, 32 if masked else 64, num_warps, num_stages=3)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillWork:
    """The work division of a batch's query rows; launches with the same division must not run at the same time."""

    work: WorkUnits
    taken: torch.Tensor  # int32 [1]: number of pieces taken by the programs of a launch; 0 between launches
    tiling: Tiling
    group: int  # query heads per KV head
    token_count: int  # upper bound of query tokens


def divide_prefill(
    qo_indptr: torch.Tensor, *, token_count: int, group: int, tiling: Tiling, out: PrefillWork | None = None
) -> PrefillWork:
    """Cuts the query rows of every request into blocks, on the device, once per forward pass for all layers.

    Args:
        qo_indptr: int32 `[batch + 1]`.
        token_count: query tokens of all requests, or an upper bound. This number determines the size of the grid.
        group: query heads per KV head.
        tiling: the result of `prefill_tiling`.
        out: an earlier division to overwrite; its `token_count` must suffice. None allocates a new one.

    Raises:
        ValueError: a dtype or shape does not fit, or `out` is too small.
    """
    check_index_tensor("qo_indptr", qo_indptr)
    batch = qo_indptr.shape[0] - 1
    last = qo_indptr.diff() * group
    capacity = triton.cdiv(token_count * group, tiling.block_m) + batch
    work = divide_work(
        torch.zeros_like(last),
        last,
        unit_target=None,
        size_min=tiling.block_m,
        capacity=capacity,
        out=None if out is None else out.work,
    )
    if out is not None:
        return out
    taken = torch.zeros(1, dtype=torch.int32, device=qo_indptr.device)
    return PrefillWork(work, taken, tiling, group, token_count)


def attend_requests(
    q: torch.Tensor,
    starts: list[int],
    keys_and_values: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    options: AttentionOptions,
    masking: Masking,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends the queries `[starts[i], starts[i + 1])` to the keys of request i, in plain torch."""
    outs, lses = [], []
    for request, (start, stop) in enumerate(itertools.pairwise(starts)):
        k, v = keys_and_values(request)
        seen = visible(
            stop - start,
            k.shape[0],
            causal=masking.causal,
            window_left=options.window_left,
            chunk_size=masking.chunk_size,
        )
        if masking.custom_mask is not None and masking.mask_indptr is not None:
            seen = seen.to(masking.custom_mask.device)
            seen &= _mask_of(masking.custom_mask, int(masking.mask_indptr[request]), seen.shape)
        out, lse = attend(q[start:stop], k, v, seen, options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _mask_of(mask: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Extracts the custom mask of a request, bool `[q_len, kv_len]`, from entries or bits."""
    size = shape.numel()
    if mask.dtype == torch.bool:
        return mask[start : start + size].reshape(shape)
    part = mask[start : start + (size + 7) // 8]
    bits = (part[:, None] >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
    return bits.flatten()[:size].bool().reshape(shape)
