"""Appending by slot, as the worker does, compared with plain torch and with appending by page table."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.ops import append_slots as real
from quire_kernels.ops.append_paged_kv_cache import append_paged_kv_cache
from quire_kernels.ops.append_slots import append_slots, append_slots_reference
from quire_kernels.shared.fp8 import E4M3, is_fp8

from tests.worker.kernels.append_cases import (
    CACHE_DTYPES,
    bits,
    empty_cache,
    make_case,
    slots_match,
    slots_quantise,
    slots_refuse,
)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_slots_and_page_tables_append_alike(dtype: torch.dtype, kv_layout: str, device: torch.device) -> None:
    case = make_case(device, heads=5, head_dim=80)
    source = torch.bfloat16 if is_fp8(dtype) else dtype
    key, value = case.key.to(source), case.value.to(source)
    scales = (0.5, torch.tensor([1.0, 2.0, 3.0, 0.1, 0.2], device=device)) if is_fp8(dtype) else (None, None)
    caches = [empty_cache(case, dtype, kv_layout) for _ in range(3)]
    append_slots(key, value, case.slot_mapping, caches[0], kv_layout, *scales)
    append_slots_reference(key, value, case.slot_mapping, caches[1], kv_layout, *scales)
    append_paged_kv_cache(key, value, case.batch_indices, case.positions, caches[2], *case.table, kv_layout, *scales)
    assert torch.equal(bits(caches[0]), bits(caches[1]))
    assert torch.equal(bits(caches[0]), bits(caches[2]))


@pytest.mark.parametrize("page_size", [1, 16])
def test_any_page_size(page_size: int, device: torch.device) -> None:
    case = make_case(device, page_size=page_size, heads=1, dtype=torch.float16)
    cache, expected = empty_cache(case, torch.float16), empty_cache(case, torch.float16)
    append_slots(case.key, case.value, case.slot_mapping, cache)
    append_slots_reference(case.key, case.value, case.slot_mapping, expected)
    assert torch.equal(bits(cache), bits(expected))


def test_a_batch_of_padding_writes_nothing(device: torch.device) -> None:
    case = make_case(device)
    cache = empty_cache(case, torch.float32)
    append_slots(case.key, case.value, torch.full_like(case.slot_mapping, -1), cache)
    append_slots(case.key[:0], case.value[:0], case.slot_mapping[:0], cache)
    assert cache.isnan().all()


def test_slots_outside_the_pool_are_refused_or_unchecked_skipped(device: torch.device) -> None:
    case = make_case(device)
    cache = empty_cache(case, torch.float32)
    outside = torch.full_like(case.slot_mapping, 80)
    with pytest.raises(ValueError, match="slot_mapping must be below 80, the number of slots, not 80"):
        append_slots(case.key, case.value, outside, cache)
    append_slots(case.key, case.value, outside, cache, check=False)
    assert cache.isnan().all()


def test_slot_mappings_that_do_not_fit_are_refused(device: torch.device) -> None:
    case = make_case(device)
    cache = empty_cache(case, torch.float32)
    for slots in (case.slot_mapping.to(torch.int32), case.slot_mapping[:-1], torch.zeros_like(case.slot_mapping)):
        with pytest.raises(ValueError, match="slot_mapping"):
            append_slots(case.key, case.value, slots, cache)
    assert cache.isnan().all()


def test_the_ends_of_the_pool_are_written_and_what_lies_around_it_is_not(device: torch.device) -> None:
    assert slots_match(real, device)
    assert slots_quantise(real, device)


def test_the_last_slot_is_taken_and_the_next_one_refused(device: torch.device) -> None:
    assert slots_refuse(real, device)


def test_slots_further_than_an_int32_reaches_are_written(device: torch.device) -> None:
    page_stride = 2**31 + 64
    # On a CPU, the system allocates only the memory that is written.
    memory = torch.empty(page_stride + 4096, dtype=torch.uint8, device=device)
    cache = memory.as_strided((2, 2, 4, 1, 64), (page_stride, 256, 64, 64, 1)).view(E4M3)
    case = make_case(device, heads=1)
    append_slots(case.key[:1], case.value[:1], torch.tensor([7], device=device), cache)
    assert torch.equal(bits(cache[1, 0, 3]), bits(case.key[0].to(E4M3)))
    assert torch.equal(bits(cache[1, 1, 3]), bits(case.value[0].to(E4M3)))
