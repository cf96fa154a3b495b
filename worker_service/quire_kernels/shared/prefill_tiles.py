"""The tiles of keys that a block of query rows needs; used by the kernel for Hopper, and as plain Python by its tests.

Rows and their keys are defined in `prefill_rows`. Tile j holds the keys `[j * BLOCK_N, (j + 1) * BLOCK_N)`. A block
needs the tiles `[start, stop)`. The tiles `[free_start, free_stop)` need no mask: every row sees all of their keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def keys_of_block(
    kv_len, q_len, row_start, row_stop, window_left, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):
    """Returns the keys `[low, high)` that some row sees, and the keys `[free_low, free_high)` that every row sees."""
    first = kv_len - q_len + row_start // GROUP  # positions of the first and the last row
    last = kv_len - q_len + (row_stop - 1) // GROUP
    low = kv_len * 0
    free_low = kv_len * 0
    high = kv_len
    free_high = kv_len
    if WINDOW:
        low = max(first - window_left, 0)
        free_low = max(last - window_left, 0)
    if CAUSAL:
        high = max(last + 1, 0)
        free_high = max(first + 1, 0)
    return low, high, free_low, free_high


@gluon.jit
def tiles_of_keys(low, high, free_low, free_high, BLOCK_N: gl.constexpr):
    """Returns start, stop, free_start and free_stop (see the top of the file), in tiles."""
    start = low // BLOCK_N
    stop = max((high + BLOCK_N - 1) // BLOCK_N, start)
    return start, stop, (free_low + BLOCK_N - 1) // BLOCK_N, free_high // BLOCK_N


@gluon.jit
def unit_of_piece(number, unit_count, KV_HEADS: gl.constexpr):
    """Returns the block of rows of a piece.

    A request's last block comes first: under a causal mask it sees the most keys. The KV heads of a block are adjacent
    pieces, so that programs that run at the same time share pages.
    """
    return unit_count - 1 - number // KV_HEADS
