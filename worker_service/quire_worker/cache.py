"""The physical KV cache: one tensor of pages per layer.

Layout "NHD, 5-D", the words of FlashInfer:

    layers[i]  [pages, 2, page_size, kv_heads, head_dim]
                       |  |          N         H, D
                       |  +-- slot of a token in its page
                       +-- 0: keys, 1: values

A block id of the allocator is a page index here, the same in every layer, so that a block is `layer_count` pages. How
layers share a block, its bytes, and what the allocator is told of it come from the layout planner (`quire.planning`);
for layers of one kind and size that is

    bytes_per_block = 2 * layer_count * block_size * kv_head_count * head_dim * bytes per element
    block_count     = memory in bytes // bytes_per_block

A slot numbers the tokens of the whole pool: slot = page * page_size + offset in the page.

Nothing here knows which page is in use. A page that is free, or the part of a page past a sequence's last token, holds
whatever was last written there, NaN included; attention must never read it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from quire.planning import LayerSpec, Layout, blocks_for, plan_layout
from quire.types import GroupKind, GroupSpec

KEY_AND_VALUE = 2


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Shape of the pages of one model (or of one tensor-parallel rank of it: `kv_head_count` is the rank's).

    Raises:
        ValueError: a count is below 1.
    """

    layer_count: int
    kv_head_count: int
    head_dim: int
    block_size: int  # tokens per block
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("layer_count", "kv_head_count", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def plan(self) -> Layout:
        """How the layers share a block."""
        return _plan(self)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """What the allocator is told."""
        return tuple(group.spec for group in self.plan.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        return self.plan.page_bytes

    @property
    def layout(self) -> str:
        """What identifies the bytes in a page, for prefix digests: two caches of equal layout may exchange pages."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"nhd layers={self.layer_count} kv_heads={self.kv_head_count} head_dim={self.head_dim}"
            f" block={self.block_size} dtype={dtype}"
        )

    def block_count_for(self, memory_bytes: int) -> int:
        """Blocks that fit into a budget.

        Raises:
            ValueError: not even one does.
        """
        return blocks_for(self.plan, memory_bytes)


@functools.lru_cache(maxsize=8)
def _plan(spec: CacheSpec) -> Layout:
    layers = [
        LayerSpec(
            layer,
            GroupKind.FULL_ATTENTION,
            kv_head_count=spec.kv_head_count,
            head_dim=spec.head_dim,
            element_bytes=spec.dtype.itemsize,
        )
        for layer in range(spec.layer_count)
    ]
    return plan_layout(layers, block_size=spec.block_size, block_size_max=spec.block_size)


class KVCache:
    """The pages of a pool. `layers[i]` is `[pages, 2, page_size, kv_heads, head_dim]` of the spec's dtype."""

    def __init__(self, spec: CacheSpec, block_count: int, *, device: torch.device | str = "cpu") -> None:
        """Reserves the memory. On a CPU the zeroed pages are only backed by memory once they are written.

        Raises:
            ValueError: `block_count` is below 1.
        """
        if block_count < 1:
            raise ValueError(f"block_count must be at least 1, not {block_count}")
        shape = (block_count, KEY_AND_VALUE, spec.block_size, spec.kv_head_count, spec.head_dim)
        self.spec = spec
        self.block_count = block_count
        self.device = torch.device(device)
        self.layers = tuple(torch.zeros(shape, dtype=spec.dtype, device=self.device) for _ in range(spec.layer_count))

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages."""
        return self.block_count * self.spec.bytes_per_block
