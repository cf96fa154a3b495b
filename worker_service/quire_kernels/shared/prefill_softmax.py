"""Softmax of a tile, and zeroing of unseen rows of V, for the prefill kernel for Hopper (`ops/prefill_hopper`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quire_kernels.shared.prefill_pieces import GROUP_ROWS, synchronize_group

CLEARED_ROWS = gl.constexpr(16)  # rows zeroed at a time; more would need too many registers


# fmt: off
@gluon.jit
def softmax_tile(
    s, row_max, row_sum, scale, cap, tile, row_low, row_high, is_edge,
    LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):
    """Adds a tile of products to the online softmax. Returns p, row_max, row_sum and the factor for the earlier sums.

    row_sum is `[64, 4]`, see `thread_sums`. Scores and row_max are base-2 logarithms. `scale` is positive, so the
    largest product gives the largest score.
    """
    if SOFT_CAP:
        s = cap * (1.0 - 2.0 / (gl.exp2(s * scale) + 1.0))  # cap * tanh
    if is_edge:
        key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = key[None, :] < row_high[:, None]
        if WINDOW:
            seen = seen & (key[None, :] >= row_low[:, None])
        s = gl.where(seen, s, float("-inf"))
    if SOFT_CAP:
        factor = 1.0
    else:
        factor = scale
    largest = gl.max(gl.max(gl.max(shares_of_threads(s, BLOCK_N), 4), 2), 1)
    largest = gl.convert_layout(gl.max(largest, 1), gl.SliceLayout(1, LAYOUT))
    new_max = gl.maximum(row_max, largest * factor)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    p = gl.exp2(s * factor - base[:, None])
    alpha = gl.exp2(row_max - base)
    added = thread_sums(p, BLOCK_N)
    factors = gl.convert_layout(alpha, gl.SliceLayout(1, added.type.layout))
    row_sum = row_sum * factors[:, None] + added
    return p, new_max, row_sum, alpha


@gluon.jit
def shares_of_threads(s, BLOCK_N: gl.constexpr):
    """Reshapes to `[64, BLOCK_N / 32, 4, 4, 2]`: four threads share a row, and the fourth dimension is the thread."""
    return s.reshape([GROUP_ROWS, BLOCK_N // 32, 4, 4, 2])


@gluon.jit
def thread_sums(p, BLOCK_N: gl.constexpr):
    """Returns `[64, 4]`: each thread's sum of a row. So threads add up their sums once per piece, not once per tile."""
    return gl.sum(gl.sum(gl.sum(shares_of_threads(p, BLOCK_N), 4), 2), 1)


@gluon.jit
def clear_values(values, low, high, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zeroes the rows of a tile outside `[low, high)`. Both groups zero these rows, so neither has to wait for the
    other.
    """
    for i in gl.static_range(BLOCK_N // CLEARED_ROWS):
        if (i * CLEARED_ROWS < low) | ((i + 1) * CLEARED_ROWS > high):
            part = values.slice(i * CLEARED_ROWS, CLEARED_ROWS, dim=0)
            row = i * CLEARED_ROWS + gl.arange(0, CLEARED_ROWS, gl.SliceLayout(1, LAYOUT))
            valid = (row >= low) & (row < high)
            numbers = part.load(LAYOUT)
            part.store(gl.where(valid[:, None], numbers, gl.zeros_like(numbers)))
    fence_async_shared()
    synchronize_group()
# fmt: on
