"""Views of caches in all layouts, and refusals of page tables."""

from __future__ import annotations

import pytest
import torch
from quire_kernels.shared.options import AttentionOptions, scale_per_head
from quire_kernels.shared.paged_cache import (
    PagedKVCache,
    check_indptr,
    check_page_table,
    kv_lengths,
    unpack_paged_cache,
)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_all_layouts_give_the_same_views(layout: str, pair: bool) -> None:
    cache = torch.arange(3 * 2 * 4 * 5 * 16).view(3, 2, 4, 5, 16)  # [pages, 2, page_size, kv_heads, head_dim]
    given = cache if layout == "NHD" else cache.transpose(2, 3).contiguous()
    unpacked = unpack_paged_cache((given[:, 0], given[:, 1]) if pair else given, layout)
    assert torch.equal(unpacked.k, cache[:, 0])
    assert torch.equal(unpacked.v, cache[:, 1])
    assert unpacked.k.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    sizes = unpacked.page_count, unpacked.page_size, unpacked.num_kv_heads, unpacked.head_dim, unpacked.v_head_dim
    assert sizes == (3, 4, 5, 16, 16)
    assert (unpacked.k_strides, unpacked.v_strides) == (unpacked.k.stride(), unpacked.v.stride())
    assert (unpacked.dtype, unpacked.device) == (cache.dtype, cache.device)


@pytest.mark.parametrize(
    ("cache", "layout", "message"),
    [
        (torch.zeros(3, 2, 4, 5, 16), "DHN", "^kv_layout"),
        (torch.zeros(3, 4, 5, 16), "NHD", "^cache must be"),
        (torch.zeros(3, 3, 4, 5, 16), "NHD", "^cache must be"),
        ((torch.zeros(3, 4, 5, 16),), "NHD", "^cache must be"),
        ((torch.zeros(3, 4, 5, 16), torch.zeros(3, 4, 16)), "NHD", "^cache must be"),
        ((torch.zeros(3, 4, 5, 16), torch.zeros(3, 4, 6, 16)), "NHD", "^cache: keys are"),
        ((torch.zeros(3, 4, 5, 16), torch.zeros(3, 4, 5, 16).half()), "NHD", "^cache: keys are"),
        (torch.zeros(3, 2, 4, 0, 16), "NHD", "^cache has an empty"),
    ],
)
def test_other_caches_are_refused(cache: PagedKVCache, layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_paged_cache(cache, layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": int32(1, 2, 3)}, "^kv_indptr must start at 0"),
        ({"indptr": int32(0, 3, 2)}, "^kv_indptr must not decrease"),
        ({"indptr": int32(0, 2, 4)}, "^kv_indices has 3 entries"),
        ({"indptr": int32()}, "^kv_indptr must have"),
        ({"indptr": torch.tensor([0, 2, 3])}, "^kv_indptr must be int32"),
        ({"indptr": int32(0, 9, 2, 9, 3)[::2]}, "^kv_indptr must be a contiguous"),
        ({"indices": int32(0, 7, 1)}, r"^kv_indices must be in 0..6, not 7"),
        ({"indices": int32(0, -1, 1)}, r"^kv_indices must be in 0..6, not -1"),
        ({"indices": torch.zeros(3)}, "^kv_indices must be int32"),
        ({"indices": int32(0, 1, 2).view(1, 3)}, "^kv_indices must be a contiguous"),
        ({"last_page_len": int32(4, 0)}, r"^kv_last_page_len of request 1 must be in 1..4, not 0"),
        ({"last_page_len": int32(5, 1)}, r"^kv_last_page_len of request 0 must be in 1..4, not 5"),
        ({"last_page_len": int32(-1, 1)}, "^kv_last_page_len of request 0 must be in"),
        ({"last_page_len": int32(1)}, "^kv_last_page_len must have 2"),
        ({"page_size": 0}, "^page_size"),
    ],
)
def test_invalid_page_tables_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    table = {"indptr": int32(0, 2, 3), "indices": int32(6, 0, 1), "last_page_len": int32(4, 1), "page_size": 4}
    check_page_table(**table, page_count=7, prefix="kv_")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        check_page_table(**{**table, **changes}, page_count=7, prefix="kv_")  # type: ignore[arg-type]


def test_a_negative_page_is_refused_while_the_pool_is_not_known() -> None:
    check_page_table(int32(0, 1), int32(99), int32(4), page_count=None, page_size=4)
    with pytest.raises(ValueError, match=r"^indices must be at least 0, not -1"):
        check_page_table(int32(0, 2), int32(99, -1), int32(4), page_count=None, page_size=4)


def test_what_is_not_used_is_not_looked_at() -> None:
    table = int32(0, 0, 1), int32(3, 99, -5), int32(77, 2)
    check_page_table(*table, page_count=4, page_size=4)
    assert kv_lengths(table[0], table[2], 4).tolist() == [0, 2]


def test_an_indptr_must_fit_its_batch_and_total() -> None:
    check_indptr("qo_indptr", int32(0, 2, 2), batch=2, total=2)
    with pytest.raises(ValueError, match=r"^qo_indptr must have 2"):
        check_indptr("qo_indptr", int32(0, 2, 2), batch=1)
    with pytest.raises(ValueError, match=r"^qo_indptr must end at 3"):
        check_indptr("qo_indptr", int32(0, 2, 2), total=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm_scale": float("nan")}, "^sm_scale"),
        ({"logits_soft_cap": -1.0}, "^logits_soft_cap"),
        ({"window_left": -2}, "^window_left"),
        ({"sinks": torch.zeros(4).half()}, "^sinks"),
        ({"alibi_slopes": torch.zeros(2, 2)}, "^alibi_slopes"),
        ({"k_scale": torch.zeros(4)[::2]}, "^k_scale"),
    ],
)
def test_invalid_options_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionOptions(**{"sm_scale": 1.0, **changes})  # type: ignore[arg-type]


def test_a_scale_is_a_number_or_one_per_head() -> None:
    device = torch.device("cpu")
    assert scale_per_head("k_scale", None, 3, device) is None
    for scale, expected in ((2.0, [2.0] * 3), (torch.tensor(2.0), [2.0] * 3), (torch.arange(3), [0.0, 1.0, 2.0])):
        found = scale_per_head("k_scale", scale, 3, device)
        assert found is not None
        assert found.tolist() == expected
    with pytest.raises(ValueError, match=r"^k_scale must have 1 or 3"):
        scale_per_head("k_scale", torch.zeros(2), 3, device)
