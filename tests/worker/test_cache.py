from __future__ import annotations

from typing import Any

import pytest
import torch
from quire_worker.cache import CacheSpec, KVCache

SPEC = CacheSpec(layer_count=3, kv_head_count=2, head_dim=4, block_size=8, dtype=torch.float32)


def test_a_block_takes_the_bytes_of_its_tensors() -> None:
    cache = KVCache(SPEC, 5)
    assert SPEC.bytes_per_block == 2 * 3 * 8 * 2 * 4 * 4
    assert cache.pool_bytes == sum(pages.nbytes for pages in cache.layers)
    assert [tuple(pages.shape) for pages in cache.layers] == [(5, 2, 8, 2, 4)] * 3


def test_half_precision_takes_half_the_bytes() -> None:
    half = CacheSpec(layer_count=3, kv_head_count=2, head_dim=4, block_size=8, dtype=torch.bfloat16)
    assert half.bytes_per_block * 2 == SPEC.bytes_per_block


def test_a_budget_holds_whole_blocks_only() -> None:
    assert SPEC.block_count_for(10 * SPEC.bytes_per_block) == 10
    assert SPEC.block_count_for(11 * SPEC.bytes_per_block - 1) == 10
    with pytest.raises(ValueError, match="no block fits"):
        SPEC.block_count_for(SPEC.bytes_per_block - 1)


@pytest.mark.parametrize("name", ["layer_count", "kv_head_count", "head_dim", "block_size"])
def test_a_spec_without_something_in_every_dimension_is_refused(name: str) -> None:
    sizes = {"layer_count": 1, "kv_head_count": 1, "head_dim": 1, "block_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=name):
        CacheSpec(**sizes, dtype=torch.float32)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="block_count"):
        KVCache(SPEC, 0)


def test_the_layout_names_everything_that_changes_the_bytes_of_a_page() -> None:
    base: dict[str, Any] = {
        "layer_count": 3,
        "kv_head_count": 2,
        "head_dim": 4,
        "block_size": 8,
        "dtype": torch.float32,
    }
    others: list[dict[str, Any]] = [
        {"layer_count": 4},
        {"kv_head_count": 1},
        {"head_dim": 8},
        {"block_size": 16},
        {"dtype": torch.float16},
    ]
    assert len({CacheSpec(**(base | other)).layout for other in [{}, *others]}) == 6
