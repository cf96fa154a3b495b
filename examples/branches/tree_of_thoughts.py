"""A tree of thoughts with three levels. Each level tries four continuations of every thought and keeps the two best.

A thought is good if the model finds a good verdict likely after it. Every branch holds only its own tail.

Needs a clone and `pip install '.[all]'`; starts its own servers with the demo model.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from quire import AsyncBranch, AsyncClient
from stack import run

PROBLEM = "How does a program read a file line by line? Think step by step.\n"
VERDICT = "\nThis is the way to do it."
DEPTH, WIDTH, KEPT = 3, 4, 2


class Thought(NamedTuple):
    """A branch, its text since the problem, and how good it is."""

    branch: AsyncBranch
    text: str
    value: float


async def think(parent: Thought, branch: AsyncBranch, seed: int) -> Thought:
    """Continues a thought by one step and judges the result."""
    step = await branch.generate(max_tokens=16, temperature=0.8, seed=seed, ignore_eos=True)
    (verdict,) = await branch.score([VERDICT])
    return Thought(branch, parent.text + step.text, verdict.mean_logprob)


async def tree_of_thoughts(client: AsyncClient) -> Thought:
    """Returns the best thought of the last level."""
    root = await client.prefill(PROBLEM)
    level = [Thought(root, "", 0.0)]
    for depth in range(DEPTH):
        forks = [(parent, fork) for parent in level for fork in await parent.branch.fork(WIDTH)]
        thoughts = await asyncio.gather(
            *(think(parent, fork, 100 * depth + seed) for seed, (parent, fork) in enumerate(forks))
        )
        ranked = sorted(thoughts, key=lambda thought: -thought.value)
        await asyncio.gather(*(left.branch.release() for left in (*level, *ranked[KEPT:])))
        level = ranked[:KEPT]
    await asyncio.gather(*(thought.branch.release() for thought in level))
    return level[0]


if __name__ == "__main__":
    best = run(tree_of_thoughts)
    print(f"{best.value:.3f} {best.text}")
