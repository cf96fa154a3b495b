"""Two ranks: this process is rank 0 with an engine and an allocator, and a second process follows as rank 1."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import QuireError, Reason
from quire.types import GroupKind
from quire_cpu.library import Library, load
from quire_worker.execution.leader import Leader, led_by
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.configuration import check_configuration
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.splitting import attention
from quire_worker.model.splitting.heads import heads_of_rank
from quire_worker.model.splitting.linear_parts import Summed
from quire_worker.ranks.crew import Crew

from tests.worker.engine_harness import Harness, prompt, reference_text, running
from tests.worker.second_rank import join
from tests.worker.state_models import STATE_FAMILIES, write_with_states
from tests.worker.tiny_models import write_tiny, write_tiny_llama

LENGTHS = [1, 15, 16, 17, 33, 48, 100, 200]
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Pair:
    """The crew as rank 0 sees it, and the process of rank 1."""

    crew: Crew
    process: subprocess.Popen[str]

    def load(self, folder: Path, *, blocks_per_group: int = 256, **job: Any) -> PagedModel:
        """Loads a model on both ranks."""
        assert self.process.stdin is not None
        line = json.dumps({"folder": str(folder), "blocks_per_group": blocks_per_group, **job})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return load_model(folder, dtype=job.get("dtype", "auto"), crew=self.crew)

    @asynccontextmanager
    async def running(self, folder: Path, *, blocks_per_group: int = 256, **job: Any) -> AsyncIterator[Harness]:
        """Runs an engine with a model that both ranks compute."""
        model = self.load(folder, blocks_per_group=blocks_per_group, **job)
        lost: list[str] = []
        leader = Leader(self.crew, silence_s=0.5, on_lost=lost.append)
        blocks = blocks_per_group * len(model.cache_spec.groups)
        try:
            async with running(folder, blocks=blocks, model=led_by(leader, model)) as harness:
                yield harness
                assert await harness.free_block_count() == blocks
        finally:
            leader.stop()
        assert not lost


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    torch.set_num_threads(1)
    rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.worker.second_rank", str(rendezvous)],
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
    )
    crew = join(0, rendezvous)
    try:
        yield Pair(crew, process)
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(30) == 0
    finally:
        crew.close()
        process.kill()
        process.wait()


def write(name: str, folder: Path) -> Path:
    """Writes a tiny model: one of the families, or "llama:" with a number of KV heads."""
    family, _, kv_heads = name.partition(":")
    if family in STATE_FAMILIES:
        return write_with_states(family, folder)
    return write_tiny_llama(folder, heads=4, kv_heads=int(kv_heads)) if kv_heads else write_tiny(family, folder)


def split_modules(model: PagedModel) -> Counter[str]:
    """Returns how many modules of each name are split between the ranks."""
    return Counter(name.rpartition(".")[2] for name, part in model.module.named_modules() if isinstance(part, Summed))


ATTENTION, MLP, EXPERTS, SHARED = "self_attn", "mlp", "experts", "shared_experts"


# `parts` counts the split modules by name. `kv_heads` counts the KV heads of one rank: half of the model's, or its only
# KV head.
@pytest.mark.parametrize(
    ("name", "parts", "kv_heads"),
    [
        ("llama:4", {ATTENTION: 2, MLP: 2}, 2),
        ("llama:1", {ATTENTION: 2, MLP: 2}, 1),
        ("gemma2", {ATTENTION: 4, MLP: 4}, 1),
        # Two MLPs of Gemma-3n select the largest of all elements, so these MLPs are not split.
        ("gemma3n", {ATTENTION: 6, MLP: 4}, 1),
        ("gpt_oss", {ATTENTION: 4, EXPERTS: 4}, 1),
        ("llama4", {ATTENTION: 4, EXPERTS: 2, "shared_expert": 2, "feed_forward": 2}, 1),
        ("deepseek_v3", {ATTENTION: 2, MLP: 1, EXPERTS: 1, SHARED: 1}, 1),
        ("Bamba", {ATTENTION: 1, "feed_forward": 4}, 1),
        ("Qwen3Next", {ATTENTION: 1, EXPERTS: 4, "shared_expert": 4}, 1),
        ("MiniMax", {ATTENTION: 1, EXPERTS: 4}, 1),
    ],
)
async def test_two_ranks_give_the_text_of_transformers(
    pair: Pair, name: str, parts: dict[str, int], kv_heads: int, tmp_path: Path
) -> None:
    folder = write(name, tmp_path)
    async with pair.running(folder) as harness:
        played = await harness.play(LENGTHS, max_tokens=12)
        layers = harness.engine.cache.spec.layers
        assert {layer.kv_head_count for layer in layers if layer.kind is not GroupKind.STATE} == {kv_heads}
        assert split_modules(harness.engine.model) == parts
    played.assert_text_of_transformers(folder)


async def test_requests_that_outgrow_their_pool_are_preempted_on_both_ranks(pair: Pair, tmp_path: Path) -> None:
    folder = write("llama:2", tmp_path)
    prompts = [prompt(1 + i, seed=i) for i in range(4)]
    async with pair.running(folder, blocks_per_group=4) as harness:
        outputs = await asyncio.gather(
            *(harness.generate(tokens, max_tokens=56, ignore_eos=True) for tokens in prompts)
        )
        assert harness.engine.scheduler.roster.preemption_count > 0
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = reference_text(folder, tuple(tokens), 56)
        assert output.tokens[0][: len(expected)] == expected
        assert len(output.tokens[0]) == 56


@pytest.mark.parametrize(
    ("error", "reason"), [("memory", Reason.OUT_OF_MEMORY), ("value", Reason.MODEL_FAILED)], ids=["memory", "value"]
)
async def test_a_pass_that_fails_on_one_rank_is_tried_again_in_parts_on_both(
    pair: Pair, error: str, reason: Reason, tmp_path: Path
) -> None:
    folder, bad = write("llama:2", tmp_path), 319
    prompts = [[token for token in prompt(length, seed=length) if token != bad] for length in (5, 20, 40)]
    async with pair.running(folder, fails=(bad, error)) as harness:
        requests = [harness.submit(tokens, max_tokens=8) for tokens in [[5, bad, 7], *prompts]]
        outputs = [await harness.collect(request) for request in requests[1:]]
        with pytest.raises(QuireError) as raised:
            await harness.collect(requests[0])
        assert harness.engine.telemetry.retry_count > 0
    assert raised.value.reason is reason
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens[0] == reference_text(folder, tuple(tokens), 8)


async def test_half_precision_is_added_up_and_rewritten_modules_add_up_too(pair: Pair, tmp_path: Path) -> None:
    folder = write("llama:2", tmp_path)
    async with pair.running(folder, dtype="bfloat16") as harness:  # Loading compares the logits with transformers'.
        output = await harness.generate(prompt(40), max_tokens=8, ignore_eos=True)
        names = {type(part).__name__ for part in harness.engine.model.module.modules()}
    assert len(output.tokens[0]) == 8
    if isinstance(load(), Library):
        assert {"MergedAttention", "GatedMlp"} <= names
        assert "Decoder" not in names  # The CPU's decoder cannot sum over ranks.


def test_a_part_that_is_wrong_is_found_at_load(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives this rank's attention the heads of the other rank; the MLPs' sums stay right."""
    folder = write("llama:4", tmp_path)
    monkeypatch.setattr(
        attention, "heads_of_rank", lambda *counts, rank, size: heads_of_rank(*counts, rank=1, size=size)
    )
    with pytest.raises(UnsupportedModelError, match="with paged attention its logits differ"):
        pair.load(folder)


def test_ranks_that_heads_do_not_divide_by_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = write("llama:2", tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"its 4 attention heads cannot be divided evenly; .* may be 2, 4"):
        check_configuration(folder, block_size=16, rank_count=3)
