"""What a group of four warps does with a tile of keys on Hopper: its softmax, and slots that no row may see."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quire_kernels.shared.options import AttentionOptions

LOG2_E = gl.constexpr(1.4426950408889634)
CLEARED_ROWS = gl.constexpr(16)  # zeroed at once, to stay within the registers

# Triton 3.6 has one name for it, 3.7 another. It synchronizes the warps of a group, not those of the program.
synchronize_group = getattr(gl, "barrier", None) or gl.thread_barrier


# fmt: off
@gluon.jit
def softmax_tile(
    s, row_max, row_sum, scale, cap, tile, row_low, row_high, is_edge,
    LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):
    """Takes a tile of products into the online softmax. Returns p, row_max, row_sum and the factor of what was there.

    Scores and row_max are in units of log2. `scale` is positive: the largest product gives the largest score.
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
    new_max = gl.maximum(row_max, gl.max(s, 1) * factor)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    p = gl.exp2(s * factor - base[:, None])
    alpha = gl.exp2(row_max - base)
    return p, new_max, row_sum * alpha + gl.sum(p, 1), alpha


@gluon.jit
def clear_values(values, low, high, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zeroes the rows of a tile outside `[low, high)`. Both groups do, with equal results, so neither waits."""
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


def score_factors(options: AttentionOptions) -> tuple[float, float]:
    """Returns the kernel's scale and cap: scores in log2 are x * scale, or cap * (1 - 2 / (2^(x * scale) + 1))."""
    scale, cap = options.sm_scale * LOG2_E.value, options.logits_soft_cap
    return (2.0 * scale / cap, cap * LOG2_E.value) if cap > 0 else (scale, 0.0)
