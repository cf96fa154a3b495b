"""Batches to append, and comparisons of both append kernels with their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from quire_kernels.shared.fp8 import E4M3, E5M2

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, E4M3, E5M2)


@dataclass(frozen=True, slots=True, eq=False)
class AppendCase:
    """Three requests of 5, 0 and 3 tokens, and some of their tokens to append; the pool also has unused pages."""

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
        """Returns the page table, in the order of the arguments."""
        return self.kv_indices, self.kv_indptr, self.kv_last_page_len


PAGE_COUNT = 20


def make_case(
    device: torch.device, *, page_size: int = 4, heads: int = 3, head_dim: int = 64, dtype: torch.dtype = torch.float32
) -> AppendCase:
    """Makes a batch of seven tokens; two of them are padding."""
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
    """Makes a 5-D cache with NaN in every slot."""
    heads, head_dim = case.key.shape[1:]
    shape = (case.page_size, heads, head_dim) if kv_layout == "NHD" else (heads, case.page_size, head_dim)
    nan = torch.full((PAGE_COUNT, 2, *shape), float("nan"), dtype=torch.float32, device=case.key.device)
    return nan.to(dtype)


def bits(cache: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a cache for comparisons, because NaN is not equal to itself."""
    return cache.contiguous().view(torch.uint8)


def append_both_ways(
    append: Callable[..., None], reference: Callable[..., None], case: AppendCase, cache: torch.Tensor, *rest: object
) -> bool:
    """Returns whether kernel and reference leave the same bits in the whole cache."""
    expected = cache.clone()
    tokens = (case.key, case.value, case.batch_indices, case.positions)
    append(*tokens, cache, *case.table, *rest)
    reference(*tokens, expected, *case.table[:2], *rest)
    return torch.equal(bits(cache), bits(expected))


def append_matches(module: ModuleType, device: torch.device, *, fp8: torch.dtype | None = None) -> bool:
    """Returns whether a module's kernel equals its reference, with a float32 or fp8 cache.

    Tests call this with the real module and with faulty ones.
    """
    case = make_case(device, head_dim=80, heads=5)
    scales = (torch.tensor([0.5, 2.0, 1.0, 0.001, 3.0], device=device), 0.25) if fp8 else ()
    cache = empty_cache(case, fp8 or torch.float32)
    return append_both_ways(module.append_paged_kv_cache, module.append_reference, case, cache, "NHD", *scales)


def guarded_cache(case: AppendCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a cache of NaN, and the same memory with one unused page on each side, where stray writes would show."""
    whole = empty_cache(case, torch.float32)
    return whole[1:-1], whole


def unchecked_append_matches(module: ModuleType, device: torch.device) -> bool:
    """Returns whether a token with a position past its request's last page is not written.

    Tests call this with the real module and with faulty ones.
    """
    case = make_case(device, heads=1)
    cache, expected = empty_cache(case, torch.float32), empty_cache(case, torch.float32)
    positions = case.positions.clone()
    # This position is one page past request 0's last page. There the table has the first page of request 2, which has
    # free slots.
    positions[0] = 3 * case.page_size - 1
    tokens = (case.key, case.value, case.batch_indices)
    module.append_paged_kv_cache(*tokens, positions, cache, *case.table, check=False)
    positions[0] = -1
    module.append_reference(*tokens, positions, expected, *case.table[:2])
    return torch.equal(bits(cache), bits(expected))


def append_refuses(module: ModuleType, device: torch.device) -> bool:
    """Returns whether positions just past a request's last token, and two tokens in one slot, are refused.

    The last token's position must be accepted.
    """
    case = make_case(device, heads=1)

    def is_refused(request: int, position: int) -> bool:
        cache, positions = empty_cache(case, torch.float32), case.positions.clone()
        batch_indices = case.batch_indices.clone()
        batch_indices[0], positions[0] = request, position
        try:
            module.append_paged_kv_cache(case.key, case.value, batch_indices, positions, cache, *case.table)
        except ValueError:
            return True
        return False

    return not is_refused(0, 4) and all(is_refused(*token) for token in ((0, 5), (0, 3), (1, 0), (3, 0)))


def slots_match(module: ModuleType, device: torch.device) -> bool:
    """Returns whether slots at both ends of a pool, and outside it, are written as by the reference.

    Tests call this with the real module and with faulty ones.
    """
    case = make_case(device, heads=5, head_dim=80)
    (cache, whole), (expected, all_expected) = guarded_cache(case), guarded_cache(case)
    slot_count = cache.shape[0] * case.page_size
    slots = [slot_count, -1, 0, slot_count - 1, 17, -case.page_size, 6]
    module.append_slots(case.key, case.value, torch.tensor(slots, device=device), cache, check=False)
    inside = torch.tensor([slot if 0 <= slot < slot_count else -1 for slot in slots], device=device)
    module.append_slots_reference(case.key, case.value, inside, expected)
    return torch.equal(bits(whole), bits(all_expected))


def slots_refuse(module: ModuleType, device: torch.device) -> bool:
    """Returns whether a slot past the pool and a repeated slot are refused, but not the last slot and padding."""
    case = make_case(device, heads=1)

    def is_refused(*slots: int) -> bool:
        mapping = torch.full_like(case.slot_mapping, -1)
        mapping[: len(slots)] = torch.tensor(slots)
        try:
            module.append_slots(case.key, case.value, mapping, empty_cache(case, torch.float32))
        except ValueError:
            return True
        return False

    slot_count = PAGE_COUNT * case.page_size
    return not is_refused(slot_count - 1, -1, 0) and is_refused(slot_count) and is_refused(5, 5)


def slots_quantise(module: ModuleType, device: torch.device) -> bool:
    """Returns whether an fp8 cache with a scale per head gets the reference's bits.

    Tests call this with the real module and with faulty ones.
    """
    case = make_case(device, heads=5, head_dim=80)
    scales = (torch.tensor([0.5, 2.0, 1.0, 0.001, 3.0], device=device), 0.25)
    cache, expected = empty_cache(case, E4M3, "HND"), empty_cache(case, E4M3, "HND")
    module.append_slots(case.key, case.value, case.slot_mapping, cache, "HND", *scales)
    module.append_slots_reference(case.key, case.value, case.slot_mapping, expected, "HND", *scales)
    return torch.equal(bits(cache), bits(expected))
