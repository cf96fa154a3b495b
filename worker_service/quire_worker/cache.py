"""The physical KV cache: buffers of pages, each shared by one layer of every group of layers.

A block id of the allocator is a page: slot `id` of every buffer, for the group that holds the block. The layout planner
(`quire.planning`, docs/layout.md) decides which layers share a page, and where in the page each layer lies. Example: 2
layers of full attention and 4 of a sliding window, all of one size, make three groups and two buffers:

    buffer 0    full 0, sliding 0, sliding 2        a page of group 1 holds sliding 0 in buffer 0
    buffer 1    full 1, sliding 1, sliding 3        and sliding 1 in buffer 1

    bytes_per_block = buffers * bytes of a slot
    block_count     = memory in bytes // bytes_per_block

Recurrent states lie in the same pages, in groups of their own (`state_pages`).

A layer sees its part of the buffer as one 5-D tensor of pages, or as a tuple of keys and values (FlashInfer's terms):

    pages  [blocks, 2, block_size, kv_heads, head_dim]
                    |  |           N         H, D
                    |  +-- slot of a token in its page
                    +-- 0: keys, 1: values; latent attention has only keys, and their first elements are the values

In memory, tokens come before heads (NHD) or heads before tokens (HND); a view always has the order above. A page is
contiguous. Two neighboring pages start `PageSpec.page_stride` elements apart. This stride is more than a page's own
elements if the slot also holds other layers of the group, or padding. A token's slot is page * block_size + index in
the page.

This module does not know which pages are in use. A free page, and the part of a page past a sequence's last token, hold
leftovers of earlier writes, even NaN. Attention must never read these leftovers.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from quire.planning import LayerSpec, Layout, blocks_for, plan_layout
from quire.types import GroupKind, GroupSpec

from quire_worker.page_format import UNSCALED, Scales, is_quantised
from quire_worker.state_pages import LayerState, StateTensor, state_groups

KEY_AND_VALUE = 2
NAN_BYTE = 0xFF  # in every float format, bytes of 0xFF are NaN


@dataclass(frozen=True, slots=True)
class PageSpec:
    """Shape of the pages of one layer, on one tensor-parallel rank.

    Attributes:
        kv_head_count: this rank's heads.
        block_size: tokens per page.
        dtype: the stored dtype.
        stride: elements of `dtype` from one page to the next; None if pages follow each other without a gap.
        latent_dim: for latent attention, the number of leading key elements that are also the value; None if values are
            stored.
        computed_in: dtype of queries, and of keys and values before they are stored; None means `dtype`.
        is_hnd: whether heads come before tokens in memory.

    Raises:
        ValueError: a count is below 1, or the stride is not a multiple of the size of a page's keys.
    """

    kv_head_count: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    stride: int | None = None
    latent_dim: int | None = None
    computed_in: torch.dtype | None = None
    is_hnd: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_head_count", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.page_stride % self.half_elements or self.page_stride < self.half_count * self.half_elements:
            keys = self.half_elements
            raise ValueError(
                f"page_stride must be a multiple of the {keys} elements of a page's keys, not {self.page_stride}"
            )

    @property
    def query_dtype(self) -> torch.dtype:
        """Returns the dtype that attention computes in."""
        return self.computed_in or self.dtype

    @property
    def is_plain(self) -> bool:
        """Returns whether pages hold keys and values unchanged, and in token order."""
        return not self.is_hnd and not is_quantised(self.dtype)

    @property
    def row_elements(self) -> int:
        """Counts the elements of the keys of one token."""
        return self.kv_head_count * self.head_dim

    @property
    def half_count(self) -> int:
        """Returns the halves of a page: 2 (keys and values), or 1 (only keys)."""
        return KEY_AND_VALUE if self.latent_dim is None else 1

    @property
    def half_elements(self) -> int:
        """Returns the elements of one half of a page: all its keys, or all its values."""
        return self.block_size * self.row_elements

    @property
    def page_stride(self) -> int:
        """Returns the elements from one page to the next."""
        return self.half_count * self.half_elements if self.stride is None else self.stride

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """Returns the dimensions of one page."""
        return (self.half_count, self.block_size, self.kv_head_count, self.head_dim)

    @property
    def page_strides(self) -> tuple[int, int, int, int]:
        """Returns the strides of `page_shape`, in elements."""
        by_token = (
            (self.head_dim, self.block_size * self.head_dim) if self.is_hnd else (self.row_elements, self.head_dim)
        )
        return (self.half_elements, *by_token, 1)


def rows_of(pages: torch.Tensor, width: int) -> torch.Tensor:
    """Views a layer's pages as rows `[rows, width]` in the same memory, beginning with the layer's first key.

    Args:
        pages: `[blocks, 2, block_size, kv_heads, head_dim]`, each contiguous.
        width: must divide the stride between pages. Elements between two pages (other layers, padding) become rows too.
    """
    if pages.is_contiguous():
        return pages.view(-1, width)
    elements = (pages.shape[0] - 1) * pages.stride(0) + pages[0].numel()
    return pages.as_strided((elements // width, width), (width, 1))


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A model's layout of keys, values and states in pages.

    Attributes:
        layers: layers of this tensor-parallel rank, including layers that read another layer's keys and values.
        block_size: tokens per block, the same in every group of attention.
        dtype: dtype in which the model computes keys and values.
        token_count_max: longest sequence that the layout is planned for.
        latent_dim: see `PageSpec`; the same for all layers.
        stored_as: fp8 dtype of the pages; None means `dtype`.
        is_hnd: see `PageSpec`; the same for all layers.
        scales: scales of the layers with fp8 pages, by index in the model. Layers with scales of 1 are left out.
        rank_count: ranks of the crew. Each rank has pages of the same form, for its own heads.
        states: state tensors of the recurrent layers, by index in the model, in the order of their bytes.

    Raises:
        ValueError: a head count, head dimension or block size is below 1, or the layers' pages do not fit side by side.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    dtype: torch.dtype
    token_count_max: int = 32_768
    latent_dim: int | None = None
    stored_as: torch.dtype | None = None
    is_hnd: bool = False
    scales: tuple[tuple[int, Scales], ...] = ()
    rank_count: int = 1
    states: tuple[tuple[int, tuple[StateTensor, ...]], ...] = ()

    def __post_init__(self) -> None:
        for _ in self.layer_pages():  # each `PageSpec` checks its values when it is built
            pass

    @classmethod
    def full_attention(
        cls, layer_count: int, kv_head_count: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> CacheSpec:
        """Returns the spec of equal layers that keep every token."""
        layers = tuple(
            LayerSpec(layer, GroupKind.FULL_ATTENTION, kv_head_count, head_dim, element_bytes=dtype.itemsize)
            for layer in range(layer_count)
        )
        return cls(layers, block_size, dtype)

    @property
    def plan(self) -> Layout:
        """Returns the plan that assigns layers to pages. The plan is computed once for each spec."""
        return _plan(self.layers, self.block_size, self.token_count_max)

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Returns the groups that the worker declares to the allocator."""
        return tuple(group.spec for group in self.plan.groups)

    @property
    def bytes_per_block(self) -> int:
        """Counts the bytes of one block, in all buffers."""
        return self.plan.page_bytes

    @property
    def stored_name(self) -> str:
        """Names the dtype of the pages."""
        return str(self.stored_as or self.dtype).removeprefix("torch.")

    @property
    def layout(self) -> str:
        """Returns a name for the format of the bytes in a page, for prefix digests.

        Caches of equal layout may exchange pages.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        if self.stored_as is not None:
            scales = hashlib.sha256(repr(self.scales).encode()).hexdigest()[:16] if self.scales else "1"
            dtype = f"{self.stored_name} of={dtype} scales={scales}"
        order = "hnd" if self.is_hnd else "nhd"
        groups = " ".join(
            f"{group.spec.kind.name.lower()}{f'({group.spec.window})' if group.spec.window else ''}"
            f"[{','.join(map(str, group.layers))}]{f'x{group.part_count}' if group.part_count > 1 else ''}"
            for group in self.plan.groups
            if group.part == 0
        )
        shapes = " ".join(
            dict.fromkeys(
                f"{layer.kv_head_count}x{layer.head_dim}" for layer in self.attention if layer.shared_with is None
            )
        )
        if self.latent_dim is not None:
            shapes += f" latent={self.latent_dim}"
        ranks = f" ranks={self.rank_count}" if self.rank_count > 1 else ""
        kept = dict.fromkeys("+".join(tensor.label for tensor in tensors) for _, tensors in self.states)
        states = f" states={' '.join(kept)}" if kept else ""
        buffers = f"block={self.block_size} buffers={self.plan.buffer_count}"
        return f"{order} {groups} heads={shapes} {buffers} dtype={dtype}{states}{ranks}"

    @property
    def attention(self) -> tuple[LayerSpec, ...]:
        """Returns the attention layers: they store keys and values, or read another layer's."""
        return tuple(layer for layer in self.layers if layer.kind is not GroupKind.STATE)

    def layer_pages(self) -> Iterator[LayerPages]:
        """Yields where the keys and values of each layer lie. A layer that reads another layer's keys and values gets
        that layer's place.

        Raises:
            ValueError: see the class.
        """
        plan = self.plan
        slices = {layer.layer: parts[0] for layer, parts in plan.slices().items() if layer.kind is not GroupKind.STATE}
        for layer in self.attention:
            part = slices[layer.layer if layer.shared_with is None else layer.shared_with]
            buffer, offset = divmod(part.offset, plan.slot_bytes)
            dtype = self.stored_as or self.dtype
            pages = PageSpec(
                layer.kv_head_count,
                layer.head_dim,
                self.block_size,
                dtype,
                stride=plan.slot_bytes // dtype.itemsize,
                latent_dim=self.latent_dim,
                computed_in=self.dtype,
                is_hnd=self.is_hnd,
            )
            yield LayerPages(layer, part.group, buffer, offset // dtype.itemsize, pages)

    def block_count_for(self, memory_bytes: int) -> int:
        """Counts the blocks that fit into a budget.

        Raises:
            ValueError: not even one block fits.
        """
        return blocks_for(self.plan, memory_bytes)


class LayerPages(NamedTuple):
    """Location of one layer's pages: `offset` elements after the start of each slot of a buffer."""

    layer: LayerSpec
    group: int
    buffer: int
    offset: int
    pages: PageSpec


@functools.lru_cache(maxsize=8)
def _plan(layers: tuple[LayerSpec, ...], block_size: int, token_count_max: int) -> Layout:
    return plan_layout(
        layers, block_size=block_size, block_size_max=block_size, token_count_max=token_count_max, even_pages=True
    )


def _zeros(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Returns zeroed bytes. On a CPU, `torch.zeros` would write the bytes, and so take all of their memory at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


class LayerCache(NamedTuple):
    """One layer, bound to its pages.

    Attributes:
        kind: index in `KVCache.kinds`; layers with the same group and page shape have the same kind and plan.
        pages: `[blocks, 2, block_size, kv_heads, head_dim]` of the cache's dtype, each page contiguous; latent
            attention has 1 in place of 2.
        window: tokens that a query sees in the sliding window, including itself; None without a window.
        is_written: True if the layer writes its own keys and values; False if it reads another layer's.
        scales: scales of the fp8 pages.
    """

    kind: int
    pages: torch.Tensor
    window: int | None
    is_written: bool
    scales: Scales = UNSCALED

    @property
    def key_and_value(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same pages as a tuple of keys and values, each `[blocks, block_size, kv_heads, head_dim]`.

        With latent attention, both elements of the tuple are the keys.
        """
        return self.pages[:, 0], self.pages[:, -1]


class KVCache:
    """The pages of a pool.

    Attributes:
        buffers: uint8 `[blocks, bytes of a slot]`, one for each buffer of the plan.
        layers: attention layers, by index in the model.
        kinds: the distinct pairs of group and page shape among the layers.
        states: states of the recurrent layers, by index in the model.
    """

    def __init__(self, spec: CacheSpec, block_count: int, *, device: torch.device | str = "cpu") -> None:
        """Reserves the memory. On a CPU the system provides memory for a page only when the page is first written.

        Raises:
            ValueError: `block_count` is below 1.
            OSError: on a CPU, the system does not promise that much memory.
        """
        if block_count < 1:
            raise ValueError(f"block_count must be at least 1, not {block_count}")
        self.spec = spec
        self.block_count = block_count
        self.device = torch.device(device)
        shape = (block_count, spec.plan.slot_bytes)
        self.buffers = tuple(_zeros(shape, self.device) for _ in range(spec.plan.buffer_count))
        kinds: dict[tuple[int, PageSpec], int] = {}
        self.layers: dict[int, LayerCache] = {}
        for placed in spec.layer_pages():
            kind = kinds.setdefault((placed.group, placed.pages), len(kinds))
            self.layers[placed.layer.layer] = self._bind(placed, kind)
        self.kinds = tuple(kinds)
        slices = {layer.layer: parts for layer, parts in spec.plan.slices().items() if layer.kind is GroupKind.STATE}
        first = state_groups(spec.plan).start
        self.states = {layer: LayerState(tensors, slices[layer], self.buffers, first) for layer, tensors in spec.states}

    def _bind(self, placed: LayerPages, kind: int) -> LayerCache:
        elements = self.buffers[placed.buffer].view(placed.pages.dtype).flatten()
        shape, strides = placed.pages.page_shape, placed.pages.page_strides
        pages = elements.as_strided((self.block_count, *shape), (placed.pages.page_stride, *strides), placed.offset)
        is_sliding = placed.layer.kind is GroupKind.SLIDING_WINDOW
        window = placed.layer.window if is_sliding else None
        source = placed.layer.layer if placed.layer.shared_with is None else placed.layer.shared_with
        scales = dict(self.spec.scales).get(source, UNSCALED)
        return LayerCache(kind, pages, window, placed.layer.shared_with is None, scales)

    def sequence_tokens_max(self, pass_token_count: int) -> int:
        """Returns the tokens of the longest sequence that fits alone, in whole blocks.

        Full attention holds all its tokens. A sliding window holds the tokens that a pass reads, and the rest of the
        last token's block. The result is 0 if not even one block of each group fits.

        Args:
            pass_token_count: the most tokens that one pass computes.
        """
        size, plan = self.spec.block_size, self.spec.plan
        fits, too_long = 0, -(-self.spec.token_count_max // size) + 1  # lengths in blocks
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            is_enough = plan.blocks_peak(middle * size, pass_token_count + size) <= self.block_count
            fits, too_long = (middle, too_long) if is_enough else (fits, middle)
        return fits * size

    @property
    def pool_bytes(self) -> int:
        """Counts the bytes of all pages."""
        return sum(buffer.nbytes for buffer in self.buffers)
