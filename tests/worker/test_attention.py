"""The worker's attention, on a CPU and through the kernels, compared with a plain float64 softmax per query.

Every case runs for all implementations: plain torch with keys in place and gathered, the CPU kernels, and the Triton
kernels, which are interpreted without a GPU. Batches are as small as the tests allow. Larger batches, only for the two
CPU implementations, are in `test_torch_attention.py` and `test_cpu_attention.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quire_worker.attention import CpuPagedAttention, PagedAttention, TorchPagedAttention, backend_for
from torch.nn.functional import scaled_dot_product_attention

from tests.worker.attention_batches import (
    Scene,
    assert_equals_reference,
    decoding,
    device_of,
    implementation,
    tolerance_of,
)


@pytest.fixture(params=["torch, in place", "torch, gathered", "cpu", "triton"])
def attention(request: pytest.FixtureRequest, device: torch.device) -> Iterator[PagedAttention]:
    """Yields every implementation, and plain torch with both of its ways to decode."""
    name, _, way = request.param.partition(", ")
    with decoding(is_gathered=way == "gathered"):
        yield implementation(name, device)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a_whole_prompt_equals_the_reference(length: int, attention: PagedAttention) -> None:
    assert_equals_reference(Scene([(0, length)]), attention)


@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("before", [1, 15, 16, 17, 31, 32, 33, 300])
def test_a_decoding_token_and_a_later_chunk_equal_the_reference(
    before: int, new: int, attention: PagedAttention
) -> None:
    assert_equals_reference(Scene([(before, new)]), attention)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (10, 2), (7, 1), (16, 1)])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_any_ratio_of_query_heads_to_kv_heads_equals_the_reference(
    heads: int, kv_heads: int, head_dim: int, attention: PagedAttention
) -> None:
    scene = Scene([(0, 9), (20, 1), (5, 1), (17, 4)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    assert_equals_reference(scene, attention)


@pytest.mark.parametrize("head_dim", [96, 256])
def test_any_head_dim_equals_the_reference(head_dim: int, attention: PagedAttention) -> None:
    assert_equals_reference(Scene([(0, 9), (20, 1)], head_dim=head_dim), attention)
    assert_equals_reference(Scene([(20, 1), (3, 1)], head_dim=head_dim), attention)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_any_page_size_equals_the_reference(page_size: int, attention: PagedAttention) -> None:
    assert_equals_reference(Scene([(0, 20), (40, 1), (64, 1), (13, 6)], page_size=page_size), attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype_equals_the_reference_within_its_precision(dtype: torch.dtype, attention: PagedAttention) -> None:
    assert_equals_reference(Scene([(0, 33), (100, 1), (31, 1), (16, 16)], dtype=dtype), attention)


@pytest.mark.parametrize("lengths", [[(0, 1)], [(0, 17)], [(33, 1), (0, 1), (200, 1)], [(0, 9), (20, 1), (17, 4)]])
@pytest.mark.parametrize(
    "shape", [{}, {"page_size": 1}, {"page_size": 5}, {"heads": 5, "kv_heads": 1}, {"head_dim": 80}], ids=str
)
def test_decode_prefill_and_both_equal_the_reference(
    lengths: list[tuple[int, int]], shape: dict[str, Any], attention: PagedAttention
) -> None:
    assert_equals_reference(Scene(lengths, **shape), attention)


@pytest.mark.parametrize("seed", range(5))
def test_random_mixed_batches_equal_the_reference(seed: int, attention: PagedAttention) -> None:
    choose = random.Random(seed)
    lengths = [(choose.choice([0, 1, 15, 16, 40]), choose.choice([1, 1, 2, 16, 19])) for _ in range(5)]
    assert_equals_reference(Scene(lengths, seed=seed, page_size=choose.choice([1, 5, 16])), attention)


def test_one_long_sequence_beside_many_short_ones_equals_the_reference(attention: PagedAttention) -> None:
    assert_equals_reference(
        Scene([(300, 1), *((length, 1) for length in range(31))], heads=1, kv_heads=1, head_dim=16), attention
    )


def test_a_batch_equals_pytorchs_own_attention_sequence_by_sequence(attention: PagedAttention) -> None:
    scene = Scene([(0, 33), (0, 1), (0, 17)])
    start, tolerance = 0, tolerance_of(attention, torch.float32)
    output = scene.run(attention, scale=0.3)
    for (_, new), keys, values in zip(scene.lengths, scene.keys, scene.values, strict=True):
        query = scene.query[start : start + new].transpose(0, 1)
        key, value = (tensor.repeat_interleave(2, dim=1).transpose(0, 1) for tensor in (keys, values))
        expected = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(output[start : start + new], expected, rtol=tolerance, atol=tolerance)
        start += new


LENGTHS = [(0, 18), (33, 1), (13, 6), (0, 1), (40, 3)]
DECODING = [(33, 1), (0, 1), (50, 1)]


@pytest.mark.parametrize("lengths", [LENGTHS, DECODING], ids=["mixed", "decode"])
@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 17, 1000])
def test_a_window_hides_what_came_before_it(
    window_left: int, lengths: list[tuple[int, int]], attention: PagedAttention
) -> None:
    assert_equals_reference(Scene(lengths), attention, window_left=window_left)


@pytest.mark.parametrize("lengths", [LENGTHS, DECODING], ids=["mixed", "decode"])
@pytest.mark.parametrize("soft_cap", [0.0, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_cap_sinks_and_window_equal_the_reference(
    has_sinks: bool, soft_cap: float, lengths: list[tuple[int, int]], attention: PagedAttention
) -> None:
    scene = Scene(lengths)
    sinks = scene.sinks if has_sinks else None
    assert_equals_reference(scene, attention, window_left=7, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize(
    "shape",
    [{"page_size": 1}, {"page_size": 5}, {"heads": 5, "kv_heads": 1}, {"head_dim": 80}, {"heads": 3, "kv_heads": 3}],
    ids=str,
)
def test_all_options_in_any_shape_equal_the_reference(shape: dict[str, Any], attention: PagedAttention) -> None:
    scene = Scene([(0, 9), (33, 1), (13, 6)], **shape)
    assert_equals_reference(scene, attention, window_left=7, soft_cap=0.5, sinks=scene.sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[(33, 1), (50, 1)], [(0, 9), (20, 1)]], ids=["decode", "mixed"])
def test_all_options_in_every_dtype_equal_the_reference(
    lengths: list[tuple[int, int]], dtype: torch.dtype, attention: PagedAttention
) -> None:
    scene = Scene(lengths, dtype=dtype)
    assert_equals_reference(scene, attention, window_left=20, soft_cap=1.5, sinks=scene.sinks)


def test_what_lies_before_a_window_is_never_read(attention: PagedAttention) -> None:
    for lengths in ([(70, 1), (90, 1), (64, 4)], [(70, 1), (90, 1)]):
        scene = Scene(lengths)
        expected = scene.run(attention, window_left=5)
        for (before, _), table in zip(scene.lengths, scene.batch.block_tables.tolist(), strict=True):
            for position in range(before - 5):
                scene.pages[table[position // 16], :, position % 16] = float("nan")
        assert torch.equal(scene.run(attention, window_left=5), expected)


def test_a_sequence_without_queries_gets_none(attention: PagedAttention) -> None:
    scene = Scene([(20, 1), (30, 2)])
    expected = scene.run(attention)
    batch = scene.batch
    scene.batch = dataclasses.replace(
        batch,
        query_indptr=torch.tensor([0, 0, 1, 1, 3, 3], dtype=torch.int32),
        kv_lengths=torch.tensor([0, 21, 7, 32, 16], dtype=torch.int32),
        block_tables=batch.block_tables[[1, 0, 0, 1, 0]],
    )
    assert torch.equal(scene.run(attention), expected)


def test_nothing_but_the_slots_of_new_tokens_is_written(attention: PagedAttention) -> None:
    scene = Scene([(5, 3), (20, 1)])
    before = scene.pages.clone()
    scene.run(attention)
    pages = scene.pages.cpu()
    changed = (pages != before) & ~(pages.isnan() & before.isnan())
    slots = torch.zeros(pages.shape[0] * 16, dtype=torch.bool)
    slots[scene.batch.slot_mapping] = True
    assert torch.equal(changed.any(dim=(3, 4)), slots.view(-1, 1, 16).expand(-1, 2, 16))


def test_what_one_batch_leaves_behind_is_no_part_of_the_next(attention: PagedAttention) -> None:
    for scene in (Scene([(30, 1)]), Scene([(300, 1)]), Scene([(10, 2)], dtype=torch.bfloat16), Scene([(30, 1)])):
        assert_equals_reference(scene, attention)


def test_what_was_first_used_in_inference_mode_can_be_used_outside(attention: PagedAttention) -> None:
    with torch.inference_mode():
        first = Scene([(30, 1)]).run(attention).clone()
    assert torch.equal(Scene([(30, 1)]).run(attention), first)


def test_running_twice_gives_the_same_bits(attention: PagedAttention) -> None:
    lengths = [(0, 33), (100, 1), (31, 1)]
    assert torch.equal(Scene(lengths).run(attention), Scene(lengths).run(attention))


def test_pages_of_other_layers_may_lie_between_those_of_a_layer(attention: PagedAttention) -> None:
    assert_equals_reference(Scene([(0, 33), (100, 1), (31, 2)], layers_between=2), attention, window_left=20)
    assert_equals_reference(Scene([(100, 1), (64, 1)], layers_between=2), attention)


def test_latents_are_keys_whose_first_elements_are_values(attention: PagedAttention) -> None:
    latents: Any = {"heads": 4, "kv_heads": 1, "head_dim": 48, "latent_dim": 32}
    assert_equals_reference(Scene([(0, 33), (100, 1), (31, 2)], **latents), attention)
    assert_equals_reference(Scene([(100, 1), (0, 1), (64, 1)], layers_between=2, **latents), attention)


def test_queries_keys_and_values_may_have_any_strides(attention: PagedAttention) -> None:
    scene, device = Scene([(0, 9), (20, 1)]), device_of(attention)
    expected = scene.run(attention)
    key, value, query = (
        tensor.transpose(0, 2).contiguous().transpose(0, 2).repeat_interleave(2, dim=1)[:, ::2].to(device)
        for tensor in (scene.new_tokens_of(scene.keys), scene.new_tokens_of(scene.values), scene.query)
    )
    plan = attention.plan(scene.batch, scene.spec)
    plan.append(key, value, scene.pages)
    output = plan.attend(query, scene.pages, scale=0.2).cpu()
    # The same implementation computes both outputs, so they must be far closer to each other than to the reference.
    torch.testing.assert_close(output, expected, rtol=2e-6, atol=2e-6)


def test_a_device_without_an_implementation_is_refused_by_name() -> None:
    assert isinstance(backend_for("cpu"), (CpuPagedAttention, TorchPagedAttention))
    with pytest.raises(ValueError, match="'meta'"):
        backend_for("meta")
