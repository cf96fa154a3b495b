"""Calls on branches in the way the service makes them, and scores by transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.errors import QuireError
from quire.protocol.permissions import EVERYTHING
from quire_worker.calls.branches import Branches
from quire_worker.calls.held_branch import Branch
from quire_worker.sampling.params import SamplingParams

from tests.worker.engine_harness import Harness, prompt, reference_model, reference_text

TTL_S = 600.0


async def root_of(branches: Branches, tokens: Sequence[int], *, ttl_s: float = TTL_S, namespace: str = "") -> Branch:
    branch, _ = await branches.prefill(request_id="", tokens=list(tokens), namespace=namespace, ttl_s=ttl_s)
    return branch


async def generate(branches: Branches, branch: Branch, max_tokens: int, **sampling: Any) -> tuple[int, ...]:
    """Continues a branch to the end, as the service does."""
    tokens: tuple[int, ...] = ()
    async with branches.generating(branch, SamplingParams(max_tokens, **sampling), "") as request:
        while not request.output.is_read:
            delivery = await asyncio.wait_for(request.output.deliveries.get(), 30)
            if isinstance(delivery, QuireError):
                raise delivery
            tokens += delivery.token_ids
            request.output.is_read = delivery.is_last
    return tokens


def reference_logprobs(folder: Path, tokens: Sequence[int], candidate: Sequence[int]) -> list[float]:
    """Returns the logprob of each token of the candidate, by transformers' own forward pass over everything."""
    with torch.no_grad():
        logits = reference_model(folder)(torch.tensor([[*tokens, *candidate]])).logits[0].double()
    rows = logits[len(tokens) - 1 : -1].log_softmax(dim=-1)
    return rows.gather(1, torch.tensor(candidate).unsqueeze(1)).flatten().tolist()


async def held_block_count(harness: Harness) -> int:
    return harness.engine.cache.block_count - await harness.free_block_count()


async def release_all(branches: Branches) -> None:
    await branches.release(list(branches._branches), EVERYTHING)


def count_tokens(harness: Harness) -> list[int]:
    """Returns a list that collects the number of tokens of each pass from now on."""
    counts: list[int] = []
    advance = harness.engine.scheduler.advance

    def counted(work: Any) -> None:
        counts.append(sum(item.token_count for item in work))
        advance(work)

    harness.engine.scheduler.advance = counted  # type: ignore[method-assign]
    return counts


async def mix_calls(harness: Harness, folder: Path, dice: random.Random, *, rounds: int) -> None:
    """Makes random calls, three at a time together with a request, and compares each with transformers."""
    branches = Branches(harness.engine)
    alive = [await root_of(branches, prompt(dice.randrange(1, 70), seed=i)) for i in range(3)]

    async def use(branch: Branch) -> None:
        kind = dice.random()
        if kind < 0.35 and len(branch.tokens) < 110:
            count = dice.randrange(1, 14)
            text = await generate(branches, branch, count, ignore_eos=True)
            expected = reference_text(folder, tuple(branch.tokens[: -len(text)]), count)
            assert text[: len(expected)] == expected
        elif kind < 0.5 and len(branch.tokens) < 110:
            await branches.extend(branch, prompt(dice.randrange(1, 20)), str(dice.random()))
        elif kind < 0.7 and len(alive) < 12:
            alive.extend(await branches.fork(branch, dice.randrange(1, 4), str(dice.random())))
        elif kind < 0.85:
            candidates = [prompt(dice.randrange(1, 9), seed=i) for i in range(dice.randrange(1, 6))]
            found = await branches.score(branch, candidates, "")
            # `score` may have waited for another call that extends the branch, so the tokens are read only now.
            before = list(branch.tokens)
            for candidate, logprobs in zip(candidates, found.logprobs, strict=True):
                assert logprobs == pytest.approx(reference_logprobs(folder, before, candidate), abs=2e-4)
        elif len(alive) > 2:
            alive.remove(branch)
            await branches.release([branch.id], EVERYTHING)

    async def ask() -> None:
        length = dice.randrange(1, 60)
        output = await harness.generate(prompt(length, seed=length), max_tokens=dice.randrange(1, 30))
        assert output.reasons[0] is not None

    for _ in range(rounds):
        chosen = dice.sample(alive, min(3, len(alive)))
        await asyncio.wait_for(asyncio.gather(*(use(each) for each in chosen), ask()), 60)
    await release_all(branches)
    assert await harness.free_block_count() == harness.engine.cache.block_count
