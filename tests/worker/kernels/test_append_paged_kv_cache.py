"""Appending by page table, compared with plain torch bit by bit over the whole cache."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.ops import append_paged_kv_cache as real
from quire_kernels.ops.append_paged_kv_cache import append_paged_kv_cache, append_reference
from quire_kernels.shared.fp8 import E4M3, E5M2, FP8_MAX

from tests.worker.kernels.append_cases import (
    CACHE_DTYPES,
    PAGE_COUNT,
    AppendCase,
    append_both_ways,
    append_refuses,
    bits,
    empty_cache,
    make_case,
    unchecked_append_matches,
)


def append(case: AppendCase, cache: object, **changed: object) -> None:
    arguments = {
        "append_key": case.key,
        "append_value": case.value,
        "batch_indices": case.batch_indices,
        "positions": case.positions,
        "paged_kv_cache": cache,
        "kv_indices": case.kv_indices,
        "kv_indptr": case.kv_indptr,
        "kv_last_page_len": case.kv_last_page_len,
    }
    append_paged_kv_cache(**(arguments | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_tokens_go_to_their_slots_and_nothing_else_changes(
    dtype: torch.dtype, kv_layout: str, device: torch.device
) -> None:
    case = make_case(device, dtype=dtype)
    assert append_both_ways(
        append_paged_kv_cache, append_reference, case, empty_cache(case, dtype, kv_layout), kv_layout
    )


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (5, 80), (7, 96), (2, 128), (33, 256)])
def test_any_page_size_head_count_and_head_dim(page_size: int, heads: int, head_dim: int, device: torch.device) -> None:
    case = make_case(device, page_size=page_size, heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    assert append_both_ways(append_paged_kv_cache, append_reference, case, empty_cache(case, torch.bfloat16))


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_fp8_cache_stores_what_torch_rounds_to_with_a_scale_per_head(
    source: torch.dtype, fp8: torch.dtype, device: torch.device
) -> None:
    case = make_case(device, dtype=source)
    # The first three keys saturate, and NaN stays NaN.
    case.key[0, 0, :4] = torch.tensor([5e4, -5e4, float("inf"), float("nan")])
    k_scale, v_scale = torch.tensor([0.5, 3.0, 0.013], device=device), torch.tensor([7.0], device=device)
    cache = empty_cache(case, fp8)
    assert append_both_ways(append_paged_kv_cache, append_reference, case, cache, "NHD", k_scale, v_scale)
    page, offset = divmod(int(case.slot_mapping[0]), case.page_size)
    stored = cache[page, 0, offset, 0, :4].to(torch.float32)
    assert stored[:3].tolist() == [FP8_MAX[fp8], -FP8_MAX[fp8], FP8_MAX[fp8]]
    assert stored[3].isnan()


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_an_fp8_cache_without_scales_stores_the_numbers_themselves(fp8: torch.dtype, device: torch.device) -> None:
    case = make_case(device)
    assert append_both_ways(append_paged_kv_cache, append_reference, case, empty_cache(case, fp8))


@pytest.mark.parametrize("source", [E4M3, torch.float8_e4m3fnuz, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [E5M2, torch.float8_e5m2fnuz, torch.uint8], ids=str)
def test_dtypes_between_which_nothing_converts_are_refused_with_what_would_do(
    dtype: torch.dtype, source: torch.dtype, device: torch.device
) -> None:
    case = make_case(device)
    cache = torch.zeros(PAGE_COUNT, 2, 4, 3, 64, dtype=torch.uint8, device=device).view(dtype)
    keys = case.key.to(source)
    message = (
        f"append_key is {source}, but the cache is {dtype}: .*cache float8_e4m3fn or float8_e5m2 and the keys float16"
    )
    with pytest.raises(ValueError, match=message):
        append(case, cache, append_key=keys, append_value=keys)
    if dtype != E5M2:
        with pytest.raises(ValueError, match=f"append_key is torch.float32, but the cache is {dtype}"):
            append(case, cache)


def test_a_pair_of_tensors_of_any_strides_is_a_cache(device: torch.device) -> None:
    case = make_case(device, dtype=torch.float16)
    whole = empty_cache(case, torch.float16)
    pages, _, page_size, heads, head_dim = whole.shape
    # Keys use every other page of a larger pool, with gaps between heads. Values have the head dim outermost in memory.
    keys = torch.zeros(2 * pages, page_size, heads, head_dim + 8, dtype=torch.float16, device=device)[::2, ..., :-8]
    values = torch.zeros(head_dim, pages, heads, page_size, dtype=torch.float16, device=device).permute(1, 3, 2, 0)
    append(case, (keys, values))
    expected = torch.zeros_like(whole)
    append(case, expected)
    assert torch.equal(keys, expected[:, 0])
    assert torch.equal(values, expected[:, 1])


def test_keys_and_values_may_have_any_strides_and_different_head_dims(device: torch.device) -> None:
    case = make_case(device, heads=4)
    key = torch.randn(4, 96, 7, device=device).permute(2, 0, 1)
    value = torch.randn(7, 8, 128, device=device)[:, ::2, ::2]
    caches = [torch.zeros(20, 4, 4, dim, device=device) for dim in (96, 64)]
    expected = [cache.clone() for cache in caches]
    append(case, caches, append_key=key, append_value=value)
    append_reference(key, value, case.batch_indices, case.positions, expected, case.kv_indices, case.kv_indptr)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


def test_pages_further_than_an_int32_reaches_are_written(device: torch.device) -> None:
    page_stride = 2**31 + 64
    # On a CPU, the system allocates only the memory that is written.
    memory = torch.empty(page_stride + 4096, dtype=torch.uint8, device=device)
    cache = memory.as_strided((2, 2, 4, 1, 64), (page_stride, 256, 64, 64, 1)).view(E4M3)
    case = make_case(device, heads=1)
    batch_indices = torch.tensor([0], dtype=torch.int32, device=device)
    append(
        case,
        cache,
        append_key=case.key[:1],
        append_value=case.value[:1],
        batch_indices=batch_indices,
        positions=batch_indices + 3,
        kv_indices=batch_indices + 1,
        kv_indptr=torch.tensor([0, 1], dtype=torch.int32, device=device),
        kv_last_page_len=batch_indices + 4,
    )
    assert torch.equal(bits(cache[1, 0, 3]), bits(case.key[0].to(E4M3)))
    assert torch.equal(bits(cache[1, 1, 3]), bits(case.value[0].to(E4M3)))


def test_the_last_token_of_a_request_is_taken_and_the_next_one_refused(device: torch.device) -> None:
    assert append_refuses(real, device)
    assert unchecked_append_matches(real, device)


def test_no_tokens_are_no_launch(device: torch.device) -> None:
    case = make_case(device)
    cache = empty_cache(case, torch.float32)
    nothing = case.batch_indices[:0]
    append(case, cache, append_key=case.key[:0], append_value=case.value[:0], batch_indices=nothing, positions=nothing)
    assert cache.isnan().all()


def changed(tensor: torch.Tensor, index: int, value: int) -> torch.Tensor:
    copy = tensor.clone()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("batch_indices", 0, 3),
        ("positions", 0, 5),
        ("positions", 1, 4),
        ("kv_indices", 1, 20),
        ("kv_indices", 1, -1),
        ("kv_indptr", 0, 1),
        ("kv_indptr", 1, 4),
        ("kv_last_page_len", 0, 0),
        ("kv_last_page_len", 2, 5),
    ],
)
def test_bad_indices_are_refused_by_name_before_anything_is_written(
    name: str, index: int, value: int, device: torch.device
) -> None:
    case = make_case(device)
    cache = empty_cache(case, torch.float32)
    with pytest.raises(ValueError, match=name):
        append(case, cache, **{name: changed(getattr(case, name), index, value)})
    assert cache.isnan().all()


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [("batch_indices", 0, 3), ("positions", 0, 8), ("kv_indices", 1, 20), ("kv_indices", 1, -1)],
)
def test_unchecked_bad_indices_lose_their_token_and_harm_no_other(
    name: str, index: int, value: int, device: torch.device
) -> None:
    case = make_case(device)
    cache, expected = empty_cache(case, torch.float32), empty_cache(case, torch.float32)
    append(case, cache, check=False, **{name: changed(getattr(case, name), index, value)})
    # Entry 1 of kv_indices is the second page of request 0. Only token 0 is on that page.
    append(case, expected, batch_indices=changed(case.batch_indices, 0, -1))
    assert torch.equal(bits(cache), bits(expected))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("append_key", lambda tensor: tensor[:, :2]),
        ("append_key", lambda tensor: tensor.to(torch.float16)),
        ("append_value", lambda tensor: tensor[:-1]),
        ("batch_indices", lambda tensor: tensor.to(torch.int64)),
        ("positions", lambda tensor: tensor[:-1]),
        ("kv_indptr", lambda tensor: tensor.reshape(1, -1)),
        ("kv_last_page_len", lambda tensor: tensor[:-1]),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused_by_name(name: str, change: object, device: torch.device) -> None:
    case = make_case(device)
    given = {"append_key": case.key, "append_value": case.value}.get(name)
    tensor = getattr(case, name) if given is None else given
    with pytest.raises(ValueError, match=name):
        append(case, empty_cache(case, torch.float32), **{name: change(tensor)})  # type: ignore[operator]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), torch.ones(2), torch.ones(3, dtype=torch.float64)], ids=str)
def test_scales_that_do_not_fit_are_refused_by_name(scale: object, device: torch.device) -> None:
    case = make_case(device)
    if isinstance(scale, torch.Tensor):
        scale = scale.to(device)
    with pytest.raises(ValueError, match="v_scale"):
        append(case, empty_cache(case, E4M3), v_scale=scale)


def test_a_scale_for_a_cache_that_is_not_quantised_is_refused(device: torch.device) -> None:
    case = make_case(device)
    with pytest.raises(ValueError, match="k_scale"):
        append(case, empty_cache(case, torch.float32), k_scale=2.0)
    with pytest.raises(ValueError, match="kv_layout"):
        append(case, empty_cache(case, torch.float32), kv_layout="DNH")
