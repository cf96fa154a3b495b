"""Two ranks: this process is rank 0, with an engine and an allocator, and another one follows it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import QuireError, Reason
from quire_worker.execution.leader import Leader, led_by
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.paged_model import PagedModel, check_rank_count, load_model
from quire_worker.ranks.group import RankGroup

from tests.worker.engine_harness import Harness, prompt, reference_text, running
from tests.worker.second_rank import join
from tests.worker.tiny_models import write_tiny, write_tiny_llama

LENGTHS = [1, 15, 16, 17, 33, 48, 100, 200]
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Pair:
    """This rank's end of the group, and the process of the other one."""

    group: RankGroup
    process: subprocess.Popen[str]

    def load(self, folder: Path, *, blocks_per_group: int = 256, **job: Any) -> PagedModel:
        """Loads a model on both ranks."""
        assert self.process.stdin is not None
        line = json.dumps({"folder": str(folder), "blocks_per_group": blocks_per_group, **job})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return load_model(folder, dtype=job.get("dtype", "auto"), group=self.group)

    @asynccontextmanager
    async def running(self, folder: Path, *, blocks_per_group: int = 256, **job: Any) -> AsyncIterator[Harness]:
        """An engine whose model both ranks compute."""
        model = self.load(folder, blocks_per_group=blocks_per_group, **job)
        lost: list[str] = []
        leader = Leader(self.group, silence_s=0.5, on_lost=lost.append)
        blocks = blocks_per_group * len(model.cache_spec.groups)
        async with running(folder, blocks=blocks, model=led_by(leader, model)) as harness:
            yield harness
            assert await harness.free_block_count() == blocks
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
    group = join(0, rendezvous)
    try:
        yield Pair(group, process)
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(30) == 0
    finally:
        group.close()
        process.kill()
        process.wait()


def write(name: str, folder: Path) -> Path:
    """A tiny model; Llama by its KV heads."""
    if name.startswith("llama"):
        return write_tiny_llama(folder, heads=4, kv_heads=int(name[-1]))
    return write_tiny(name, folder)


# The KV heads of one rank: half of them; the one that both have; of gemma2, gpt_oss and deepseek_v3 as their families are.
@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [("llama-4", 2), ("llama-1", 1), ("gemma2", 1), ("gpt_oss", 1), ("deepseek_v3", 1), ("gemma3n", 1), ("llama4", 1)],
)
async def test_two_ranks_give_the_text_of_transformers(pair: Pair, name: str, kv_heads: int, tmp_path: Path) -> None:
    folder = write(name, tmp_path)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    async with pair.running(folder) as harness:
        tasks = []
        for tokens in prompts:  # one after the other, so that prefills meet decodes
            tasks.append(asyncio.create_task(harness.generate(tokens, max_tokens=12)))
            await asyncio.sleep(0)
        outputs = await asyncio.gather(*tasks)
        again = await asyncio.gather(*(harness.generate(tokens, max_tokens=12, n=2) for tokens in prompts))
        assert {layer.kv_head_count for layer in harness.engine.cache.spec.layers} == {kv_heads}
    for tokens, output, hit in zip(prompts, outputs, again, strict=True):
        expected = reference_text(folder, tuple(tokens), 12)
        assert output.tokens[0] == expected, f"prompt of {len(tokens)}"
        assert hit.tokens == [expected] * 2, f"prompt of {len(tokens)}, found in the cache and forked"
        assert hit.request.usage.cached_token_count == (len(tokens) - 1) // 16 * 16
