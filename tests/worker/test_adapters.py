"""Requests with different LoRA adapters, or none, in one batch; each text is compared with PEFT's."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog
import torch
from quire.errors import QuireError, Reason
from quire_worker.model.adapters.peft_folder import AdapterError, AdapterLimits, read_adapter
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.rewrites.decoder import Decoder
from quire_worker.model.rewrites.gated_mlp import GatedMlp
from quire_worker.requests.adapters import LIMITS, Adapters, request_count
from safetensors.torch import load_file, save_file

from tests.worker.adapter_folders import CONFIG, LINEARS, WEIGHTS, adapted_text, change_config, write_adapter
from tests.worker.engine_harness import Harness, Output, paged_model, prompt, reference_text, running
from tests.worker.state_models import write_with_states
from tests.worker.tiny_models import write_tiny, write_tiny_llama

MIXERS = {"Bamba": ["in_proj", "out_proj"], "Qwen3Next": ["in_proj_qkvz", "in_proj_ba", "out_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Model(NamedTuple):
    """A checkpoint, and its adapters by name; the name "" means no adapter."""

    base: Path
    adapters: dict[str, Path]

    def text(self, adapter: str, tokens: list[int], max_tokens: int) -> tuple[int, ...]:
        if not adapter:
            return reference_text(self.base, tuple(tokens), max_tokens)
        return adapted_text(self.base, self.adapters[adapter], tuple(tokens), max_tokens)

    def load(self, harness: Harness) -> None:
        for name, folder in self.adapters.items():
            harness.engine.adapters.read(name, folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    root = tmp_path_factory.mktemp("adapters")
    bases = {
        "llama": write_tiny_llama(root / "llama"),
        "gemma2": write_tiny("gemma2", root / "gemma2"),
        "gpt_oss": write_tiny("gpt_oss", root / "gpt_oss"),
        "deepseek_v3": write_tiny("deepseek_v3", root / "deepseek_v3"),
        **{name: write_with_states(name, root / name) for name in MIXERS},
    }
    targets: dict[str, list[list[str]]] = {
        "llama": [LINEARS, ["q_proj", "down_proj"]],
        "gemma2": [LINEARS, ["up_proj"]],
        "gpt_oss": [ATTENTION, ["v_proj"]],
        "deepseek_v3": [["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], ["o_proj"]],
        **{name: [[*mixers, "q_proj"], mixers[-1:]] for name, mixers in MIXERS.items()},
    }
    found = {}
    for name, base in bases.items():
        first, second = targets[name]
        adapters = {
            "a": write_adapter(root / f"{name} a", base, seed=1, targets=first),
            "b": write_adapter(root / f"{name} b", base, seed=2, targets=second, r=8, use_rslora=True),
        }
        found[name] = Model(base, adapters)
    return found


@pytest.fixture
def llama(models: dict[str, Model]) -> Model:
    return models["llama"]


def assert_texts(model: Model, asked: list[tuple[str, list[int]]], outputs: list[Output], max_tokens: int) -> None:
    for (adapter, tokens), output in zip(asked, outputs, strict=True):
        expected = model.text(adapter, tokens, max_tokens)
        assert all(text[: len(expected)] == expected for text in output.tokens), (adapter, len(tokens))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", *MIXERS])
async def test_mixed_batches_of_several_adapters_and_none_give_the_text_of_each(
    models: dict[str, Model], name: str
) -> None:
    """Sends prompts of 1 to 130 tokens twice, so that the second request is a hit in the cache.

    The prompts are prefilled in chunks of at most 64 tokens, in passes with other requests that decode.
    """
    model = models[name]
    lengths = [1, 20, 33, 130]
    asked = [(adapter, prompt(length, seed=length)) for length in lengths for adapter in ("", "a", "b")]
    async with running(model.base) as harness:
        model.load(harness)
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                outputs = await asyncio.gather(
                    *(harness.generate(tokens, adapter=adapter, max_tokens=12) for adapter, tokens in asked)
                )
                assert_texts(model, asked, outputs, 12)
        assert not [log for log in logs if log["log_level"] == "warning"], "no pass fails, to be computed in parts"
        hits = {
            (adapter, len(tokens)): output.request.usage
            for (adapter, tokens), output in zip(asked, outputs, strict=True)
        }
    assert all(usage.cached_token_count == (length - 1) // 16 * 16 for (_, length), usage in hits.items())
    texts = {adapter: model.text(adapter, prompt(33, seed=33), 12) for adapter in ("", "a", "b")}
    assert len(set(texts.values())) == 3, "the adapters must change what is said"


async def test_no_prompt_hits_what_was_computed_with_another_adapter(llama: Model) -> None:
    tokens = prompt(100, seed=1)
    async with running(llama.base) as harness:
        llama.load(harness)
        cached = []
        for adapter in ("", "a", "b", "a", ""):
            output = await harness.generate(tokens, adapter=adapter, max_tokens=4)
            cached.append(output.request.usage.cached_token_count)
            assert_texts(llama, [(adapter, tokens)], [output], 4)
    assert cached == [0, 0, 0, 96, 96]


async def test_forks_of_an_adapters_prompt_go_on_with_it(llama: Model) -> None:
    asked = [(adapter, prompt(40, seed=3)) for adapter in ("a", "", "b")]
    async with running(llama.base) as harness:
        llama.load(harness)
        outputs = await asyncio.gather(
            *(harness.generate(tokens, adapter=adapter, max_tokens=20, n=3) for adapter, tokens in asked)
        )
    assert [len(output.tokens) for output in outputs] == [3, 3, 3]
    assert_texts(llama, asked, outputs, 20)


async def test_preempted_requests_come_back_with_their_adapters(llama: Model) -> None:
    asked = [(("", "a", "b")[i % 3], prompt(40, seed=i)) for i in range(8)]
    async with running(llama.base, blocks=12) as harness:
        llama.load(harness)
        outputs = await asyncio.gather(
            *(harness.generate(tokens, adapter=adapter, max_tokens=56, ignore_eos=True) for adapter, tokens in asked)
        )
        assert harness.engine.scheduler.roster.preemption_count > 0
    assert_texts(llama, asked, outputs, 56)


async def test_adapters_survive_that_the_allocator_is_replaced_by_an_empty_one(llama: Model) -> None:
    asked = [(adapter, prompt(50, seed=9)) for adapter in ("a", "", "b")]
    async with running(llama.base) as harness:
        llama.load(harness)
        requests = [
            harness.submit(tokens, adapter=adapter, max_tokens=60, ignore_eos=True) for adapter, tokens in asked
        ]
        collected = asyncio.gather(*(harness.collect(request) for request in requests))
        while requests[0].usage.output_token_count < 10:
            await asyncio.sleep(0)
        await harness.replace_allocator()
        outputs = await collected
        again = await harness.generate(asked[0][1], adapter="a", max_tokens=4)
    assert_texts(llama, asked, outputs, 60)
    assert again.request.usage.cached_token_count == 48


def test_the_kernels_of_a_cpu_stay_in_place(llama: Model) -> None:
    """Uses Llama, because its model has merged linears and a decoder in C."""
    kinds = {type(module) for module in paged_model(llama.base).module.modules()}
    assert {Decoder, GatedMlp} <= kinds


def test_the_tokens_of_an_adapter_are_gathered_wherever_they_are(llama: Model) -> None:
    model = paged_model(llama.base)
    limits, sites = LIMITS, model.sites
    assert sites is not None
    a, b = (read_adapter(n, llama.adapters[n], sites.by_name, limits, torch.device("cpu")) for n in ("a", "b"))
    chosen = [(a, 3), (None, 2), (b, 1), (a, 2)]
    chunks = [
        Chunk([1] * count, 0, [[number]], needs_logits=True, adapter=adapter)
        for number, (adapter, count) in enumerate(chosen)
    ]
    batch = build_batch(chunks, groups=model.cache_spec.groups)
    assert [(segment.adapter, segment.tokens.tolist()) for segment in batch.adapters] == [
        (a, [0, 1, 2, 6, 7]),
        (b, [5]),
    ]


# -- loading and dropping ----------------------------------------------------------------------------------------------


async def test_adapters_come_and_go_while_requests_are_computed(llama: Model, tmp_path: Path) -> None:
    shutil.copytree(llama.adapters["a"], tmp_path / "one")
    shutil.copytree(llama.adapters["b"], tmp_path / "two")
    tokens = prompt(30, seed=5)
    async with running(llama.base) as harness:
        engine = harness.engine
        engine.adapters = Adapters(engine.model, LIMITS, tmp_path)
        busy = harness.submit(prompt(40, seed=6), max_tokens=200, ignore_eos=True)
        loaded = await engine.adapters.load("one", "one")
        assert await engine.adapters.load("one", str(tmp_path / "one")) is loaded
        output = await harness.generate(tokens, adapter="one", max_tokens=8)
        assert output.tokens[0] == adapted_text(llama.base, llama.adapters["a"], tuple(tokens), 8)
        request = harness.submit(tokens, adapter="one", max_tokens=50, ignore_eos=True)
        assert request_count(loaded, engine.open_requests) == 1
        with pytest.raises(QuireError, match="1 requests use adapter") as caught:
            engine.adapters.drop("one", request_count(loaded, engine.open_requests))
        assert caught.value.reason is Reason.ADAPTER_IN_USE
        await harness.collect(request)
        engine.adapters.drop("one", request_count(loaded, engine.open_requests))
        with pytest.raises(QuireError) as caught:
            harness.submit(tokens, adapter="one", max_tokens=2)
        assert caught.value.reason is Reason.ADAPTER_UNKNOWN
        # A second adapter is loaded under the same name. Its requests must not hit cached blocks of the first adapter.
        await engine.adapters.load("one", "two")
        output = await harness.generate(tokens, adapter="one", max_tokens=8)
        assert output.request.usage.cached_token_count == 0
        assert output.tokens[0] == adapted_text(llama.base, llama.adapters["b"], tuple(tokens), 8)
        with pytest.raises(QuireError) as caught:
            await engine.adapters.load("one", "one")
        assert caught.value.reason is Reason.ADAPTER_EXISTS
        await harness.collect(busy)


@pytest.mark.parametrize("folder", ["..", "../elsewhere", "/etc", "missing", "link"])
async def test_a_call_loads_only_from_below_its_folder(llama: Model, tmp_path: Path, folder: str) -> None:
    shutil.copytree(llama.adapters["a"], tmp_path / "elsewhere")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    adapters = Adapters(paged_model(llama.base), LIMITS, tmp_path / "root")
    with pytest.raises(QuireError, match="not a folder inside") as caught:
        await adapters.load("x", folder)
    assert caught.value.reason is Reason.ADAPTER_UNUSABLE


async def test_without_a_folder_no_call_loads(llama: Model) -> None:
    with pytest.raises(QuireError, match="operator has set no folder") as caught:
        await Adapters(paged_model(llama.base)).load("a", str(llama.adapters["a"]))
    assert caught.value.reason is Reason.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (AdapterLimits(1, 64, 1 << 30), "1 adapters are loaded"),
        (AdapterLimits(2, 3, 1 << 30), "r = 4; this worker supports at most 3"),
        (AdapterLimits(2, 64, 1 << 10), "only 1,024 are left"),
    ],
)
def test_limits_are_kept(llama: Model, limits: AdapterLimits, named: str) -> None:
    adapters = Adapters(paged_model(llama.base), limits)
    with pytest.raises(AdapterError, match=named):
        [adapters.read(name, llama.adapters["a"]) for name in ("first", "second")]


@pytest.mark.parametrize("name", ["", "a b", "../a", "x" * 65, "-a", "ä"])
def test_names_are_checked(llama: Model, name: str) -> None:
    with pytest.raises(AdapterError, match="1 to 64 letters"):
        Adapters(paged_model(llama.base)).read(name, llama.adapters["a"])


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


DOWN = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "dora": (lambda folder: change_config(folder, use_dora=True), "use_dora"),
    "bias": (lambda folder: change_config(folder, bias="all"), "bias"),
    "lora bias": (lambda folder: change_config(folder, lora_bias=True), "lora_bias"),
    "whole modules": (lambda folder: change_config(folder, modules_to_save=["lm_head"]), "modules_to_save"),
    "parameters": (lambda folder: change_config(folder, target_parameters=["experts"]), "target_parameters"),
    "ranks by layer": (lambda folder: change_config(folder, rank_pattern={"q_proj": 2}), "rank_pattern"),
    "an option of tomorrow": (lambda folder: change_config(folder, use_more=1), "use_more"),
    "another method": (lambda folder: change_config(folder, peft_type="IA3"), "IA3"),
    "no rank": (lambda folder: change_config(folder, r=0), "r = 0"),
    "no scale": (lambda folder: change_config(folder, lora_alpha="x"), "lora_alpha"),
    "a target that is not there": (
        lambda folder: change_config(folder, target_modules=[*LINEARS, "w1"]),
        "'w1', but",
    ),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), f"has no readable {CONFIG}"),
    "a broken configuration": (lambda folder: (folder / CONFIG).write_text("["), "not a JSON object"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no readable {WEIGHTS}"),
    "weights cut off": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]),
        "truncated: tensor",
    ),
    "half of a pair": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.pop(DOWN)),
        "only one of lora_A and lora_B for model.layers.0.self_attn.q_proj",
    ),
    "another shape": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({DOWN: torch.zeros(4, 32)})),
        r"q_proj.lora_A.weight is F32 \[4, 32\], but the model needs floats of \[4, 64\]",
    ),
    "integers": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({DOWN: torch.zeros(4, 64).int()})),
        "q_proj.lora_A.weight is I32",
    ),
    "not a number": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({DOWN: torch.full((4, 64), torch.nan)})),
        "NaN or infinity in layer model.layers.0.self_attn.q_proj",
    ),
    "a layer that the model lacks": (
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({DOWN.replace("layers.0", "layers.7"): torch.zeros(4, 64)})
        ),
        "model.layers.7.self_attn.q_proj, which is not a layer",
    ),
    "the embedding": (
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({"model.embed_tokens.lora_embedding_A": torch.zeros(4, 320)})
        ),
        "lora_embedding_A, which is not part of plain LoRA",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_served_is_refused_by_name(llama: Model, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(llama.adapters["a"], tmp_path / "adapter")
    damage, named = DAMAGES[name]
    damage(folder)
    with pytest.raises(AdapterError, match=named) as caught:
        Adapters(paged_model(llama.base)).read("a", folder)
    assert "\n" not in str(caught.value)


def test_layers_that_latent_attention_does_not_call_are_refused(models: dict[str, Model], tmp_path: Path) -> None:
    """DeepSeek's `kv_b_proj` is merged into the queries, so an adapter for it would be ignored silently."""
    model = models["deepseek_v3"]
    folder = write_adapter(tmp_path / "adapter", model.base, seed=1, targets=["kv_b_proj"])
    with pytest.raises(AdapterError, match="kv_b_proj, which is not a layer of this model, or"):
        Adapters(paged_model(model.base)).read("a", folder)


def test_an_adapters_digest_follows_its_weights_and_configuration(llama: Model, tmp_path: Path) -> None:
    def digest(folder: Path) -> bytes:
        return Adapters(paged_model(llama.base)).read("x", folder).digest

    folder = shutil.copytree(llama.adapters["a"], tmp_path / "adapter")
    seen = [digest(llama.adapters["a"])]
    assert digest(folder) == seen[0]
    change_config(folder, lora_alpha=7)
    seen.append(digest(folder))
    change_tensors(folder, lambda tensors: tensors[DOWN].mul_(2))
    seen.append(digest(folder))
    assert len({*seen}) == 3
    assert all(len(each) == 32 for each in seen)


def test_sites_refuse_tokens_that_are_not_those_of_the_pass(llama: Model) -> None:
    model: Any = paged_model(llama.base)
    adapter = Adapters(model).read("a", llama.adapters["a"])
    site = model.sites.by_name["model.layers.0.self_attn.q_proj"]
    chunk = Chunk([1, 2], 0, [[0]], needs_logits=True, adapter=adapter)
    batch = build_batch([chunk], groups=model.cache_spec.groups)
    with model.sites.during(batch.adapters, 2), pytest.raises(Exception, match="differs from the pass"):
        site.add(torch.zeros(3, 64), torch.zeros(3, 64))
