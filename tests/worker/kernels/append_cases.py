"""Batches to append, and what both ways to append are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from quire_worker.kernels.e4m3 import E4M3

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, E4M3)


@dataclass(frozen=True, slots=True, eq=False)
class AppendCase:
    """Three requests of 5, 0 and 3 tokens and some of their tokens; pages of every other number are nobody's."""

    page_size: int
    key: torch.Tensor
    value: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def table(self) -> tuple[torch.Tensor, ...]:
        """The page table, in the order of the arguments."""
        return self.kv_indices, self.kv_indptr, self.kv_last_page_len


PAGE_COUNT = 20


def make_case(
    device: torch.device, *, page_size: int = 4, heads: int = 3, head_dim: int = 64, dtype: torch.dtype = torch.float32
) -> AppendCase:
    """Seven tokens, two of which are padding."""
    lengths = (5, 0, 3)
    page_counts = [-(-length // page_size) for length in lengths]
    indices = (2 * torch.randperm(PAGE_COUNT // 2)[: sum(page_counts)] + 1).to(torch.int32)
    indptr = torch.tensor([0, *page_counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    last = [
        length - (pages - 1) * page_size if pages else 0 for length, pages in zip(lengths, page_counts, strict=True)
    ]
    batch_indices = torch.tensor([0, 0, -1, 2, 2, 0, 2], dtype=torch.int32)
    positions = torch.tensor([4, 3, 0, 0, 1, -1, 2], dtype=torch.int32)
    slots = [
        -1
        if request < 0 or position < 0
        else int(indices[indptr[request] + position // page_size]) * page_size + position % page_size
        for request, position in zip(batch_indices.tolist(), positions.tolist(), strict=True)
    ]
    return AppendCase(
        page_size=page_size,
        key=torch.randn(7, heads, head_dim).to(dtype).to(device),
        value=torch.randn(7, heads, head_dim).to(dtype).to(device),
        batch_indices=batch_indices.to(device),
        positions=positions.to(device),
        kv_indices=indices.to(device),
        kv_indptr=indptr.to(device),
        kv_last_page_len=torch.tensor(last, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
    )


def empty_cache(case: AppendCase, dtype: torch.dtype, kv_layout: str = "NHD") -> torch.Tensor:
    """A 5-D cache with NaN in every slot."""
    heads, head_dim = case.key.shape[1:]
    shape = (case.page_size, heads, head_dim) if kv_layout == "NHD" else (heads, case.page_size, head_dim)
    nan = torch.full((PAGE_COUNT, 2, *shape), float("nan"), dtype=torch.float32, device=case.key.device)
    return nan.to(dtype)


def bits(cache: torch.Tensor) -> torch.Tensor:
    """To compare by: NaN is not equal to itself."""
    return cache.contiguous().view(torch.uint8)


def append_both_ways(
    append: Callable[..., None], reference: Callable[..., None], case: AppendCase, cache: torch.Tensor, *rest: object
) -> bool:
    """Whether kernel and reference leave the same bits in the whole cache."""
    expected = cache.clone()
    tokens = (case.key, case.value, case.batch_indices, case.positions)
    append(*tokens, cache, *case.table, *rest)
    reference(*tokens, expected, *case.table[:2], *rest)
    return torch.equal(bits(cache), bits(expected))


def append_matches(module: ModuleType, device: torch.device, *, fp8: bool) -> bool:
    """A comparison that covers a module's kernel: used on the real one and on faulty ones."""
    case = make_case(device, head_dim=80, heads=5)
    scales = (torch.tensor([0.5, 2.0, 1.0, 0.001, 3.0], device=device), 0.25) if fp8 else ()
    cache = empty_cache(case, E4M3 if fp8 else torch.float32)
    return append_both_ways(module.append_paged_kv_cache, module.append_reference, case, cache, "NHD", *scales)
