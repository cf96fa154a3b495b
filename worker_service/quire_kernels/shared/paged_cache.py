"""The cache and page table of every kernel, and their checks.

A cache comes in FlashInfer's words:

    one 5-D tensor    [pages, 2, page_size, kv_heads, head_dim]  NHD,   [pages, 2, kv_heads, page_size, head_dim]  HND
    a pair of 4-D     [pages, page_size, kv_heads, head_dim]     NHD,   [pages, kv_heads, page_size, head_dim]     HND

of any strides. `unpack_paged_cache` turns all four into two views whose dimensions are always `[pages, page_size,
kv_heads, head_dim]`. The layout remains in their strides, and kernels need nothing else.

A page table is FlashInfer's CSR triple, int32: request i owns the pages `indices[indptr[i] : indptr[i + 1]]`, all full
but its last, which holds `last_page_len[i]` tokens. A request without pages has length 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_kernels.shared.numbers import require_integer

KV_LAYOUTS = ("NHD", "HND")
KEY_AND_VALUE = 2

# Accepted caches.
PagedKVCache = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Keys and values as views `[pages, page_size, kv_heads, head_dim]`, in this order whatever the layout.

    The head dim of the values may differ from that of the keys.
    """

    k: torch.Tensor  # [pages, page_size, kv_heads, head_dim]
    v: torch.Tensor  # [pages, page_size, kv_heads, v_head_dim], dtype and device of k

    @property
    def page_count(self) -> int:
        """Counts how many pages the pool has."""
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        """Counts how many tokens a page holds."""
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Counts how many KV heads there are."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """Counts how many elements a key of one head has."""
        return self.k.shape[3]

    @property
    def v_head_dim(self) -> int:
        """Counts how many elements a value of one head has."""
        return self.v.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype that keys and values have."""
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        """Returns the device that keys and values are on."""
        return self.k.device

    @property
    def k_strides(self) -> tuple[int, int, int, int]:
        """Counts how many elements lie between two pages, two tokens of a page, two heads, and two elements of a
        key."""
        page, token, head, element = self.k.stride()
        return page, token, head, element

    @property
    def v_strides(self) -> tuple[int, int, int, int]:
        """v_strides: as `k_strides`, for values."""
        page, token, head, element = self.v.stride()
        return page, token, head, element


def unpack_paged_cache(cache: PagedKVCache, kv_layout: str = "NHD") -> PagedCache:
    """Gives keys and values as views with one order of dimensions.

    Args:
        cache: a 5-D tensor or a pair of 4-D tensors, see the top of the file; any dtype, any strides.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError: unknown `kv_layout`; `cache` has other shapes, or its two tensors differ in dtype or device.
    """
    check_kv_layout(kv_layout)
    if isinstance(cache, torch.Tensor):
        if cache.dim() != 5 or cache.shape[1] != KEY_AND_VALUE:
            raise ValueError(f"cache must be [pages, 2, ...] of 5 dimensions, not {tuple(cache.shape)}")
        k, v = cache.unbind(1)
    else:
        if len(cache) != KEY_AND_VALUE or any(part.dim() != 4 for part in cache):
            raise ValueError(f"cache must be a 5-D tensor or a pair of 4-D ones, not {[tuple(x.shape) for x in cache]}")
        k, v = cache
        if k.dtype != v.dtype or k.device != v.device:
            raise ValueError(f"cache: keys are {k.dtype} on {k.device}, values {v.dtype} on {v.device}")
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"cache: keys are {tuple(k.shape)}, values {tuple(v.shape)}")
    if kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if 0 in k.shape[1:] or 0 in v.shape[1:]:
        raise ValueError(f"cache has an empty dimension: keys {tuple(k.shape)}, values {tuple(v.shape)}")
    return PagedCache(k, v)


def check_kv_layout(kv_layout: str) -> None:
    """Refuses a layout that is neither "NHD" nor "HND".

    Raises:
        ValueError: it is another.
    """
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"kv_layout must be one of {KV_LAYOUTS}, not {kv_layout!r}")


def check_index_tensor(name: str, tensor: torch.Tensor, *, length: int | None = None) -> None:
    """Refuses tensors other than contiguous int32 vectors. Reads no value, so it never waits for a device.

    Raises:
        ValueError: dtype, shape or strides differ, or there are not `length` entries; names the argument `name`.
    """
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, not {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous vector, not {tuple(tensor.shape)}, strides {tensor.stride()}")
    if length is not None and tensor.shape[0] != length:
        raise ValueError(f"{name} must have {length} entries, not {tensor.shape[0]}")


def check_indptr(name: str, indptr: torch.Tensor, *, batch: int | None = None, total: int | None = None) -> None:
    """Refuses an indptr that does not rise from 0. Reads it, so on a GPU it waits: for `plan`, not for `run`.

    Args:
        name: of the argument, for the message.
        indptr: int32 `[batch + 1]`.
        batch: how many requests it must describe.
        total: its last entry must be this.

    Raises:
        ValueError: any of this does not hold; names the argument.
    """
    check_index_tensor(name, indptr, length=None if batch is None else batch + 1)
    if indptr.shape[0] == 0:
        raise ValueError(f"{name} must have batch + 1 entries, not 0")
    values = indptr.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, not {values[0]}")
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            raise ValueError(f"{name} must not fall: entry {index} is {values[index]} after {values[index - 1]}")
    if total is not None and values[-1] != total:
        raise ValueError(f"{name} must end at {total}, not {values[-1]}")


def check_page_table(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    page_count: int | None,
    page_size: int,
    prefix: str = "",
) -> None:
    """Refuses a page table that would read outside the pool. Reads it, so on a GPU it waits: for `plan`.

    Args:
        indptr: int32 `[batch + 1]`.
        indices: int32 `[indptr[batch]]` or longer; entries past `indptr[batch]` are not read.
        last_page_len: int32 `[batch]`, in `1..page_size`; not looked at for a request without pages.
        page_count: pages of the pool; None where it is not known yet, then only negative indices are refused.
        page_size: tokens per page.
        prefix: before the names in messages, such as "paged_kv_".

    Raises:
        ValueError: an entry is out of range, `indptr` falls, or a dtype, shape or device differs; names the argument.
    """
    require_integer("page_size", page_size, 1)
    check_indptr(f"{prefix}indptr", indptr)
    batch = indptr.shape[0] - 1
    check_index_tensor(f"{prefix}indices", indices)
    check_index_tensor(f"{prefix}last_page_len", last_page_len, length=batch)
    used = int(indptr[-1])
    if used > indices.shape[0]:
        raise ValueError(f"{prefix}indices has {indices.shape[0]} entries, {prefix}indptr ends at {used}")
    if used:
        low, high = (int(bound) for bound in torch.aminmax(indices[:used]))
        if low < 0 or (page_count is not None and high >= page_count):
            bounds = "at least 0" if page_count is None else f"in 0..{page_count - 1}"
            raise ValueError(f"{prefix}indices must be {bounds}, found {low if low < 0 else high}")
    for request, (length, pages) in enumerate(zip(last_page_len.tolist(), indptr.diff().tolist(), strict=True)):
        if pages and not 1 <= length <= page_size:
            raise ValueError(f"{prefix}last_page_len must be in 1..{page_size}, that of request {request} is {length}")


def kv_lengths(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Counts the tokens of each request, int32 `[batch]`, on the page table's device and without waiting for it.

    Three pages of 16 whose last holds 5 tokens are 2 * 16 + 5 = 37. No page means no token, whatever `last_page_len`
    is.
    """
    pages = indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).to(torch.int32)
