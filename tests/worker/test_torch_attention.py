"""The plain torch path for CPUs: tiles and gathering, longer shapes that need them, and float64.

`test_attention.py` has the cases that hold for every implementation.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from quire_kernels.shared.reference import CPU_TOLERANCE
from quire_worker.attention import TorchPagedAttention
from quire_worker.attention.torch_path import LONE_BYTES_MAX
from quire_worker.attention.torch_plan import GATHER_BYTES_MAX, QUERY_BLOCK, QUERY_BLOCK_HALF
from quire_worker.attention.torch_tiles import GATHERED_BYTES_MAX, TILE_BYTES_MAX, TILE_TOKENS_MIN

from tests.worker import attention_batches
from tests.worker.attention_batches import Scene, decoding


def assert_equals_reference(scene: Scene, **options: Any) -> None:
    """Compares with the reference in both ways to decode."""
    for is_gathered in (False, True):
        with decoding(is_gathered=is_gathered):
            attention_batches.assert_equals_reference(scene, TorchPagedAttention(), **options)


def test_a_long_prompt_equals_the_reference() -> None:
    assert_equals_reference(Scene([(0, 300)]))


def test_float64_equals_the_reference_within_its_precision() -> None:
    assert_equals_reference(Scene([(0, 33), (100, 1), (31, 1), (16, 16)], dtype=torch.float64))


@pytest.mark.parametrize("seed", range(10))
def test_random_mixed_batches_equal_the_reference(seed: int) -> None:
    choose = random.Random(seed)
    lengths = [(choose.choice([0, 1, 15, 16, 40, 130]), choose.choice([1, 1, 1, 2, 16, 19])) for _ in range(8)]
    assert_equals_reference(Scene(lengths, seed=seed, page_size=choose.choice([1, 5, 16])))


def units_of(scene: Scene, **options: Any) -> list[list[int]]:
    """Returns the tokens of each unit of a scene's plan."""
    plan = TorchPagedAttention().plan(scene.batch, scene.spec)
    return [torch.arange(scene.query.shape[0])[unit.tokens].tolist() for unit in plan.work(**options).units]


def test_decoding_sequences_of_very_different_length_are_grouped_without_mixing() -> None:
    lengths = [(length, 1) for length in (700, 3, 699, 350, 0, 1, 340, 12)]
    # With 2 KiB per token, one more call costs as much as 64 padded tokens.
    scene = Scene(lengths, head_dim=256, dtype=torch.bfloat16)
    assert units_of(scene) == [[0, 2], [3, 6], [7, 1, 5, 4]]
    assert_equals_reference(scene)


def test_prompts_and_chunks_are_attended_to_together_only_if_they_are_alike() -> None:
    scene = Scene([(20, 4), (20, 4), (36, 4), (0, 4), (20, 5), (30, 1), (0, 4)], dtype=torch.bfloat16)
    assert units_of(scene) == [[21], [8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 7], [12, 13, 14, 15, 22, 23, 24, 25],
                               [16, 17, 18, 19, 20]]  # fmt: skip
    assert_equals_reference(scene)


def test_more_keys_than_one_gather_holds_are_taken_in_several() -> None:
    per_sequence = GATHER_BYTES_MAX // (2 * 2 * 8 * 256) // 3
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 8, "head_dim": 256, "page_size": 64, "dtype": torch.bfloat16}
    scene = Scene([(per_sequence - 1, 1)] * 4, **shape)
    assert units_of(scene) == [[0, 1, 2], [3]]
    assert_equals_reference(scene)


LARGE: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 128}  # Here tiles have the minimum of keys.
LONGEST = TILE_BYTES_MAX // (4 * 2 * 32)  # keys per tile with the default shape of `Scene`


@pytest.mark.parametrize("count", [TILE_TOKENS_MIN - 1, TILE_TOKENS_MIN, TILE_TOKENS_MIN + 1, 3 * TILE_TOKENS_MIN + 5])
@pytest.mark.parametrize("options", [{}, {"window_left": TILE_TOKENS_MIN + 3}, {"soft_cap": 1.0}], ids=str)
def test_decoding_over_several_tiles_equals_the_reference(count: int, options: dict[str, Any]) -> None:
    scene, scale = Scene([(count - 1, 1), (3, 1), (count - 1, 1)], **LARGE), 128**-0.5
    assert_equals_reference(scene, scale=scale, **options)
    assert_equals_reference(scene, scale=scale, **options, sinks=scene.sinks)


def tiles_of(lengths: list[int], **shape: Any) -> tuple[int, list[int]]:
    """Returns the keys per tile, and the sequence of each tile, for decode of sequences with these lengths."""
    scene = Scene([(length - 1, 1) for length in lengths], **shape)
    tiles = TorchPagedAttention().plan(scene.batch, scene.spec).work().tiles
    assert tiles is not None
    return tiles.rows.shape[1], tiles.sequence_of_tile.tolist()


def test_few_keys_are_gathered_and_more_are_read_where_they_lie() -> None:
    few = GATHERED_BYTES_MAX // (4 * 2 * 32)
    for lengths, are_few in (([few], True), ([few + 1], False), ([few // 2, 1], True), ([few // 2 + 1, 1], False)):
        scene = Scene([(length - 1, 1) for length in lengths])
        assert bool(units_of(scene)) == are_few
        assert_equals_reference(scene)


def test_tiles_are_few_and_even() -> None:
    assert tiles_of([2 * TILE_TOKENS_MIN + 1, 4, 101], **LARGE) == (86, [0, 0, 0, 1, 2, 2])
    assert tiles_of([LONGEST, LONGEST - 7]) == (LONGEST, [0, 1])
    assert tiles_of([LONGEST + 1]) == (LONGEST // 2 + 1, [0, 0])


def test_tiles_are_shorter_where_much_would_be_padding() -> None:
    tile, sequences = tiles_of([1000, *[10] * 31])
    assert (tile, sequences[:9]) == (125, [*[0] * 8, 1])
    tile, sequences = tiles_of([512, 512, 512, 250])
    assert (tile, sequences) == (256, [0, 0, 1, 1, 2, 2, 3])


def test_one_long_sequence_beside_many_short_ones_equals_the_reference() -> None:
    assert_equals_reference(Scene([(5000, 1), *((length, 1) for length in range(31))], heads=2, kv_heads=1))
    assert_equals_reference(Scene([(1000, 3), *((length, 1) for length in range(31))], heads=2, kv_heads=1))


@pytest.mark.parametrize("new", [31, 32, 95, 96, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 2 * QUERY_BLOCK + 3])
@pytest.mark.parametrize("before", [0, 50])
def test_a_chunk_of_several_blocks_of_queries_equals_the_reference(before: int, new: int) -> None:
    assert_equals_reference(Scene([(before, new), (before, new)], heads=2, kv_heads=1, head_dim=16))
    assert_equals_reference(Scene([(before, new)], heads=2, kv_heads=1, head_dim=16), window_left=70)


@pytest.mark.parametrize("heads", [2, 4, 6, 8])
def test_decoding_in_bfloat16_equals_the_reference_with_any_ratio_of_heads(heads: int) -> None:
    shape: dict[str, Any] = {"heads": heads, "kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
    cached = LONE_BYTES_MAX // (2 * 2 * 2 * 128)  # tokens whose keys and values have `LONE_BYTES_MAX` bytes
    for lengths in ([40, 33, 35], [cached - 1], [cached]):
        assert_equals_reference(Scene([(length, 1) for length in lengths], **shape), scale=128**-0.5)


@pytest.mark.parametrize(
    "new", [QUERY_BLOCK_HALF - 1, QUERY_BLOCK_HALF, QUERY_BLOCK_HALF + 1, 2 * QUERY_BLOCK_HALF + 3]
)
@pytest.mark.parametrize("heads", [2, 4])
def test_a_chunk_of_several_blocks_in_bfloat16_equals_the_reference(heads: int, new: int) -> None:
    scene = Scene([(50, new)], heads=heads, kv_heads=1, head_dim=16, dtype=torch.bfloat16)
    assert_equals_reference(scene)
    assert_equals_reference(scene, window_left=70)


LENGTHS = [(0, 20), (40, 1), (33, 1), (64, 1), (13, 6), (13, 6), (0, 1), (90, 17)]
SHAPES = [
    {},
    {"page_size": 1},
    {"page_size": 5},
    {"heads": 5, "kv_heads": 1},
    {"head_dim": 80},
    {"heads": 3, "kv_heads": 3},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 17, 1000])
def test_a_window_hides_what_came_before_it(window_left: int, shape: dict[str, Any]) -> None:
    assert_equals_reference(Scene(LENGTHS, **shape), window_left=window_left)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window_left", [-1, 7])
@pytest.mark.parametrize("soft_cap", [0.0, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_cap_sinks_and_window_equal_the_reference(
    has_sinks: bool, soft_cap: float, window_left: int, shape: dict[str, Any]
) -> None:
    scene = Scene(LENGTHS, **shape)
    sinks = scene.sinks if has_sinks else None
    assert_equals_reference(scene, soft_cap=soft_cap, window_left=window_left, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_options_equal_the_reference_in_every_dtype(is_gathered: bool, dtype: torch.dtype) -> None:
    scene = Scene(LENGTHS, dtype=dtype, seed=3)
    for options in ({"window_left": 9}, {"soft_cap": 2.0}, {"sinks": scene.sinks}):
        expected = scene.reference(**options)
        # Torch's path computes soft cap and sinks in float32.
        tolerance = max(CPU_TOLERANCE[dtype], CPU_TOLERANCE[torch.float32])
        with decoding(is_gathered=is_gathered):
            output = scene.run(TorchPagedAttention(), **options).double()
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_sequence_without_queries_is_no_work(is_gathered: bool) -> None:
    scene = Scene([(20, 1), (30, 2)])
    scene.batch = dataclasses.replace(
        scene.batch,
        query_indptr=torch.tensor([0, 0, 1, 1, 3, 3], dtype=torch.int32),
        kv_lengths=torch.tensor([0, 21, 7, 32, 16], dtype=torch.int32),
        block_tables=scene.batch.block_tables[[1, 0, 0, 1, 0]],
    )
    with decoding(is_gathered=is_gathered):
        assert units_of(scene) == ([[0], [1, 2]] if is_gathered else [[1, 2]])
        tiles = TorchPagedAttention().plan(scene.batch, scene.spec).work().tiles
    assert (tiles is None) == is_gathered
    assert tiles is None or tiles.tokens.tolist() == [0]


@pytest.mark.parametrize("is_gathered", [False, True])
def test_the_workspace_grows_shrinks_and_changes_dtype_without_a_trace(is_gathered: bool) -> None:
    attention = TorchPagedAttention()
    with decoding(is_gathered=is_gathered):
        for scene in (Scene([(30, 1)]), Scene([(300, 1)]), Scene([(10, 2)], dtype=torch.float64), Scene([(30, 1)])):
            attention_batches.assert_equals_reference(scene, attention)
