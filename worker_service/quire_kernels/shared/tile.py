"""The inner loop of all attention kernels: a block of query rows attends to a range of keys with online softmax.

A query row is one head of one token. All rows of a block read the same KV head. Per tile of BLOCK_N keys:

    s = q k^T * scale, soft-capped, biased, masked, in units of log2
    m' = max(m, rowmax(s));  p = 2^(s - m');  l = l 2^(m - m') + rowsum(p);  acc = acc 2^(m - m') + p v

in float32. For the second product p is rounded to the dtype of the queries, as usual. Tiles are either free (every row
sees every key, so there is no mask) or edges (masked by row and at the loads). A slot outside `[load_low, load_high)`
and its page id are never read: the slot may hold NaN, and a mask after the product cannot remove 0 * NaN.

Keys lie in pages or, with PAGE_SIZE 0, one after another. The page ids of the next tile are loaded one iteration ahead:
a load that depends on a load of the same iteration would keep the compiler from pipelining the keys.

A head dim that is not a power of two is split for the first product into BLOCK_D + BLOCK_TAIL (96 = 64 + 32,
192 = 128 + 64), and padded to BLOCK_V for the second.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire_kernels.shared.fp8 import e4m3_to_float, e5m2_to_float

# Custom masks: none, one byte per (query, key), one bit per (query, key) in little bit order.
MASK_NONE = tl.constexpr(0)
MASK_BYTES = tl.constexpr(1)
MASK_BITS = tl.constexpr(2)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def as_operand(x, like, UPCAST: tl.constexpr):
    """Converts `x` to an operand of a product with `like`.

    Bytes are fp8 (see `fp8`). UPCAST is for the interpreter, which computes in float32.
    """
    if x.dtype == tl.uint8:
        x = e4m3_to_float(x)
    elif x.dtype == tl.int8:
        x = e5m2_to_float(x)
    if UPCAST:
        return x.to(tl.float32)
    else:
        return x.to(like.dtype)


@triton.jit
def load_query_dims(
    q, row_offset, row_valid, stride_dim, DIM_START: tl.constexpr, DIM_STOP: tl.constexpr, BLOCK: tl.constexpr
):
    """Loads the dims `[DIM_START, DIM_STOP)` of query rows, `[M, BLOCK]`; zeros outside."""
    dims = DIM_START + tl.arange(0, BLOCK)
    valid = row_valid[:, None] & (dims < DIM_STOP)[None, :]
    return tl.load(q + row_offset[:, None] + dims[None, :].to(tl.int64) * stride_dim, mask=valid, other=0.0)


@triton.jit
def load_queries(
    q,
    row_offset,  # [M] int64
    row_valid,  # [M] bool
    stride_dim,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Loads both parts of query rows, `[M, BLOCK_D]` and `[M, BLOCK_TAIL]`; without a tail, the first part twice."""
    part = load_query_dims(q, row_offset, row_valid, stride_dim, 0, BLOCK_D, BLOCK_D)
    tail = part
    if BLOCK_TAIL > 0:
        tail = load_query_dims(q, row_offset, row_valid, stride_dim, BLOCK_D, HEAD_DIM, BLOCK_TAIL)
    if UPCAST:
        part = part.to(tl.float32)
        tail = tail.to(tl.float32)
    return part, tail


@triton.jit
def start_softmax(sinks, head, valid, is_first, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Returns acc, row_max and row_sum before any key. Only the unit with `is_first` counts the sink."""
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if sinks is not None:
        if is_first:
            row_max = tl.load(sinks + head, mask=valid, other=0.0) * LOG2_E
            row_sum += 1.0
    return acc, row_max, row_sum


@triton.jit
def score_factors(slopes, head, valid, k_scale, v_scale, kv_head, sm_scale, BLOCK_M: tl.constexpr):
    """Loads each row's ALiBi slope, and computes the scales of scores and output."""
    slope = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=valid, other=0.0)
    scale = sm_scale
    if k_scale is not None:
        scale = sm_scale * tl.load(k_scale + kv_head)
    output_scale = 1.0
    if v_scale is not None:
        output_scale = tl.load(v_scale + kv_head)
    return slope, scale, output_scale


@triton.jit
def store_rows(out, lse, row, valid, result, result_lse, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    """Writes rows of a contiguous output `[rows, V_DIM]` and of lse, unless it is None; `row` is int64 `[M]`."""
    dims = tl.arange(0, BLOCK_V)
    stored = valid[:, None] & (dims < V_DIM)[None, :]
    tl.store(out + row[:, None] * V_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=stored)
    if lse is not None:
        tl.store(lse + row, result_lse, mask=valid)


@triton.jit
def page_ids_of_tile(
    page_ids,
    start,
    load_low,
    load_high,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONCE_A_PAGE: tl.constexpr = False,
):
    """Loads the page ids of the keys `[start, start + BLOCK_N)`, int64: one per key, or one if a page holds the tile.

    With ONCE_A_PAGE each id is loaded once and broadcast to the keys of its page. The hint helps where loads are the
    bottleneck.
    """
    if PAGE_SIZE == 0:
        return tl.zeros((), dtype=tl.int64)
    elif PAGE_SIZE % BLOCK_N == 0:
        valid = (start + BLOCK_N > load_low) & (start < load_high)
        return tl.load(page_ids + start // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
    elif ONCE_A_PAGE and PAGE_SIZE > 1 and BLOCK_N % PAGE_SIZE == 0:
        first = start + tl.arange(0, BLOCK_N // PAGE_SIZE) * PAGE_SIZE
        valid = (first + PAGE_SIZE > load_low) & (first < load_high)
        ids = tl.load(page_ids + first // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        return tl.reshape(tl.broadcast_to(ids[:, None], (BLOCK_N // PAGE_SIZE, PAGE_SIZE)), (BLOCK_N,))
    else:
        keys = start + tl.arange(0, BLOCK_N)
        valid = (keys >= load_low) & (keys < load_high)
        return tl.load(page_ids + keys // PAGE_SIZE, mask=valid, other=0).to(tl.int64)


@triton.jit
def token_offsets(pages, start, strides, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Computes the element offsets of the keys `[start, start + BLOCK_N)`, int64 `[BLOCK_N]`.

    Example: key 37 in pages of 16 is slot 5 of its page: page id * page stride + 5 * token stride.
    """
    lane = tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        return (start + lane).to(tl.int64) * strides[1]
    elif PAGE_SIZE % BLOCK_N == 0:
        return pages * strides[0] + (start % PAGE_SIZE + lane).to(tl.int64) * strides[1]
    else:
        return pages * strides[0] + ((start + lane) % PAGE_SIZE).to(tl.int64) * strides[1]


@triton.jit
def load_tile(
    base,
    offsets,
    key_valid,
    stride_dim,
    DIM_START: tl.constexpr,
    DIM_STOP: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Loads the dims `[DIM_START, DIM_STOP)` of a tile of keys or values, `[BLOCK_N, BLOCK]`; zeros outside."""
    dims = DIM_START + tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + dims[None, :].to(tl.int64) * stride_dim
    if DIM_STOP - DIM_START == BLOCK:
        if EDGE:
            return tl.load(pointers, mask=key_valid[:, None], other=0.0)
        else:
            return tl.load(pointers)
    else:
        valid = (dims < DIM_STOP)[None, :]
        if EDGE:
            valid = valid & key_valid[:, None]
        return tl.load(pointers, mask=valid, other=0.0)


@triton.jit
def soft_capped(x, soft_cap):
    """Computes soft_cap * tanh(x / soft_cap), with tanh(y) = 1 - 2 / (e^2y + 1): the interpreter has no tanh."""
    return soft_cap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E / soft_cap)) + 1.0))


@triton.jit
def is_unmasked(mask, mask_row, keys, valid, MASK_KIND: tl.constexpr):
    """Loads entries of a custom mask, bool `[M, BLOCK_N]`; `mask_row`, int64 `[M]`, is the start of each row."""
    index = mask_row[:, None] + keys[None, :]
    if MASK_KIND == MASK_BITS:
        byte = tl.load(mask + (index >> 3), mask=valid, other=0)
        return ((byte.to(tl.int32) >> (index & 7).to(tl.int32)) & 1) != 0
    else:
        return tl.load(mask + index, mask=valid, other=0) != 0


@triton.jit
def softmax_step(s, v, q, acc, row_max, row_sum, EDGE: tl.constexpr, UPCAST: tl.constexpr):
    """Adds one tile to the online softmax; `s` holds base-2 logarithms."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    if EDGE:  # A row may see no key yet, and -inf - -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        base = new_max
    p = tl.exp2(s - base[:, None])
    alpha = tl.exp2(row_max - base)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(as_operand(p, q, UPCAST), as_operand(v, q, UPCAST), acc, input_precision="ieee")
    return acc, new_max, row_sum


# The arguments of `attend_keys`, grouped by meaning. A tuple with compile-time values (upper case) must be made inside
# the call itself: Triton turns the numbers of a named tuple into run-time values.
class Keys(NamedTuple):
    """Addresses of the keys and values of a request."""

    k: Any  # pointer to the KV head (and, without pages, the first key) of the request
    v: Any
    page_ids: (
        Any  # pointer to the id of the request's first page; any pointer without pages, as Triton 3.6 rejects None
    )
    k_strides: Any  # (page, token, element)
    v_strides: Any


class Span(NamedTuple):
    """The keys `[start, stop)` that a call attends to; it reads only keys in `[load_low, load_high)`."""

    start: Any  # a multiple of BLOCK_N
    stop: Any
    load_low: Any
    load_high: Any


class Rows(NamedTuple):
    """The keys `[low, high)` of each row, and its position. All three are int32 `[M]`."""

    low: Any
    high: Any
    position: Any  # the query's position among the keys


class Scoring(NamedTuple):
    """The parameters that turn products into scores, see `options`."""

    scale: Any  # natural units; includes the scale of the cache's keys
    soft_cap: Any
    slope: Any  # [M] float32, natural units
    mask: Any  # pointer to the request's custom mask, or None
    mask_row: Any  # [M] int64, index of each row's first entry in the mask
    SOFT_CAP: Any
    ALIBI: Any
    MASK_KIND: Any


class Shape(NamedTuple):
    """Compile-time sizes of keys and tiles."""

    PAGE_SIZE: Any  # 0: no pages, keys lie one after another
    HEAD_DIM: Any
    V_DIM: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_TAIL: Any
    BLOCK_V: Any
    UPCAST: Any
    ONCE_A_PAGE: Any  # see `page_ids_of_tile`


@triton.jit
def attend_keys(softmax, q, keys, span, rows, scoring, shape, EDGE: tl.constexpr):
    """Attends a block of rows to a span of keys.

    `softmax` is acc `[M, BLOCK_V]`, row_max (log2) `[M]` and row_sum `[M]`, all float32. The result has the same form,
    and includes these keys. `q` is both parts of the queries, see `load_queries`. The other arguments are the tuples
    above. EDGE means that some row does not see some key of the span.
    """
    acc, row_max, row_sum = softmax
    q_part, q_tail = q
    pages = page_ids_of_tile(
        keys.page_ids, span.start, span.load_low, span.load_high, shape.PAGE_SIZE, shape.BLOCK_N, shape.ONCE_A_PAGE
    )
    for tile in range(span.start, span.stop, shape.BLOCK_N):
        key = tile + tl.arange(0, shape.BLOCK_N)
        key_valid = (key >= span.load_low) & (key < span.load_high)
        next_pages = page_ids_of_tile(
            keys.page_ids, tile + shape.BLOCK_N, span.load_low, span.load_high, shape.PAGE_SIZE, shape.BLOCK_N,
            shape.ONCE_A_PAGE,
        )  # fmt: skip
        offsets = token_offsets(pages, tile, keys.k_strides, shape.PAGE_SIZE, shape.BLOCK_N)
        k_tile = load_tile(keys.k, offsets, key_valid, keys.k_strides[2], 0, shape.BLOCK_D, shape.BLOCK_D, EDGE)
        s = tl.dot(q_part, tl.trans(as_operand(k_tile, q_part, shape.UPCAST)), input_precision="ieee")
        if shape.BLOCK_TAIL > 0:
            tail = load_tile(
                keys.k, offsets, key_valid, keys.k_strides[2], shape.BLOCK_D, shape.HEAD_DIM, shape.BLOCK_TAIL, EDGE
            )
            s = tl.dot(q_tail, tl.trans(as_operand(tail, q_part, shape.UPCAST)), s, input_precision="ieee")
        offsets = token_offsets(pages, tile, keys.v_strides, shape.PAGE_SIZE, shape.BLOCK_N)
        v_tile = load_tile(keys.v, offsets, key_valid, keys.v_strides[2], 0, shape.V_DIM, shape.BLOCK_V, EDGE)
        if scoring.SOFT_CAP:
            s = soft_capped(s * scoring.scale, scoring.soft_cap) * LOG2_E
        else:
            s = s * (scoring.scale * LOG2_E)
        if scoring.ALIBI:
            s += (scoring.slope * LOG2_E)[:, None] * (key[None, :] - rows.position[:, None]).to(tl.float32)
        if EDGE:
            seen = (key[None, :] >= rows.low[:, None]) & (key[None, :] < rows.high[:, None])
            if scoring.MASK_KIND != MASK_NONE:
                seen = seen & is_unmasked(scoring.mask, scoring.mask_row, key, seen, scoring.MASK_KIND)
            s = tl.where(seen, s, float("-inf"))
        acc, row_max, row_sum = softmax_step(s, v_tile, q_part, acc, row_max, row_sum, EDGE, shape.UPCAST)
        pages = next_pages
    return acc, row_max, row_sum


@triton.jit
def finish_softmax(acc, row_max, row_sum, v_scale):
    """Returns output `[M, BLOCK_V]` and base-2 lse `[M]`; zeros and -inf for rows that saw no key."""
    nothing = row_sum == 0.0
    out = acc * (v_scale / tl.where(nothing, 1.0, row_sum))[:, None]
    lse = tl.where(nothing, float("-inf"), row_max + tl.log2(tl.where(nothing, 1.0, row_sum)))
    return out, lse
