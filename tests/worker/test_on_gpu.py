"""Every family of models on a GPU, compared token by token with transformers' own `generate` on the CPU.

`test_families.py` and `test_states.py` run the same scenes on a CPU. Here decode runs twice: as CUDA graphs if the
model can be captured, and launched by the host.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from quire import Client
from quire.local import LocalStack
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel

from tests.worker.engine_harness import BLOCK_SIZE, prompt, reference_text, running
from tests.worker.state_models import STATE_FAMILIES, write_with_states
from tests.worker.test_families import LENGTHS
from tests.worker.tiny_models import FAMILIES, write_tiny, write_tiny_llama, write_tiny_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Models that can be captured in a CUDA graph. Three kinds are left out: models with recurrent states (the host moves
# the states), models with float32 experts (torch picks experts on the host), and Gemma-3n (the host computes values).
CAPTURED = ["llama", "qwen3", "mistral", "gemma2", "gemma3"]
LAUNCHED = ["llama", "qwen3", *FAMILIES, *STATE_FAMILIES]


def write(name: str, folder: Path) -> Path:
    if name in STATE_FAMILIES:
        return write_with_states(name, folder)
    if name in FAMILIES:  # Kernels need at least 16 rotary dims in latents.
        wider = {"qk_rope_head_dim": 16, "head_dim": 16} if name.startswith("deepseek") else {}
        return write_tiny(name, folder, **wider)
    return {"llama": write_tiny_llama, "qwen3": write_tiny_qwen3}[name](folder)


def on_gpu(folder: Path) -> PagedModel:
    return load_model(folder, block_size=BLOCK_SIZE, device="cuda")


@pytest.mark.parametrize(
    ("name", "graph_batch_max"), [*((each, 0) for each in LAUNCHED), *((each, 32) for each in CAPTURED)]
)
async def test_mixed_batches_prefix_hits_and_forks_give_the_text_of_transformers(
    name: str, graph_batch_max: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(name, tmp_path / "model")
    model = on_gpu(folder)
    blocks = 256 * len(model.cache_spec.groups)
    async with running(folder, blocks=blocks, model=model, graph_batch_max=graph_batch_max) as harness:
        played = await harness.play(LENGTHS)
        assert await harness.free_block_count() == blocks
    assert "decode runs without CUDA graphs" not in capsys.readouterr().out
    played.assert_text_of_transformers(folder)


@pytest.mark.parametrize("swap_slots", [0, 64], ids=["computed again", "swapped"])
async def test_requests_that_outgrow_their_pool_finish_with_the_same_text(tmp_path: Path, swap_slots: int) -> None:
    folder = write_tiny("gemma3", tmp_path / "model")
    model = on_gpu(folder)
    prompts = [prompt(1 + i, seed=i) for i in range(4)]
    blocks = 4 * len(model.cache_spec.groups)
    async with running(folder, blocks=blocks, model=model, swap_slots=swap_slots, graph_batch_max=4) as harness:
        outputs = await asyncio.gather(
            *(harness.generate(tokens, max_tokens=56, ignore_eos=True) for tokens in prompts)
        )
        preemptions = harness.engine.scheduler.roster.preemption_count
    assert preemptions > 0
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = reference_text(folder, tuple(tokens), 56)
        assert output.tokens[0][: len(expected)] == expected
        assert len(output.tokens[0]) == 56


def test_a_worker_that_sizes_its_own_pool_streams_the_text_of_transformers(tmp_path: Path) -> None:
    # A separate process compiles kernels, measures the largest batch and captures decode.
    prompts = [prompt(length, seed=length) for length in (1, 16, 21, 130)]
    folder = write_tiny_llama(tmp_path / "model")
    logs = tmp_path / "logs"
    logs.mkdir()
    arguments = ["--device", "cuda", "--dtype", "float32", "--gpu-memory-utilization", "0.3", "--log-format", "json"]
    stack = LocalStack(folder, worker_arguments=arguments, log_folder=logs)
    with stack, Client(stack.worker_address) as client:
        outputs = [client.generate(tokens, max_tokens=20) for tokens in prompts]
        again = client.generate(prompts[3], max_tokens=20, n=2)
    for tokens, output in zip(prompts, outputs, strict=True):
        assert tuple(output.samples[0].token_ids) == reference_text(folder, tuple(tokens), 20)
    assert again.usage.cached_token_count == 128
    assert [each.token_ids for each in again.samples] == [outputs[3].samples[0].token_ids] * 2
    log = "".join(path.read_text() for path in logs.iterdir())
    assert "TritonPagedAttention" in log
    assert "decode runs without CUDA graphs" not in log
