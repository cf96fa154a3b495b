"""Every family of models through the engine, compared token by token with transformers' own `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import UsageError
from quire.types import GroupKind, GroupSpec
from quire_worker.attention.cpu_path import CpuAttentionPlan
from quire_worker.attention.torch_path import TorchAttentionPlan
from quire_worker.cache import CacheSpec, KVCache, LayerPages
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.loading import load_model
from quire_worker.model.transformers_seam import PositionsView
from quire_worker.process.server import load, parse_arguments

from tests.worker.engine_harness import paged_model, prompt, reference_model, reference_text, running
from tests.worker.tiny_models import FAMILIES, write_tiny

LENGTHS = [1, 15, 16, 17, 31, 33, 48, 100, 131, 200]
BLOCKS = 256  # number of blocks per group


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = tmp_path_factory.mktemp("families")
    return {family: write_tiny(family, tiny / family) for family in FAMILIES}


def pool_of(folder: Path, block_count: int) -> int:
    """Returns the size of a pool that has `block_count` blocks for each group."""
    return block_count * len(paged_model(folder).cache_spec.groups)


@pytest.mark.parametrize("family", FAMILIES)
async def test_mixed_batches_prefix_hits_and_forks_give_the_text_of_transformers(
    folders: dict[str, Path], family: str
) -> None:
    folder = folders[family]
    blocks = pool_of(folder, BLOCKS)
    async with running(folder, blocks=blocks) as harness:
        played = await harness.play(LENGTHS)
        assert await harness.free_block_count() == blocks
    played.assert_text_of_transformers(folder)


@pytest.mark.parametrize("family", FAMILIES)
async def test_requests_that_outgrow_their_pool_are_preempted_and_finish_with_the_same_text(
    folders: dict[str, Path], family: str
) -> None:
    folder = folders[family]
    prompts = [prompt(1 + i, seed=i) for i in range(4)]
    # The pool admits two requests. Later, the window of 24 tokens alone takes three blocks of each request.
    blocks = pool_of(folder, 4)
    async with running(folder, blocks=blocks) as harness:
        outputs = await asyncio.gather(
            *(harness.generate(tokens, max_tokens=56, ignore_eos=True) for tokens in prompts)
        )
        preemptions = harness.engine.scheduler.roster.preemption_count
        assert await harness.free_block_count() == blocks
    assert preemptions > 0
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = reference_text(folder, tuple(tokens), 56)
        assert output.tokens[0][: len(expected)] == expected
        assert len(output.tokens[0]) == 56


@pytest.mark.parametrize("family", ["gemma3", "llama4", "deepseek_v3"])
async def test_the_text_goes_on_when_the_allocator_is_replaced_by_an_empty_one(
    folders: dict[str, Path], family: str
) -> None:
    tokens, blocks = prompt(50, seed=9), pool_of(folders[family], 64)
    async with running(folders[family], blocks=blocks) as harness:
        request = harness.submit(tokens, max_tokens=60, ignore_eos=True)
        task = asyncio.create_task(harness.collect(request))
        while request.usage.output_token_count < 10:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        output = await task
        assert await harness.free_block_count() == blocks
    expected = reference_text(folders[family], tuple(tokens), 60)
    assert output.tokens[0][: len(expected)] == expected
    assert len(output.tokens[0]) == 60


def test_a_pool_with_less_than_a_block_for_each_group_is_refused_with_what_it_takes(folders: dict[str, Path]) -> None:
    options = parse_arguments(["--model", str(folders["gemma3"]), "--blocks", "4"])
    with pytest.raises(
        UsageError,
        match=r"4 blocks cannot hold any token; the pool needs at least 5 blocks of 4,096 bytes.* raise --blocks",
    ):
        load(options)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_of_latent_attention_pages_hold_one_vector_per_token(folders: dict[str, Path], family: str) -> None:
    spec = paged_model(folders[family]).cache_spec
    # The factors are layers, tokens of a block, dims (32 of the latent, 8 of the rotary part), and bytes of a float32.
    assert spec.bytes_per_block == len(spec.layers) * 16 * (32 + 8) * 4


# -- features of a family beyond keys and values: without them, logits differ ------------------------------------------


NOTHING = {"window_left": -1, "soft_cap": 0.0}


def without(option: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Returns a fault: attention ignores one of its options."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for kind in (TorchAttentionPlan, CpuAttentionPlan):
            monkeypatch.setattr(kind, "attend", forgetful(kind.attend))
        # Layers that run in one call do not call `attend`. They take its arguments from `arguments_of`.
        if option in NOTHING:
            arguments_of = CpuAttentionPlan.arguments_of
            monkeypatch.setattr(
                CpuAttentionPlan,
                "arguments_of",
                lambda plan, kind: arguments_of(plan, kind._replace(**{option: NOTHING[option]})),
            )

    def forgetful(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def attend_without(*arguments: Any, **options: Any) -> torch.Tensor:
            del options[option]
            return attend(*arguments, **options)

        return attend_without

    return plant


def batch_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cache count positions from the start of the batch."""
    monkeypatch.setattr(PositionsView, "get_seq_length", lambda *_: 0)


def no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every query see all keys before it."""
    full = GroupSpec(GroupKind.FULL_ATTENTION, 16)
    monkeypatch.setattr(CacheSpec, "groups", property(lambda spec: tuple(full for _ in spec.plan.groups)))


def keys_of_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes layers that share another layer's pages read the pages of the first layer."""
    places = CacheSpec.layer_pages

    def misplaced(spec: CacheSpec) -> Iterator[LayerPages]:
        first = next(places(spec))
        for place in places(spec):
            moved = place._replace(group=first.group, buffer=first.buffer, offset=first.offset)
            yield place if place.layer.shared_with is None else moved

    monkeypatch.setattr(CacheSpec, "layer_pages", misplaced)


@pytest.mark.parametrize(
    ("family", "plant"),
    [
        ("mistral", without("window_left")),
        ("gemma2", without("soft_cap")),
        ("gpt_oss", without("sinks")),
        ("llama4", batch_positions),
        ("llama4", no_chunks),
        ("gemma3n", keys_of_another_layer),
    ],
    ids=["window", "soft_cap", "sinks", "temperature", "chunks", "shared_layers"],
)
def test_what_a_family_needs_is_found_missing(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    model, tokens = paged_model(folders[family]), prompt(70, seed=7)
    with torch.inference_mode():
        expected = reference_model(folders[family])(torch.tensor([tokens])).logits[0, -1]

    def difference() -> float:
        cache = KVCache(model.cache_spec, 5 * len(model.cache_spec.groups))
        tables = [range(5 * group, 5 * group + 5) for group in range(len(model.cache_spec.groups))]
        for start, stop in ((0, 41), (41, 70)):
            chunk = Chunk(tokens[start:stop], start, tables, needs_logits=True)
            logits = model.forward(build_batch([chunk], groups=model.cache_spec.groups), cache)[0]
        return float((logits - expected).norm() / expected.norm())

    assert difference() < 1e-4
    plant(monkeypatch)
    assert difference() > 1e-2


def test_attention_chunks_that_blocks_do_not_divide_are_refused_with_a_size_that_does(tmp_path: Path) -> None:
    folder = write_tiny("llama4", tmp_path, attention_chunk_size=48)
    with pytest.raises(UnsupportedModelError, match=r"of 48 is not a multiple of that; use --block-size 16"):
        load_model(folder, block_size=32)
    assert load_model(folder, block_size=16).cache_spec.block_size == 16


def test_blocks_fit_into_attention_chunks_unless_their_size_is_given(tmp_path: Path) -> None:
    folder = write_tiny("llama4", tmp_path, attention_chunk_size=20)
    options = parse_arguments(["--model", str(folder), "--blocks", "64"])
    loaded = load(options)
    assert {group.block_size for group in loaded.model.cache_spec.groups} == {4}
    assert parse_arguments(["--model", str(folder), "--block-size", "8"]).block_size == 8
    assert parse_arguments(["--model", str(tmp_path / "nowhere")]).block_size == 16
