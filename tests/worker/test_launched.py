"""Passes that are launched before the previous pass's tokens are read give the same texts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire_worker.execution.launched import Launched, TokensToCome
from quire_worker.execution.parts import Awaiting
from quire_worker.execution.runner import Runner

from tests.worker.engine_harness import prompt, reference_text, running
from tests.worker.launching import launch_passes
from tests.worker.test_families import LENGTHS
from tests.worker.tiny_models import write_tiny, write_tiny_llama

WAIT_S = 5


@pytest.fixture(autouse=True)
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_passes(monkeypatch)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("launched") / "llama")


@pytest.fixture
def launched_count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects how many tokens each launched pass still needs from the previous pass."""
    counts: list[int] = []
    launch = Runner._likeliest

    def noted(self: Runner, layout: Any, to_come: TokensToCome | None) -> torch.Tensor | None:
        counts.append(0 if to_come is None else len(to_come.tokens))
        return launch(self, layout, to_come)

    monkeypatch.setattr(Runner, "_likeliest", noted)
    return counts


@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_mixed_batches_prefix_hits_and_forks_give_the_text_of_transformers(
    name: str, llama: Path, tmp_path: Path, launched_count: list[int]
) -> None:
    folder = llama if name == "llama" else write_tiny(name, tmp_path / "model")
    async with running(folder) as harness:
        played = await harness.play(LENGTHS)
    played.assert_text_of_transformers(folder)
    assert sum(count > 0 for count in launched_count) > 10


async def test_a_pass_is_launched_before_the_tokens_of_the_one_before_are_read(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = threading.Semaphore(0)  # counts passes that were launched behind another pass
    finish, launch = Runner._finish, Runner._likeliest
    waited: list[bool] = []

    def launched(self: Runner, layout: Any, to_come: TokensToCome | None) -> torch.Tensor | None:
        if to_come is not None:
            behind.release()
        return launch(self, layout, to_come)

    def finished(self: Runner, *of_pass: Any) -> Any:
        if len(waited) < 20:
            waited.append(behind.acquire(timeout=WAIT_S))
        return finish(self, *of_pass)

    monkeypatch.setattr(Runner, "_likeliest", launched)
    monkeypatch.setattr(Runner, "_finish", finished)
    tokens = prompt(20)
    async with running(llama) as harness:
        harness.engine._plans_beside = True  # as on a GPU: plans also during passes for first tokens
        output = await harness.generate(tokens, max_tokens=40, ignore_eos=True)
    expected = reference_text(llama, tuple(tokens), 40)
    assert output.tokens[0][: len(expected)] == expected
    assert waited == [True] * 20


async def test_sampled_and_greedy_requests_take_turns_in_one_batch(llama: Path, launched_count: list[int]) -> None:
    """A pass that samples runs after the launched passes, and the engine waits for it."""
    prompts = [prompt(20 + i, seed=i) for i in range(4)]
    async with running(llama) as harness:
        greedy = [asyncio.create_task(harness.generate(each, max_tokens=60, ignore_eos=True)) for each in prompts]
        while sum(count > 0 for count in launched_count) < 5:
            await asyncio.sleep(0)
        drawn = [await harness.generate(prompt(9), max_tokens=5, temperature=0.8, seed=1) for _ in range(3)]
        outputs = await asyncio.gather(*greedy)
    assert len({each.tokens[0] for each in drawn}) == 1
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = reference_text(llama, tuple(tokens), 60)
        assert output.tokens[0][: len(expected)] == expected


def test_tokens_go_to_their_places_and_what_is_not_finite_becomes_token_0() -> None:
    tokens = torch.tensor([7, -1, 9], dtype=torch.int32)
    ids = torch.full((3,), 5)
    TokensToCome.of(tokens, [Awaiting([0], i, i) for i in range(3)]).put_into(ids)
    assert ids.tolist() == [7, 0, 9]
    ids = torch.full((4,), 5)
    TokensToCome.of(tokens, [Awaiting([0], 3, 0), Awaiting([0], 1, 1)]).put_into(ids)
    assert ids.tolist() == [5, 0, 5, 7]


def test_whom_the_pass_before_has_failed_fails_once() -> None:
    one, two = object(), object()
    parts: Any = [SimpleNamespace(sample=SimpleNamespace(request=request)) for request in (one, two)]
    before = Launched(parts, torch.tensor([-1, 4], dtype=torch.int32), None)
    behind = Launched(parts, torch.tensor([-1, -1], dtype=torch.int32), before)
    assert list(behind.settle().failures) == [two]
    assert list(before.settle().failures) == [one]
    assert behind.left_out == {one}
