from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quire.planning import LayerSpec
from quire.types import GroupKind
from quire_worker.cache import NAN_BYTE, CacheSpec, KVCache, PageSpec, rows_of

SPEC = CacheSpec.full_attention(layer_count=3, kv_head_count=2, head_dim=4, block_size=8, dtype=torch.float32)


def layer(index: int, *, window: int = 0, heads: int = 2, shared_with: int | None = None) -> LayerSpec:
    kind = GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION
    return LayerSpec(index, kind, heads, 4, element_bytes=4, window=window, shared_with=shared_with)


def of(*layers: LayerSpec) -> CacheSpec:
    return CacheSpec(layers, 8, torch.float32)


MIXED = {
    "full": SPEC,
    "two windowed to one full": of(*(layer(i, window=0 if i % 3 == 2 else 20) for i in range(6))),
    "groups that are not full": of(*(layer(i, window=0 if i % 3 == 2 else 20) for i in range(7))),
    "layers of half the size": of(layer(0, window=20), layer(1, window=20), layer(2, heads=1), layer(3, heads=1)),
    "a layer that reads another's": of(layer(0), layer(1, window=20), layer(2, shared_with=0)),
}


def test_a_block_takes_the_bytes_of_its_tensors() -> None:
    cache = KVCache(SPEC, 5)
    assert SPEC.bytes_per_block == 2 * 3 * 8 * 2 * 4 * 4
    assert cache.pool_bytes == 5 * SPEC.bytes_per_block == sum(bound.pages.nbytes for bound in cache.layers.values())
    assert [tuple(bound.pages.shape) for bound in cache.layers.values()] == [(5, 2, 8, 2, 4)] * 3
    assert all(bound.pages.is_contiguous() for bound in cache.layers.values())


@pytest.mark.parametrize("name", MIXED)
def test_layers_of_one_group_never_share_a_byte_of_a_page_and_those_of_several_stay_inside_it(name: str) -> None:
    cache = KVCache(MIXED[name], 4)
    for group in range(len(cache.spec.groups)):
        for buffer in cache.buffers:
            buffer.zero_()
        own = [bound for bound in cache.layers.values() if cache.kinds[bound.kind][0] == group and bound.is_written]
        for number, bound in enumerate(own, start=1):
            bound.pages[2].fill_(number)
        for number, bound in enumerate(own, start=1):
            assert (bound.pages[2] == number).all()
        assert all(not buffer[[0, 1, 3]].any() for buffer in cache.buffers), "another page was touched"
        assert sum(int(buffer[2].view(torch.float32).count_nonzero()) for buffer in cache.buffers) == sum(
            bound.pages[2].numel() for bound in own
        )


@pytest.mark.parametrize("name", MIXED)
def test_the_planner_s_bytes_are_those_of_the_tensors(name: str) -> None:
    cache = KVCache(MIXED[name], 3)
    assert cache.pool_bytes == 3 * cache.spec.plan.page_bytes
    assert len(cache.buffers) == cache.spec.plan.buffer_count
    assert sum(len(group.layers) for group in cache.spec.plan.groups) == sum(
        bound.is_written for bound in cache.layers.values()
    )


def test_a_layer_that_reads_another_s_keys_has_its_pages_and_writes_none() -> None:
    cache = KVCache(MIXED["a layer that reads another's"], 3)
    assert cache.layers[2].pages.data_ptr() == cache.layers[0].pages.data_ptr()
    assert [cache.layers[index].is_written for index in range(3)] == [True, True, False]
    assert [cache.layers[index].window for index in range(3)] == [None, 20, None]


@pytest.mark.parametrize("name", MIXED)
def test_rows_are_the_keys_and_values_of_a_layer_wherever_its_pages_lie(name: str) -> None:
    cache = KVCache(MIXED[name], 3)
    for bound in cache.layers.values():
        spec = cache.kinds[bound.kind][1]
        rows = rows_of(bound.pages, spec.row_elements)
        for page, half, token in itertools.product(range(3), range(2), range(8)):
            row = rows[page * spec.page_stride // spec.row_elements + half * 8 + token]
            assert row.data_ptr() == bound.pages[page, half, token].data_ptr()


def test_pages_of_one_byte_over_and_over_are_nan_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.full((8,), NAN_BYTE, dtype=torch.uint8).view(dtype).isnan().all()


def test_half_precision_takes_half_the_bytes() -> None:
    half = CacheSpec.full_attention(layer_count=3, kv_head_count=2, head_dim=4, block_size=8, dtype=torch.bfloat16)
    assert half.bytes_per_block * 2 == SPEC.bytes_per_block


def test_a_budget_holds_whole_blocks_only() -> None:
    assert SPEC.block_count_for(10 * SPEC.bytes_per_block) == 10
    assert SPEC.block_count_for(11 * SPEC.bytes_per_block - 1) == 10
    with pytest.raises(ValueError, match="no block fits"):
        SPEC.block_count_for(SPEC.bytes_per_block - 1)


@pytest.mark.parametrize("name", ["kv_head_count", "head_dim", "block_size"])
def test_pages_without_something_in_every_dimension_are_refused(name: str) -> None:
    sizes = {"kv_head_count": 1, "head_dim": 1, "block_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=name):
        PageSpec(**sizes, dtype=torch.float32)


def test_layers_whose_pages_do_not_fit_side_by_side_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple"):
        of(layer(0, heads=5), layer(1, window=20, heads=3))


def test_the_longest_sequence_fills_full_attention_and_a_window_only_as_far_as_it_reads() -> None:
    assert KVCache(SPEC, 5).sequence_tokens_max(100) == 5 * 8
    windowed = replace(of(layer(0, window=20)), token_count_max=1_000)
    # A pass computes 16 tokens, up to 8 more tokens fill its last block, and the window reads 19 earlier tokens. The 43
    # tokens can span 7 blocks.
    assert KVCache(windowed, 7).sequence_tokens_max(16) == 1_000
    assert KVCache(windowed, 6).sequence_tokens_max(16) == 6 * 8
    mixed = replace(of(layer(0), layer(1, window=20)), token_count_max=1_000)
    assert KVCache(mixed, 27).sequence_tokens_max(16) == 20 * 8
    assert KVCache(mixed, 1).sequence_tokens_max(16) == 0


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="block_count"):
        KVCache(SPEC, 0)


def test_pages_take_memory_once_they_are_written_and_not_before() -> None:
    def resident_kib() -> int:
        return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

    before = resident_kib()
    cache = KVCache(CacheSpec.full_attention(4, 2, 64, 16, torch.float32), 4 << 10)
    assert cache.pool_bytes == 256 << 20
    assert resident_kib() - before < 10 << 10
    pages = cache.layers[3].pages
    assert pages.data_ptr() % 4096 == 0
    pages[-1] = 1.5
    assert (pages[-1].min(), pages[-2].max()) == (1.5, 0)


def test_the_layout_names_everything_that_changes_the_bytes_of_a_page() -> None:
    layers = SPEC.layers
    others = [
        replace(SPEC, layers=layers[:2]),
        replace(SPEC, layers=tuple(replace(each, kv_head_count=1) for each in layers)),
        replace(SPEC, layers=tuple(replace(each, head_dim=8) for each in layers)),
        replace(SPEC, layers=(*layers[:2], layer(2, window=20))),
        replace(SPEC, layers=(*layers[:2], layer(2, window=24))),
        replace(SPEC, layers=(*layers[:2], layer(3))),
        replace(SPEC, block_size=16),
        CacheSpec.full_attention(3, 2, 4, 8, torch.float16),
    ]
    assert len({spec.layout for spec in [SPEC, *others]}) == 9
