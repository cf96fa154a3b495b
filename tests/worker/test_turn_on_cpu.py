"""A turn on a CPU reads logits only once, and does other work during passes that give no tokens yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_worker.attention import CpuPagedAttention
from quire_worker.execution import run
from quire_worker.execution.prepared import PlainTokens, Prepared
from quire_worker.model.paged_model import PagedModel
from quire_worker.scheduling.plan import Plan

from tests.worker.engine_harness import prompt, reference_text, running
from tests.worker.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


async def test_nothing_is_asked_while_a_pass_is_computed_that_is_for_first_tokens_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(llama, batch_tokens=64) as harness:
        engine, sent, are_behind = harness.engine, list[list[bool]](), list[bool]()
        send, prepare = engine._send, engine._runner.prepare

        def note_step(plan: Plan) -> None:
            sent.append([request.first_token_s is not None for request in engine.open_requests if not request.is_done])
            send(plan)

        def note_pass(batch: Any, *, is_behind: bool) -> Any:
            are_behind.append(is_behind)
            return prepare(batch, is_behind=is_behind)

        monkeypatch.setattr(engine, "_send", note_step)
        monkeypatch.setattr(engine._runner, "prepare", note_pass)
        lone = await harness.generate(prompt(32), max_tokens=12)
        assert sent[0] == [False]
        assert len(sent) > 1
        assert [False] not in sent[1:]
        assert are_behind[:2] == [False, False]
        are_behind.clear()
        chunked = await harness.generate(
            prompt(150, seed=1), max_tokens=12
        )  # The prompt takes three chunks, so the first two passes give no token.
        assert are_behind[:4] == [False, True, True, False]
    assert lone.tokens[0] == reference_text(llama, tuple(prompt(32)), 12)
    assert chunked.tokens[0] == reference_text(llama, tuple(prompt(150, seed=1)), 12)


async def test_greedy_passes_look_at_their_logits_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, looks = [], []
    forward, look = PagedModel.forward, CpuPagedAttention.look
    async with running(llama, batch_tokens=64, ahead_tokens=64) as harness:
        monkeypatch.setattr(PagedModel, "forward", lambda *given: (passes.append(given), forward(*given))[1])
        monkeypatch.setattr(CpuPagedAttention, "look", lambda *given: (looks.append(given), look(*given))[1])
        for name in ("are_finite", "draw"):
            monkeypatch.setattr(run, name, lambda *_: pytest.fail("looked at a second time"))
        prompts = [prompt(length, seed=length) for length in (20, 150, 33)]  # The prompt of 150 tokens needs chunks.
        outputs = await asyncio.gather(*(harness.generate(tokens, max_tokens=12) for tokens in prompts))
    assert len(looks) == len(passes) >= 12
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens[0] == reference_text(llama, tuple(tokens), 12)


@pytest.mark.parametrize("concurrency", [1, 5])
async def test_of_most_passes_the_thread_tells_the_likeliest_tokens_alone(llama: Path, concurrency: int) -> None:
    async with running(llama, batch_tokens=64, ahead_tokens=64) as harness:
        runner, told = harness.engine._runner, list[bool]()
        compute = runner.compute

        def noted(prepared: Prepared, before_kernels: Callable[[], None]) -> Any:
            result = compute(prepared, before_kernels)
            told.append(isinstance(result, PlainTokens))
            return result

        runner.compute = noted  # type: ignore[method-assign]
        prompts = [prompt(length, seed=length) for length in range(9, 9 + concurrency)]
        outputs = await asyncio.gather(*(harness.generate(tokens, max_tokens=30) for tokens in prompts))
        assert len(told) >= 30
        assert all(told)
        told.clear()
        await harness.generate(prompt(9), max_tokens=8, ignore_eos=True, temperature=1.0, seed=3)
        assert len(told) >= 8
        assert not any(told)
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens[0] == reference_text(llama, tuple(tokens), 30)


@pytest.mark.parametrize(
    ("token_count", "options", "first"),
    [(9, {}, 0), (150, {}, 2), (9, {"n": 3, "temperature": 1.0}, 0), (9, {"best_of": 2, "temperature": 1.0}, 0)],
    ids=str,
)
async def test_the_first_token_of_an_answer_is_known_before_it_is_computed(
    llama: Path, token_count: int, options: dict[str, Any], first: int
) -> None:
    async with running(llama, batch_tokens=64, ahead_tokens=64) as harness:
        runner, told = harness.engine._runner, list[tuple[bool, bool]]()
        prepare = runner.prepare

        def noted(batch: Any, *, is_behind: bool) -> Prepared:
            prepared = prepare(batch, is_behind=is_behind)
            told.append((prepared.has_first_tokens, prepared.has_first_tokens and prepared.has_first_tokens_alone))
            return prepared

        runner.prepare = noted  # type: ignore[method-assign]
        await harness.generate(prompt(token_count, seed=1), max_tokens=9, ignore_eos=True, **options)
    assert len(told) >= 9
    assert [index for index, each in enumerate(told) if each != (False, False)] == [first]
    assert told[first] == (True, True)
