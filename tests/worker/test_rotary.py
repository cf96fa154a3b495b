"""Rotary frequencies that depend on a request's length: a mixed batch gives each request's text by `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_worker.execution import parts
from quire_worker.model.batch import Chunk, ForwardBatch, build_batch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.loading import load_model
from quire_worker.model.rotary import Rotation, TokenLengths, rotation_of
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.worker.engine_harness import prompt, reference_model, reference_text, running
from tests.worker.tiny_models import tiny_shape, write_model, write_tokenizer

Forget = Callable[[pytest.MonkeyPatch], None]

ORIGINAL = 64
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0},
            "original_max_position_embeddings": ORIGINAL,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
        },
    ),
    "phimoe": (
        PhimoeForCausalLM,
        PhimoeConfig,
        {
            "rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.6},
            "max_position_embeddings": 512,
            "num_local_experts": 4,
            "pad_token_id": 0,
        },
    ),
    "llama_longrope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LONGROPE | {"factor": 8.0}}),
    "llama_dynamic": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 8.0},
            "max_position_embeddings": ORIGINAL,
        },
    ),
}
# Lengths of prompts around the limit of 64 and far from it. With their 40 generated tokens, prompts of 32 tokens or
# more cross the limit.
LENGTHS = [1, 17, 32, 48, 63, 64, 65, 66, 80, 130, 200]
MORE = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (model_class, config_class, own) in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config_class(**(tiny_shape() | own)))
        write_model(folder, model)
        write_tokenizer(folder)
        made[name] = folder
    return made


def text_alone(folder: Path, tokens: list[int]) -> tuple[int, ...]:
    """Returns the text of a fresh model, because a longer earlier request would leave its frequencies behind."""
    with torch.no_grad():
        reference_model(folder)(torch.tensor([[1]]))  # A short request resets the frequencies.
    return reference_text(folder, tuple(tokens), MORE)


def test_a_long_request_changes_what_transformers_gives_a_short_one_beside_it(folders: dict[str, Path]) -> None:
    model = reference_model(folders["phi3"])
    short, long = prompt(20, seed=1), prompt(70, seed=2)
    batch = torch.tensor([[0] * 50 + short, long])
    mask = (torch.arange(70) >= torch.tensor([[50], [0]])).long()
    with torch.no_grad():
        alone = model(torch.tensor([short])).logits[0, -1]
        beside = model(batch, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[0, -1]
    assert (alone - beside).norm() > 1e-2 * alone.norm()


@pytest.mark.parametrize("name", MODELS)
async def test_short_and_long_requests_in_one_batch_give_the_text_that_each_has_alone(
    folders: dict[str, Path], name: str
) -> None:
    folder = folders[name]
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    expected = [text_alone(folder, tokens) for tokens in prompts]
    async with running(folder, blocks=512) as harness:
        outputs = await asyncio.gather(*(harness.generate(tokens, max_tokens=MORE, n=2) for tokens in prompts))
        again = await asyncio.gather(*(harness.generate(tokens, max_tokens=MORE) for tokens in prompts))
        assert await harness.free_block_count() == 512
    for tokens, text, output, hit in zip(prompts, expected, outputs, again, strict=True):
        assert output.tokens == [text] * 2, f"prompt of {len(tokens)}, forked"
        assert hit.tokens[0] == text, f"prompt of {len(tokens)}, found in the cache"
        assert hit.request.usage.cached_token_count == (len(tokens) - 1) // 16 * 16


@pytest.mark.parametrize("name", MODELS)
async def test_preempted_requests_are_rotated_as_before(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    prompts = [prompt(length, seed=length) for length in (30, 31, 33, 70)]
    async with running(folder, blocks=8) as harness:
        outputs = await asyncio.gather(*(harness.generate(tokens, max_tokens=MORE) for tokens in prompts))
        assert harness.engine.scheduler.roster.preemption_count > 0
    assert [output.tokens[0] for output in outputs] == [text_alone(folder, tokens) for tokens in prompts]


# `hits` are the cached tokens that consecutive prompts of 64, 64, 100, 100 and 150 tokens find. The prompts have a
# common beginning. With some models, the first two requests recompute their keys beyond 64 tokens. With other models,
# each length needs different keys.
@pytest.mark.parametrize(
    ("name", "hits"),
    [
        ("phi3", [0, 48, 64, 96, 96]),
        ("phimoe", [0, 48, 64, 96, 96]),
        ("llama_longrope", [0, 48, 0, 96, 96]),
        ("llama_dynamic", [0, 48, 0, 96, 0]),
    ],
)
async def test_a_prompt_finds_only_keys_that_are_rotated_as_its_own(
    folders: dict[str, Path], name: str, hits: list[int]
) -> None:
    folder, tokens = folders[name], prompt(150, seed=5)
    async with running(folder) as harness:
        for length, hit in zip((ORIGINAL, ORIGINAL, 100, 100, 150), hits, strict=True):
            output = await harness.generate(tokens[:length], max_tokens=MORE)
            assert output.tokens[0] == text_alone(folder, tokens[:length]), f"prompt of {length}"
            assert output.request.usage.cached_token_count == hit, f"prompt of {length}"


# -- without each correction, texts differ -----------------------------------------------------------------------------


async def texts_of(folder: Path) -> list[tuple[int, ...]]:
    """Returns the texts of short and long requests with a common beginning; some are sent twice."""
    tokens = prompt(90, seed=3)
    async with running(folder) as harness:
        outputs = await asyncio.gather(
            *(harness.generate(tokens[:length], max_tokens=MORE) for length in (20, 50, 63, 90)),
        )
        outputs.append(await harness.generate(tokens[:50], max_tokens=MORE))
        outputs.append(await harness.generate(tokens, max_tokens=MORE))
    return [output.tokens[0] for output in outputs]


def batch_lengths(patch: pytest.MonkeyPatch) -> None:
    """Makes all requests of a batch use the frequencies of the longest request."""
    patch.setattr(TokenLengths, "of_pass", property(lambda _: None, lambda *_: None), raising=False)


def only_positions(patch: pytest.MonkeyPatch) -> None:
    """Makes chunks forget the prompt's length, so that chunks of a long prompt are rotated like a short prompt."""
    batch = build_batch

    def forgetful(chunks: Sequence[Chunk], **options: Any) -> ForwardBatch:
        return batch([replace(chunk, begun_with=0) for chunk in chunks], **options)

    patch.setattr(parts, "build_batch", forgetful)


def one_root(patch: pytest.MonkeyPatch) -> None:
    """Makes long and short requests share digests."""
    patch.setattr(Rotation, "key_of", lambda *_: b"")


def no_new_beginning(patch: pytest.MonkeyPatch) -> None:
    """Makes requests that outgrow their frequencies continue with their old keys."""
    patch.setattr(Rotation, "is_outgrown", lambda *_: False)


@pytest.mark.parametrize(
    ("name", "forget"),
    [
        ("phi3", batch_lengths),
        ("phi3", only_positions),
        ("phi3", one_root),
        ("phi3", no_new_beginning),
        ("llama_longrope", batch_lengths),
        ("llama_longrope", only_positions),
        ("llama_longrope", one_root),
        ("llama_dynamic", batch_lengths),
        ("llama_dynamic", only_positions),
        ("llama_dynamic", one_root),
    ],
)
async def test_without_one_of_the_corrections_a_text_is_another(
    folders: dict[str, Path], name: str, forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders[name]
    tokens = prompt(90, seed=3)
    expected = [text_alone(folder, tokens[:length]) for length in (20, 50, 63, 90, 50, 90)]
    assert await texts_of(folder) == expected
    forget(monkeypatch)
    assert await texts_of(folder) != expected


def test_rotary_embeddings_that_compute_otherwise_are_refused_by_name(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaRotaryEmbedding.forward
    shifted: Any = lambda part, x, position_ids: forward(part, x, position_ids + position_ids.shape[1])  # noqa: E731
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", shifted)
    with pytest.raises(UnsupportedModelError, match="LlamaRotaryEmbedding cannot be rotated by request"):
        load_model(folders["llama_longrope"])


def test_frequencies_that_follow_lengths_in_some_layers_only_are_refused_by_name() -> None:
    layers = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    config = Gemma3TextConfig(**(tiny_shape() | {"rope_parameters": layers}))
    with pytest.raises(UnsupportedModelError, match="type default and longrope differs by kind of layer"):
        rotation_of(config)
