"""A chat that keeps its pages: each turn computes only its new tokens.

Needs a clone and `pip install '.[all]'`; starts its own servers with the demo model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from quire import AsyncClient
from stack import run

SYSTEM = "A helpful assistant answers questions about Python.\n"
QUESTIONS = ("What is a list?", "And a tuple?", "Which one is faster?")


async def chat(client: AsyncClient, questions: Sequence[str] = QUESTIONS) -> AsyncIterator[tuple[str, int, int]]:
    """Yields for each turn the answer, the tokens that the turn computed, and the tokens of the whole chat."""
    async with await client.prefill(SYSTEM) as branch:
        for question in questions:
            before = branch.token_count
            await branch.extend(f"\nUser: {question}\nAssistant:")
            answer = await branch.generate(max_tokens=24, temperature=0.7, seed=1, ignore_eos=True)
            yield answer.text, branch.token_count - before, branch.token_count


async def talk(client: AsyncClient) -> list[tuple[str, int, int]]:
    """Returns the whole chat."""
    return [turn async for turn in chat(client)]


if __name__ == "__main__":
    for text, computed, length in run(talk):
        print(f"[{computed} of {length} tokens computed] {text!r}")
