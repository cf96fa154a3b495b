"""The whole worker on the Triton kernels, in a separate process where Triton interprets them on CPU tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire import Client
from quire.local import LocalStack
from quire_worker.sampling.choice import sample
from quire_worker.sampling.params import SamplingParams
from quire_worker.sampling.random_numbers import new_generator

from tests.worker.engine_harness import reference_model, reference_text
from tests.worker.tiny_models import write_tiny, write_tiny_llama, write_tiny_qwen3

pytestmark = pytest.mark.interpreted

OUTPUT_TOKENS = 5
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=3, min_p=0.01)


def random_prompt(length: int) -> list[int]:
    dice = random.Random(length)
    return [dice.randrange(1, 320) for _ in range(length)]


def drawn_reference(folder: Path, prompt: list[int]) -> tuple[int, ...]:
    """Returns a text that is drawn in plain torch from transformers' logits."""
    model, generator, tokens = reference_model(folder), new_generator(DRAWN.seed, 0), list(prompt)
    for _ in range(OUTPUT_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[:, -1].float()
        tokens += sample(logits, [DRAWN], [generator]).tolist()
    return tuple(tokens[len(prompt) :])


def write_two_groups(folder: Path) -> Path:
    """Writes a model with a sliding window and full attention, with sinks."""
    layer_types = ["sliding_attention", "full_attention"]
    return write_tiny("gpt_oss", folder, num_hidden_layers=2, layer_types=layer_types)


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_qwen3, write_two_groups])
def test_text_through_the_kernels_is_that_of_transformers(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    folder = write(tmp_path / "model")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # Only the worker imports Triton.
    prompts = [random_prompt(length) for length in (1, 16, 21, 40)]
    logs = tmp_path / "logs"
    logs.mkdir()
    arguments = ["--blocks", "64", "--max-batch-tokens", "24", "--log-format", "json"]
    stack = LocalStack(folder, worker_arguments=arguments, log_folder=logs)
    with stack, Client(stack.worker_address) as client:
        # The longest prompt takes two chunks. The second request with this prompt hits the cache, and its two samples
        # share the prefix.
        outputs = [client.generate(prompt, max_tokens=OUTPUT_TOKENS) for prompt in prompts]
        again = client.generate(prompts[3], max_tokens=OUTPUT_TOKENS, n=2)
        drawn = client.generate(
            prompts[2], max_tokens=OUTPUT_TOKENS, temperature=DRAWN.temperature, top_k=DRAWN.top_k, top_p=DRAWN.top_p,
            seed=DRAWN.seed, min_p=DRAWN.min_p,
        )  # fmt: skip
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tuple(output.samples[0].token_ids) == reference_text(folder, tuple(prompt), OUTPUT_TOKENS)
    assert tuple(drawn.samples[0].token_ids) == drawn_reference(folder, prompts[2])
    assert again.usage.cached_token_count == 32
    assert [sample.token_ids for sample in again.samples] == [outputs[3].samples[0].token_ids] * 2
    lines = [json.loads(line) for path in logs.iterdir() for line in path.read_text().splitlines() if "{" in line]
    assert [line["attention"] for line in lines if line["event"] == "model loaded"] == ["TritonPagedAttention"]
