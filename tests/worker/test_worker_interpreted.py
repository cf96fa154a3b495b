"""The whole worker on the Triton kernels: a process of its own, in which Triton interprets them, on CPU tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from quire import Client
from quire.local import LocalStack

from tests.worker.engine_harness import reference_text
from tests.worker.tiny_models import write_tiny_llama, write_tiny_qwen3

OUTPUT_TOKENS = 5


def random_prompt(length: int) -> list[int]:
    dice = random.Random(length)
    return [dice.randrange(1, 320) for _ in range(length)]


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_qwen3])
def test_greedy_text_through_the_kernels_is_that_of_transformers(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    folder = write(tmp_path / "model")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # inherited by the worker alone: the allocator knows no Triton
    prompts = [random_prompt(length) for length in (1, 16, 21, 40)]
    logs = tmp_path / "logs"
    logs.mkdir()
    arguments = ["--blocks", "32", "--max-batch-tokens", "24", "--log-format", "json"]
    stack = LocalStack(folder, worker_arguments=arguments, log_folder=logs)
    with stack, Client(stack.worker_address) as client:
        # The longest prompt comes in two chunks; the second time its prefix is found, and two samples share it.
        outputs = [client.generate(prompt, max_tokens=OUTPUT_TOKENS) for prompt in prompts]
        again = client.generate(prompts[3], max_tokens=OUTPUT_TOKENS, n=2)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert tuple(output.samples[0].token_ids) == reference_text(folder, tuple(prompt), OUTPUT_TOKENS)
    assert again.usage.cached_token_count == 32
    assert [sample.token_ids for sample in again.samples] == [outputs[3].samples[0].token_ids] * 2
    lines = [json.loads(line) for path in logs.iterdir() for line in path.read_text().splitlines() if "{" in line]
    assert [line["attention"] for line in lines if line["event"] == "model loaded"] == ["TritonPagedAttention"]
