"""The attention kernels of `quire_cpu`, with every instruction set that this CPU has.

`test_attention.py` has the cases that hold for every implementation. The cases here are longer, or cover parts that
only these kernels have: blocks of keys, tiles of queries, vectors of several widths.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quire_cpu.library import Library
from quire_worker.attention import CpuPagedAttention, TorchPagedAttention

from tests.worker.attention_batches import Scene, assert_equals_reference, implementation, tolerance_of

INSTRUCTION_SETS = ["avx512bf16", "avx512", "avx2", "baseline"]


@pytest.fixture(params=INSTRUCTION_SETS)
def attention(request: pytest.FixtureRequest) -> Iterator[CpuPagedAttention]:
    """Returns attention with the kernels of one instruction set."""
    found = implementation("cpu", torch.device("cpu"))
    assert isinstance(found, CpuPagedAttention)
    if request.param not in found.library.instruction_sets:
        pytest.skip(f"this CPU has no {request.param}")
    found.library.use(request.param)
    yield found
    found.library.use(found.library.instruction_sets[0])


def random_scene(seed: int) -> tuple[Scene, dict[str, Any]]:
    """Returns a random mixed batch, and random options."""
    choose = random.Random(f"cpu {seed}")
    befores, news = [0, 1, 15, 16, 40, 63, 64, 130, 200], [1, 1, 1, 2, 3, 16, 19, 70]
    lengths = [(choose.choice(befores), choose.choice(news)) for _ in range(choose.randint(1, 6))]
    kv_heads = choose.choice([1, 2, 3])
    scene = Scene(
        lengths,
        seed=seed,
        page_size=choose.choice([1, 5, 16, 64]),
        heads=kv_heads * choose.choice([1, 2, 3, 4, 5, 8]),
        kv_heads=kv_heads,
        head_dim=choose.choice([8, 16, 20, 32, 64, 80, 128]),
        dtype=choose.choice([torch.float32, torch.bfloat16]),
    )
    options = {
        "window_left": choose.choice([-1, -1, 0, 7, 50]),
        "soft_cap": choose.choice([0.0, 0.0, 0.5, 30.0]),
        "sinks": choose.choice([None, scene.sinks]),
    }
    return scene, options


@pytest.mark.parametrize("seed", range(12))
def test_random_mixed_batches_equal_the_reference(seed: int, attention: CpuPagedAttention) -> None:
    scene, options = random_scene(seed)
    assert_equals_reference(scene, attention, **options)


@pytest.mark.parametrize("seed", range(12, 40))
def test_random_mixed_batches_equal_plain_torch(seed: int, attention: CpuPagedAttention) -> None:
    scene, options = random_scene(seed)
    if scene.query.dtype == torch.bfloat16:
        # Torch's path applies a soft cap and sinks to scores that are rounded to bfloat16, so the results would differ.
        options |= {"soft_cap": 0.0, "sinks": None}
    tolerance = 2 * tolerance_of(attention, scene.query.dtype)
    ours, torchs = scene.run(attention, **options), scene.run(TorchPagedAttention(), **options)
    torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=tolerance)


def forked_scene(seed: int) -> Scene:
    """Returns sequences that fork from one another at random lengths, among sequences that share nothing."""
    choose = random.Random(f"forks {seed}")
    page_size, kv_heads = choose.choice([8, 16, 32]), choose.choice([1, 2])
    lengths, shared = [(choose.choice([0, 70, 300]), choose.choice([1, 3, 40]))], [0]
    for _ in range(choose.randint(3, 12)):
        before = lengths[-1][0]
        common = choose.choice([before, before, before - 32, 0]) // page_size * page_size
        lengths.append((max(0, common) + choose.choice([0, 1, 30, 90]), choose.choice([1, 1, 1, 1, 2, 5])))
        shared.append(max(0, common))
    return Scene(
        lengths,
        seed=seed,
        page_size=page_size,
        heads=kv_heads * choose.choice([1, 2, 3, 8]),
        kv_heads=kv_heads,
        head_dim=choose.choice([32, 64, 80]),
        dtype=choose.choice([torch.float32, torch.bfloat16]),
        shared=shared,
    )


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("seed", range(16))
def test_keys_that_neighbours_share_are_attended_to_as_their_own(
    seed: int, threads: int, attention: CpuPagedAttention
) -> None:
    scene = forked_scene(seed)
    options = random_scene(seed)[1] | {"sinks": scene.sinks if seed % 3 == 0 else None}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert_equals_reference(scene, attention, **options)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_threads_give_the_bits_of_one(dtype: torch.dtype) -> None:
    attention = implementation("cpu", torch.device("cpu"))
    scene = Scene([(300, 1), (0, 130), (64, 1), (200, 90)], heads=8, kv_heads=4, dtype=dtype)
    one = scene.run(attention)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(scene.run(attention), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("new", [1, 40])
def test_a_nan_reaches_the_result_of_its_own_sequence_and_no_other(
    new: int, part: str, attention: CpuPagedAttention
) -> None:
    """A worker detects failed requests by NaN in their logits, so attention must not hide NaN."""
    scene = Scene([(70, new), (70, new)])
    tensors = scene.keys if part == "key" else scene.values
    tensors[0][70:] = float("nan")
    output = scene.run(attention)
    assert output[:new].isnan().any(dim=2).all()
    torch.testing.assert_close(output[new:].double(), scene.reference()[new:], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("new", [1, 40])
def test_pages_may_lie_apart(new: int, attention: CpuPagedAttention) -> None:
    """Pages may have gaps between them, as the pages of layers that share a slot do."""
    scene = Scene([(70, new), (3, new)])
    pages = scene.pages
    apart = torch.full((pages.shape[0], 3, *pages.shape[1:]), float("nan"))
    apart[:, 1] = pages
    scene.pages = apart[:, 1]
    assert not scene.pages.is_contiguous()
    assert_equals_reference(scene, attention)
    assert apart[:, 0].isnan().all()
    assert apart[:, 2].isnan().all()


def test_a_dtype_that_the_kernels_have_not_is_attended_to_by_torch() -> None:
    attention = implementation("cpu", torch.device("cpu"))
    assert_equals_reference(Scene([(20, 1), (0, 9)], dtype=torch.float16), attention)
    assert_equals_reference(Scene([(20, 1), (0, 9)], dtype=torch.bfloat16, head_dim=17), attention)


def test_latents_are_attended_to_by_torch() -> None:
    attention = implementation("cpu", torch.device("cpu"))
    assert_equals_reference(Scene([(20, 1), (0, 9)], kv_heads=1, head_dim=40, latent_dim=32), attention)


def test_what_is_loaded_names_its_instruction_sets() -> None:
    attention = implementation("cpu", torch.device("cpu"))
    assert isinstance(attention, CpuPagedAttention)
    library: Library = attention.library
    assert library.instruction_sets[-1] == "baseline"
    with pytest.raises(ValueError, match="'mmx'"):
        library.use("mmx")
