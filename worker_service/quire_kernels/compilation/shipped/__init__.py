"""The specializations that ship, one table per family of kernels; `scripts/compile_kernels.py` compiles them.

A kernel can be launched for any ratio of heads, page size and head dim, so not every specialization can be listed.
The list has

- every dtype that a launcher accepts, including float32, which is slower because it does not use tensor cores;
- every tile size that a launcher can choose, with all options at once, at the largest head dims that use this size;
- head dims 64 to 256; 5, 7 and other numbers of query heads per KV head; pages of 1, 16 and 64; each without options.
"""

from __future__ import annotations

from quire_kernels.compilation.configurations import KernelConfiguration, unique
from quire_kernels.compilation.shipped.appending import APPENDING
from quire_kernels.compilation.shipped.around_attention import AROUND_ATTENTION
from quire_kernels.compilation.shipped.around_products import AROUND_PRODUCTS
from quire_kernels.compilation.shipped.attention import ATTENTION
from quire_kernels.compilation.shipped.moving import MOVING
from quire_kernels.compilation.shipped.on_hopper import ON_HOPPER

# Different choices of a launcher may give the same specialization, so duplicates are dropped.
SHIPPED: tuple[KernelConfiguration, ...] = unique(
    (*APPENDING, *ATTENTION, *AROUND_ATTENTION, *AROUND_PRODUCTS, *MOVING, *ON_HOPPER)
)
