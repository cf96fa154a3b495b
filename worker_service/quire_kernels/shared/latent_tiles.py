"""What the kernels for latents on Hopper share: where a tile lies, and how it and the queries get to shared memory.

Index arithmetic is in functions of their own, whose `fn` tests call as plain Python: Gluon has no interpreter.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(1.4426950408889634)
synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # the name in Triton 3.7 and in 3.6


@gluon.jit
def buffer_of(tile, BUFFERS: gl.constexpr):
    """Says which buffer a tile of a unit goes to, counted from the unit's first, and the phase of its barrier."""
    return tile % BUFFERS, (tile // BUFFERS) & 1


@gluon.jit
def page_of_box(key, box, last_page, PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr):
    """Says which page holds the keys from `key + box * ROWS` on, and at which slot; never past the last page."""
    first = key + box * ROWS
    page = first // PAGE_SIZE
    return min(page, last_page), first % PAGE_SIZE


# fmt: off
@gluon.jit
def load_heads(q, token_offset, stride_head, head, heads, target, layout: gl.constexpr):
    """Copies the queries of a block of heads to shared memory, zeros past the last head."""
    dims = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    offset = token_offset + head.to(gl.int64) * stride_head
    target.store(gl.load(q + offset[:, None] + dims[None, :], mask=(head < heads)[:, None], other=0.0))


@gluon.jit
def clear_rows(latents, first, layout: gl.constexpr):
    """Clears the rows of a tile from `first` on: slots without a token may hold NaN, and 0 * NaN is NaN."""
    rows = gl.arange(0, latents.shape[0], gl.SliceLayout(1, layout))
    for box in gl.static_range(latents.shape[1] // 64):
        part = latents.slice(box * 64, 64, dim=1)
        values = part.load(layout)
        part.store(gl.where((rows < first)[:, None], values, gl.zeros_like(values)))
# fmt: on
