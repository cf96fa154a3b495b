"""Checkpoints that torchao has quantized, compared with transformers' text for the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.configuration import check_configuration
from quire_worker.model.loading import load_model
from quire_worker.model.rewrites.linear import Linear
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, TorchAoConfig

from tests.worker.engine_harness import prompt, running
from tests.worker.tiny_models import tiny_shape, write_model, write_tokenizer

pytest.importorskip("torchao")
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

KINDS: dict[str, Any] = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**tiny_shape(), tie_word_embeddings=False))
    base, found = write_model(root / "base", model), {}
    for name, kind in KINDS.items():
        quantised: Any = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, quantization_config=TorchAoConfig(kind)
        )
        quantised.save_pretrained(root / name)
        write_tokenizer(root / name)
        found[name] = root / name
    return found


def own_text(folder: Path, tokens: list[int], max_tokens: int) -> tuple[int, ...]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    written = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens)),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )[0, len(tokens) :].tolist()
    return tuple(written[: written.index(0)] if 0 in written else written)


@pytest.mark.parametrize("kind", KINDS)
async def test_quantised_weights_give_transformers_text(folders: dict[str, Path], kind: str) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 17, 100)]
    async with running(folders[kind], model=load_model(folders[kind])) as harness:
        for tokens in prompts:
            output = await harness.generate(tokens, max_tokens=16)
            assert output.tokens[0] == own_text(folders[kind], tokens, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_a_cpu_leave_quantised_layers_as_they_are(folders: dict[str, Path], kind: str) -> None:
    module: Any = load_model(folders[kind]).module
    assert type(module.model.layers[0].mlp.up_proj.weight).__module__.startswith("torchao")
    assert type(module.lm_head) is Linear  # torchao leaves the head as it is.


def test_without_torchao_the_error_names_it(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes transformers believe that torchao is not installed."""
    for module in ("transformers.utils.quantization_config", "transformers.quantizers.quantizer_torchao"):
        monkeypatch.setattr(f"{module}.is_torchao_available", lambda: False)
    with pytest.raises(UnsupportedModelError, match=r"quantized by torchao, and cannot be loaded here: .*torchao"):
        load_model(folders["int8"])


def test_quantised_weights_are_not_split_over_ranks(folders: dict[str, Path]) -> None:
    check_configuration(folders["int8"], block_size=16, rank_count=1)
    with pytest.raises(UnsupportedModelError, match="quantized weights cannot be split among 2 ranks"):
        check_configuration(folders["int8"], block_size=16, rank_count=2)
