"""The specialisations that ship, which `scripts/compile_kernels.py` compiles: a table per family of kernels.

A kernel can be launched for any ratio of heads, page size and head dim, so not all of it can be compiled. The list has

- every dtype that a launcher takes (float32 too: it is multiplied without tensor cores, and slower);
- every size of tile that a launcher can choose, with all options at once, at the largest head dims that get it;
- head dims 64 to 256, 5, 7 and other query heads per KV head, and pages of 1, 16 and 64, each once without options.
"""

from __future__ import annotations

from quire_kernels.compilation.configurations import KernelConfiguration, unique
from quire_kernels.compilation.shipped.appending import APPENDING
from quire_kernels.compilation.shipped.around_attention import AROUND_ATTENTION
from quire_kernels.compilation.shipped.around_products import AROUND_PRODUCTS
from quire_kernels.compilation.shipped.attention import ATTENTION
from quire_kernels.compilation.shipped.moving import MOVING
from quire_kernels.compilation.shipped.on_hopper import ON_HOPPER

# Two choices of a launcher may lead to one specialisation; it is compiled once.
SHIPPED: tuple[KernelConfiguration, ...] = unique(
    (*APPENDING, *ATTENTION, *AROUND_ATTENTION, *AROUND_PRODUCTS, *MOVING, *ON_HOPPER)
)
