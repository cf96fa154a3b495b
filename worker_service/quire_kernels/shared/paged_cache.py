"""The forms of cache and page table that all kernels accept, and their checks.

A cache has one of FlashInfer's forms:

    one 5-D tensor    [pages, 2, page_size, kv_heads, head_dim]  NHD,   [pages, 2, kv_heads, page_size, head_dim]  HND
    a pair of 4-D     [pages, page_size, kv_heads, head_dim]     NHD,   [pages, kv_heads, page_size, head_dim]     HND

with any strides. `unpack_paged_cache` turns all four into two views with the dimensions `[pages, page_size, kv_heads,
head_dim]`. The layout remains in their strides, and kernels need nothing else.

A page table is FlashInfer's CSR triple, int32: request i owns the pages `indices[indptr[i] : indptr[i + 1]]`. The pages
are full except the last page, which holds `last_page_len[i]` tokens. A request without pages has length 0.
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
    """Keys and values as views `[pages, page_size, kv_heads, head_dim]`, in this order for every layout.

    Values may have another head dim than keys.
    """

    k: torch.Tensor  # [pages, page_size, kv_heads, head_dim]
    v: torch.Tensor  # [pages, page_size, kv_heads, v_head_dim], of k's dtype and device

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
        """Returns the strides of keys, in elements: page, token, head, dim."""
        page, token, head, element = self.k.stride()
        return page, token, head, element

    @property
    def v_strides(self) -> tuple[int, int, int, int]:
        """Returns the strides of values, in elements: page, token, head, dim."""
        page, token, head, element = self.v.stride()
        return page, token, head, element


def unpack_paged_cache(cache: PagedKVCache, kv_layout: str = "NHD") -> PagedCache:
    """Returns keys and values as views with one order of dimensions.

    Args:
        cache: a 5-D tensor or a pair of 4-D tensors, see the top of the file; any dtype, any strides.
        kv_layout: "NHD" or "HND".

    Raises:
        ValueError: `kv_layout` is unknown, `cache` has other shapes, or its two tensors differ in dtype or device.
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
            raise ValueError(f"cache: keys are {k.dtype} on {k.device}, but values are {v.dtype} on {v.device}")
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"cache: keys are {tuple(k.shape)}, but values are {tuple(v.shape)}")
    if kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if 0 in k.shape[1:] or 0 in v.shape[1:]:
        raise ValueError(f"cache has an empty dimension: keys {tuple(k.shape)}, values {tuple(v.shape)}")
    return PagedCache(k, v)


def check_kv_layout(kv_layout: str) -> None:
    """Refuses a layout that is neither "NHD" nor "HND".

    Raises:
        ValueError: the layout is another one.
    """
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"kv_layout must be one of {KV_LAYOUTS}, not {kv_layout!r}")


def check_index_tensor(name: str, tensor: torch.Tensor, *, length: int | None = None) -> None:
    """Refuses tensors other than contiguous int32 vectors. Reads no values, so it never waits for a device.

    Raises:
        ValueError: dtype, shape or strides differ, or there are not `length` entries. The message names the argument.
    """
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, not {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous vector, not {tuple(tensor.shape)}, strides {tensor.stride()}")
    if length is not None and tensor.shape[0] != length:
        raise ValueError(f"{name} must have {length} entries, not {tensor.shape[0]}")


def check_indptr(name: str, indptr: torch.Tensor, *, batch: int | None = None, total: int | None = None) -> None:
    """Refuses an indptr that does not start at 0 and rise.

    Reads the tensor, so on a GPU the host waits: call it in `plan`, not in `run`.

    Args:
        name: the argument's name, for the message.
        indptr: int32 `[batch + 1]`.
        batch: the required number of requests.
        total: the required last entry.

    Raises:
        ValueError: one of these conditions does not hold; the message names the argument.
    """
    check_index_tensor(name, indptr, length=None if batch is None else batch + 1)
    if indptr.shape[0] == 0:
        raise ValueError(f"{name} must have batch + 1 entries, not 0")
    values = indptr.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, not {values[0]}")
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            raise ValueError(f"{name} must not decrease: entry {index} is {values[index]} after {values[index - 1]}")
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
    """Refuses a page table that would make a kernel read outside the pool.

    Reads the tensors, so on a GPU the host waits: call it in `plan`, not in `run`.

    Args:
        indptr: int32 `[batch + 1]`.
        indices: int32 `[indptr[batch]]` or longer; entries past `indptr[batch]` are not read.
        last_page_len: int32 `[batch]`, in `1..page_size`; ignored for a request without pages.
        page_count: pages of the pool. None if it is not known yet: then only negative indices are refused.
        page_size: tokens per page.
        prefix: prefix of the names in messages, such as "paged_kv_".

    Raises:
        ValueError: an entry is out of range, `indptr` falls, or a dtype, shape or device differs. The message names the
            argument.
    """
    require_integer("page_size", page_size, 1)
    check_indptr(f"{prefix}indptr", indptr)
    batch = indptr.shape[0] - 1
    check_index_tensor(f"{prefix}indices", indices)
    check_index_tensor(f"{prefix}last_page_len", last_page_len, length=batch)
    used = int(indptr[-1])
    if used > indices.shape[0]:
        raise ValueError(f"{prefix}indices has {indices.shape[0]} entries, but {prefix}indptr ends at {used}")
    if used:
        low, high = (int(bound) for bound in torch.aminmax(indices[:used]))
        if low < 0 or (page_count is not None and high >= page_count):
            bounds = "at least 0" if page_count is None else f"in 0..{page_count - 1}"
            raise ValueError(f"{prefix}indices must be {bounds}, not {low if low < 0 else high}")
    for request, (length, pages) in enumerate(zip(last_page_len.tolist(), indptr.diff().tolist(), strict=True)):
        if pages and not 1 <= length <= page_size:
            raise ValueError(f"{prefix}last_page_len of request {request} must be in 1..{page_size}, not {length}")


def kv_lengths(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Computes the tokens of each request, int32 `[batch]`, on the page table's device and without waiting for it.

    Example: three pages of 16 with 5 tokens in the last one hold 2 * 16 + 5 = 37 tokens. A request without pages has 0
    tokens, whatever its `last_page_len`.
    """
    pages = indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).to(torch.int32)
