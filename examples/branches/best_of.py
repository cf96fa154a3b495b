"""The best of 16 answers to one prompt. The prompt is computed once, each answer is a fork, and one batch decodes
all.

Needs a clone and `pip install '.[all]'`; starts its own servers with the demo model.
"""

from __future__ import annotations

import asyncio

from quire import AsyncBranch, AsyncClient
from stack import run

PROMPT = "The for statement is used to iterate over the elements of a sequence. "


async def answer(branch: AsyncBranch, seed: int) -> str:
    """Returns one answer, drawn at random."""
    return (await branch.generate(max_tokens=24, temperature=0.9, seed=seed)).text


async def best_of(client: AsyncClient, count: int = 16) -> str:
    """Returns the best of `count` answers: the one with the highest mean log probability per token."""
    async with await client.prefill(PROMPT) as root:
        forks = await root.fork(count)
        answers = sorted({text for text in await asyncio.gather(*map(answer, forks, range(count))) if text})
        scores = await root.score(answers)
        await asyncio.gather(*(fork.release() for fork in forks))
    return max(zip(scores, answers, strict=True), key=lambda scored: scored[0].mean_logprob)[1]


if __name__ == "__main__":
    print(run(best_of))
