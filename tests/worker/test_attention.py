"""The CPU's paged attention against a plain float64 softmax per query, and against PyTorch's own attention."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from quire_worker.attention import PagedAttention, TorchPagedAttention, backend_for, torch_tiles
from quire_worker.attention.torch_plan import GATHER_BYTES_MAX, QUERY_BLOCK
from quire_worker.attention.torch_tiles import GATHERED_BYTES_MAX, TILE_BYTES_MAX, TILE_TOKENS_MIN
from quire_worker.batch import Chunk, build_batch
from quire_worker.cache import CacheSpec, KVCache
from torch.nn.functional import scaled_dot_product_attention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}


class Scene:
    """Sequences whose earlier keys lie in scattered pages of a pool that is NaN everywhere else."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],  # per sequence: tokens before, new tokens
        *,
        page_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        block_counts = [-(-(before + new) // page_size) for before, new in lengths]
        block_ids = list(range(sum(block_counts) + 3))
        random.Random(seed).shuffle(block_ids)
        spec = CacheSpec(1, kv_heads, head_dim, page_size, dtype)
        self.lengths = lengths
        self.cache = KVCache(spec, len(block_ids))
        self.pages = self.cache.layers[0].fill_(float("nan"))
        self.keys, self.values, chunks = [], [], []
        for (before, new), block_count in zip(lengths, block_counts, strict=True):
            table = [block_ids.pop() for _ in range(block_count)]
            key, value = torch.randn(2, before + new, kv_heads, head_dim, generator=generator).to(dtype)
            for position in range(before):
                page, offset = table[position // page_size], position % page_size
                self.pages[page, 0, offset], self.pages[page, 1, offset] = key[position], value[position]
            self.keys.append(key)
            self.values.append(value)
            chunks.append(Chunk([0] * new, before, table, needs_logits=True))
        self.sinks = torch.randn(heads, generator=generator)
        token_count = sum(new for _, new in lengths)
        self.query = torch.randn(token_count, heads, head_dim, generator=generator).to(dtype)
        self.batch = build_batch(chunks, block_size=page_size).attention

    def new_tokens_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor[before:] for (before, _), tensor in zip(self.lengths, tensors, strict=True)])

    def run(self, attention: PagedAttention | None = None, *, scale: float = 0.2, **options: Any) -> torch.Tensor:
        plan = (attention or TorchPagedAttention()).plan(self.batch, self.cache.spec)
        plan.append(self.new_tokens_of(self.keys), self.new_tokens_of(self.values), self.pages)
        return plan.attend(self.query, self.pages, scale=scale, **options)

    def reference(
        self,
        *,
        scale: float = 0.2,
        window_left: int = -1,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Query by query, head by head, in float64."""
        output = torch.empty(self.query.shape, dtype=torch.float64)
        group = self.query.shape[1] // self.pages.shape[3]
        token = 0
        for (before, new), key, value in zip(self.lengths, self.keys, self.values, strict=True):
            for seen in range(before + 1, before + new + 1):
                first = max(0, seen - 1 - window_left) if window_left >= 0 else 0
                for head in range(self.query.shape[1]):
                    scores = key[first:seen, head // group].double() @ self.query[token, head].double() * scale
                    if soft_cap:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    weights = scores.exp()
                    total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                    output[token, head] = weights / total @ value[first:seen, head // group].double()
                token += 1
        return output


def decoding(*, is_gathered: bool) -> contextlib.AbstractContextManager[object]:
    """Decoding sequences' keys are gathered, or read where they lie, however many there are."""
    return mock.patch.object(torch_tiles, "GATHERED_BYTES_MAX", sys.maxsize if is_gathered else 0)


@pytest.fixture(params=[False, True], ids=["in place", "gathered"])
def is_gathered(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs a test for both."""
    with decoding(is_gathered=request.param):
        yield request.param


def assert_equals_reference(scene: Scene, **options: Any) -> None:
    tolerance = TOLERANCE[scene.query.dtype]
    expected = scene.reference(**options)
    for is_gathered in (False, True):
        with decoding(is_gathered=is_gathered):
            output = scene.run(**options).double()
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 300])
def test_a_whole_prompt_equals_the_reference(length: int) -> None:
    assert_equals_reference(Scene([(0, length)]))


@pytest.mark.parametrize("before", [1, 15, 16, 17, 31, 32, 33, 300])
def test_a_decoding_token_and_a_later_chunk_equal_the_reference(before: int) -> None:
    assert_equals_reference(Scene([(before, 1)]))
    assert_equals_reference(Scene([(before, 7)]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (10, 2), (7, 1), (16, 1)])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_any_ratio_of_query_heads_to_kv_heads_equals_the_reference(heads: int, kv_heads: int, head_dim: int) -> None:
    assert_equals_reference(
        Scene([(0, 9), (20, 1), (5, 1), (17, 4)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    )


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_any_page_size_equals_the_reference(page_size: int) -> None:
    assert_equals_reference(Scene([(0, 20), (40, 1), (64, 1), (13, 6)], page_size=page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_dtype_equals_the_reference_within_its_precision(dtype: torch.dtype) -> None:
    assert_equals_reference(Scene([(0, 33), (100, 1), (31, 1), (16, 16)], dtype=dtype))


@pytest.mark.parametrize("seed", range(10))
def test_random_mixed_batches_equal_the_reference(seed: int) -> None:
    choose = random.Random(seed)
    lengths = [(choose.choice([0, 1, 15, 16, 40, 130]), choose.choice([1, 1, 1, 2, 16, 19])) for _ in range(8)]
    assert_equals_reference(Scene(lengths, seed=seed, page_size=choose.choice([1, 5, 16])))


def test_a_batch_equals_pytorchs_own_attention_sequence_by_sequence() -> None:
    scene = Scene([(0, 64), (0, 1), (0, 17)])
    start = 0
    output = scene.run(scale=0.3)
    for (_, new), keys, values in zip(scene.lengths, scene.keys, scene.values, strict=True):
        query = scene.query[start : start + new].transpose(0, 1)
        key, value = (tensor.repeat_interleave(2, dim=1).transpose(0, 1) for tensor in (keys, values))
        expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(output[start : start + new], expected, rtol=2e-6, atol=2e-6)
        start += new


def units_of(scene: Scene, **options: Any) -> list[list[int]]:
    """The tokens of each unit of a plan."""
    plan = TorchPagedAttention().plan(scene.batch, scene.cache.spec)
    return [torch.arange(scene.query.shape[0])[unit.tokens].tolist() for unit in plan.work(**options).units]


def test_decoding_sequences_of_very_different_length_are_grouped_without_mixing() -> None:
    lengths = [(length, 1) for length in (700, 3, 699, 350, 0, 1, 340, 12)]
    scene = Scene(
        lengths, head_dim=256, dtype=torch.bfloat16
    )  # 2 KiB a token: 64 tokens of padding are what a call costs
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


LARGE: dict[str, Any] = {"heads": 16, "kv_heads": 8, "head_dim": 128}  # of whose keys a tile has the fewest
LONGEST = TILE_BYTES_MAX // (4 * 2 * 32)  # tile of a `Scene` that says nothing else


@pytest.mark.parametrize("count", [TILE_TOKENS_MIN - 1, TILE_TOKENS_MIN, TILE_TOKENS_MIN + 1, 3 * TILE_TOKENS_MIN + 5])
@pytest.mark.parametrize("options", [{}, {"window_left": TILE_TOKENS_MIN + 3}, {"soft_cap": 1.0}], ids=str)
def test_decoding_over_several_tiles_equals_the_reference(count: int, options: dict[str, Any]) -> None:
    scene, scale = Scene([(count - 1, 1), (3, 1), (count - 1, 1)], **LARGE), 128**-0.5
    assert_equals_reference(scene, scale=scale, **options)
    assert_equals_reference(scene, scale=scale, **options, sinks=scene.sinks)


def tiles_of(lengths: list[int], **shape: Any) -> tuple[int, list[int]]:
    """Keys of a tile, and the sequence of each tile, where sequences of so many tokens decode."""
    scene = Scene([(length - 1, 1) for length in lengths], **shape)
    tiles = TorchPagedAttention().plan(scene.batch, scene.cache.spec).work().tiles
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
@pytest.mark.usefixtures("is_gathered")
def test_options_equal_the_reference_in_every_dtype(dtype: torch.dtype) -> None:
    scene = Scene(LENGTHS, dtype=dtype, seed=3)
    for options in ({"window_left": 9}, {"soft_cap": 2.0}, {"sinks": scene.sinks}):
        expected = scene.reference(**options)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6  # soft cap and sinks are computed in float32
        torch.testing.assert_close(scene.run(**options).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("is_gathered")
def test_what_lies_before_a_window_is_never_read() -> None:
    scene = Scene([(70, 1), (90, 1), (64, 4)])
    expected = scene.run(window_left=5)
    for (before, _), table in zip(scene.lengths, scene.batch.block_tables.tolist(), strict=True):
        for position in range(before - 5):
            scene.pages[table[position // 16], :, position % 16] = float("nan")
    assert torch.equal(scene.run(window_left=5), expected)


def test_a_sequence_without_queries_gets_none(is_gathered: bool) -> None:
    scene = Scene([(20, 1), (30, 2)])
    expected = scene.run()
    batch = scene.batch
    scene.batch = dataclasses.replace(
        batch,
        query_indptr=torch.tensor([0, 0, 1, 1, 3, 3], dtype=torch.int32),
        kv_lengths=torch.tensor([0, 21, 7, 32, 16], dtype=torch.int32),
        block_tables=batch.block_tables[[1, 0, 0, 1, 0]],
    )
    assert torch.equal(scene.run(), expected)
    assert units_of(scene) == ([[0], [1, 2]] if is_gathered else [[1, 2]])
    tiles = TorchPagedAttention().plan(scene.batch, scene.cache.spec).work().tiles
    assert (tiles is None) == is_gathered
    assert tiles is None or tiles.tokens.tolist() == [0]


def test_nothing_but_the_slots_of_new_tokens_is_written() -> None:
    scene = Scene([(5, 3), (20, 1)])
    before = scene.pages.clone()
    scene.run()
    changed = (scene.pages != before) & ~(scene.pages.isnan() & before.isnan())
    slots = torch.zeros(scene.pages.shape[0] * 16, dtype=torch.bool)
    slots[scene.batch.slot_mapping] = True
    assert torch.equal(changed.any(dim=(3, 4)), slots.view(-1, 1, 16).expand(-1, 2, 16))


@pytest.mark.usefixtures("is_gathered")
def test_the_workspace_grows_shrinks_and_changes_dtype_without_a_trace() -> None:
    attention = TorchPagedAttention()
    for scene in (Scene([(30, 1)]), Scene([(300, 1)]), Scene([(10, 2)], dtype=torch.float64), Scene([(30, 1)])):
        tolerance = TOLERANCE[scene.query.dtype]
        torch.testing.assert_close(scene.run(attention).double(), scene.reference(), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("is_gathered")
def test_a_workspace_first_used_in_inference_mode_can_be_used_outside() -> None:
    attention = TorchPagedAttention()
    with torch.inference_mode():
        first = Scene([(30, 1)]).run(attention).clone()
    assert torch.equal(Scene([(30, 1)]).run(attention), first)


@pytest.mark.usefixtures("is_gathered")
def test_running_twice_gives_the_same_bits() -> None:
    lengths = [(0, 33), (100, 1), (31, 1)]
    assert torch.equal(Scene(lengths).run(), Scene(lengths).run())


def test_a_device_without_an_implementation_is_refused_by_name() -> None:
    assert isinstance(backend_for("cpu"), TorchPagedAttention)
    with pytest.raises(ValueError, match="'meta'"):
        backend_for("meta")


BLOCKS = [4, 2, 9]


def test_a_batch_lays_out_chunks_one_after_another() -> None:
    batch = build_batch(
        [
            Chunk([11, 12, 13], 0, [7], needs_logits=False),
            Chunk([21], 40, BLOCKS, needs_logits=True),
            Chunk([31, 32], 15, [3, 5, 6], needs_logits=True),
        ],
        block_size=16,
    )
    attention = batch.attention
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 31, 32]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 40, 15, 16]]
    assert batch.logits_index.tolist() == [3, 5]
    assert attention.query_indptr.tolist() == [0, 3, 4, 6]
    assert attention.kv_lengths.tolist() == [3, 41, 17]
    assert attention.block_tables.tolist() == [[7, 0, 0], BLOCKS, [3, 5, 0]]
    assert attention.slot_mapping.tolist() == [112, 113, 114, 9 * 16 + 8, 3 * 16 + 15, 5 * 16]
    assert (attention.query_length_max, attention.kv_length_max) == (3, 41)
    assert (attention.sequence_count, attention.token_count) == (3, 6)
    assert attention.kv_lengths.dtype == attention.block_tables.dtype == attention.query_indptr.dtype == torch.int32


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one chunk"),
        ([Chunk([], 0, BLOCKS, needs_logits=True)], "0 tokens"),
        ([Chunk([1], -1, BLOCKS, needs_logits=True)], "position -1"),
        ([Chunk([1, 2], 47, BLOCKS, needs_logits=True)], "past its 3 blocks"),
        ([Chunk([1], 5, [4], needs_logits=True), Chunk([2], 5, [4], needs_logits=True)], "one slot"),
    ],
)
def test_a_batch_that_would_write_where_it_must_not_is_refused(chunks: list[Chunk], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(chunks, block_size=16)
