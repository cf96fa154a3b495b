"""The model, the memory or the tokenizer of a worker fails. The failing request ends with a reason, concurrent requests
get the text of transformers, every block is free in the end, and the worker survives."""

from __future__ import annotations

import asyncio
import random
import resource
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from quire import AsyncClient
from quire.errors import QuireError, Reason
from quire.local import ServerProcess
from quire_worker.model.tokenizer import Tokenizer

from tests.faults.scene import Place, pool_of
from tests.faults.text_scene import is_ready, logged, worker_process
from tests.worker.broken_models import UNENCODABLE, break_decoder, break_encoder, poison, single_character_token
from tests.worker.engine_harness import reference_text
from tests.worker.tiny_models import write_tiny_qwen3

POISON = 5
LENGTH = 400
SECRET = "xyzzy plugh"

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]


def prompt(seed: int, length: int = 20) -> list[int]:
    dice = random.Random(seed)
    return [dice.choice([token for token in range(1, 320) if token != POISON]) for _ in range(length)]


@dataclass
class Scene:
    """A worker with a partly broken model and tokenizer, and the same model without faults."""

    process: ServerProcess
    place: Place
    client: AsyncClient
    healthy: Path
    log: Path
    victim: list[int]  # a prompt with text that the tokenizer cannot decode

    @asynccontextmanager
    async def company(self) -> AsyncIterator[None]:
        """Generates texts until the block ends. Checks that they are right, and that every cache block is free
        afterwards."""
        prompts, is_over = [prompt(100 + i) for i in range(3)], asyncio.Event()

        async def stream(tokens: list[int]) -> None:
            expected = reference_text(self.healthy, tuple(tokens), LENGTH)
            while not is_over.is_set():
                told = await self.client.generate(tokens, max_tokens=LENGTH, ignore_eos=True)
                assert told.samples[0].token_ids[: len(expected)] == expected

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(tokens)) for tokens in prompts]
            while (await self.client.status()).running_count < len(prompts):
                pass
            yield
            assert not any(task.done() for task in tasks), "they should still have been streaming"
            is_over.set()
        while any(state > 1 for state in (await pool_of(self.place, "default")).block_states):
            pass
        assert self.process.process.poll() is None
        assert SECRET not in self.log.read_text()

    async def failures(self) -> dict[str, float]:
        """Returns the failures by kind, as the worker's metrics count them."""
        page = await asyncio.to_thread(urllib.request.urlopen, f"http://{self.process.metrics_address}/metrics")
        families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples]
        return {s.labels["kind"]: s.value for s in samples if s.name == "quire_worker_failures_total"}

    async def failure_of(self, tokens: str | list[int], kind: str) -> Reason:
        """Returns the reason of a request's failure. Checks that the worker counts the failure, and logs it with the
        request's id."""
        before = await self.failures()
        with pytest.raises(QuireError) as caught:
            await self.client.generate(tokens, max_tokens=40, ignore_eos=True, request_id=f"doomed-{kind}")
        assert await self.failures() == {**before, kind: before[kind] + 1}
        assert await logged(self.log, f"doomed-{kind}")
        return caught.value.reason


def break_model(healthy: Path, folder: Path) -> list[int]:
    """Writes a broken copy of a model; returns a prompt with text that its tokenizer cannot decode."""
    shutil.copytree(healthy, folder)
    decode = Tokenizer(healthy).decode
    spared = {token for i in range(3) for token in reference_text(healthy, tuple(prompt(100 + i)), LENGTH)}
    for seed in range(100):
        text = reference_text(healthy, tuple(prompt(seed)), 40)
        place = single_character_token(text, spared, decode)
        if place is not None:
            break_decoder(folder, decode([text[place]]))
            break_encoder(folder)
            poison(folder, POISON)
            return prompt(seed)
    raise AssertionError("the others use every character")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("parts")
    healthy = write_tiny_qwen3(folder / "healthy")
    victim = break_model(healthy, folder / "broken")
    place = Place(folder / "allocator")
    await place.start()
    process = worker_process(folder / "worker", place.address, "--log-format", "json", model=folder / "broken")
    try:
        await is_ready(process)
        async with AsyncClient(process.address) as client:
            yield Scene(process, place, client, healthy, folder / "worker" / "log", victim)
    finally:
        process.stop()
        place.stop()


async def test_a_request_whose_logits_are_nan_ends_alone(scene: Scene) -> None:
    async with scene.company():
        for _ in range(3):
            assert await scene.failure_of([*prompt(1), POISON, *prompt(2)], "not_finite") is Reason.MODEL_FAILED


async def test_nothing_that_held_nan_is_found_by_the_next_prompt(scene: Scene) -> None:
    tokens = [*prompt(3, 64), POISON, *prompt(4, 64)]
    assert await scene.failure_of(tokens, "not_finite") is Reason.MODEL_FAILED
    shared = await scene.client.generate(tokens[:64] + prompt(5), max_tokens=1, ignore_eos=True)
    assert shared.usage.cached_token_count == 0


async def test_a_text_that_the_tokenizer_panics_at_is_refused_alone(scene: Scene) -> None:
    async with scene.company():
        assert await scene.failure_of(f"{SECRET} {UNENCODABLE}", "tokenizer") is Reason.TOKENIZER_FAILED


async def test_a_token_that_the_tokenizer_panics_at_ends_its_text_alone(scene: Scene) -> None:
    async with scene.company():
        assert await scene.failure_of(scene.victim, "tokenizer") is Reason.TOKENIZER_FAILED


async def test_a_process_that_may_have_little_more_memory_computes_in_parts(tmp_path: Path) -> None:
    place = Place(tmp_path / "allocator")
    await place.start()
    # With this threshold, malloc takes pieces of 64 KiB or more from the system, and returns them when they are freed.
    # A single arena reserves no address space. So loading the model leaves no free memory that the limit would not
    # count.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    process = worker_process(tmp_path / "worker", place.address, "--max-batch-tokens", "4096", environment=environment)
    tokens = [1 + i * 7 % 2000 for i in range(3500)]
    try:
        await is_ready(process)
        async with AsyncClient(process.address) as client:
            limit = psutil.Process(process.process.pid).memory_info().vms + (10 << 20)
            resource.prlimit(process.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            short_of_memory = await client.generate(tokens, max_tokens=10, ignore_eos=True, namespace="one")
            resource.prlimit(process.process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            undisturbed = await client.generate(tokens, max_tokens=10, ignore_eos=True, namespace="two")
        assert undisturbed.usage.cached_token_count == 0
        assert short_of_memory.samples == undisturbed.samples
        assert await logged(tmp_path / "worker" / "log", "forward pass failed")
    finally:
        process.stop()
        place.stop()
