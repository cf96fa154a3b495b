"""Two agents on one long document. Each agent has a branch of the document, and reads the other agent's lines.

Needs a clone and `pip install '.[all]'`; starts its own servers with the demo model.
"""

from __future__ import annotations

from typing import NamedTuple

from quire import AsyncClient
from stack import run

DOCUMENT = (
    "The with statement is used to wrap the execution of a block with methods defined by a context manager. " * 20
)
ROLES = ("\nThe critic says:", "\nThe author says:")
ROUNDS = 3


class Talk(NamedTuple):
    """Lines of a discussion, and the number of tokens of the document and of both agents' branches."""

    lines: list[str]
    document_token_count: int
    token_counts: tuple[int, int]


async def discuss(client: AsyncClient) -> Talk:
    """Lets both agents speak alternately; returns their discussion."""
    async with await client.prefill(DOCUMENT) as root:
        critic, author = await root.fork(2)
        document_token_count = root.token_count
    lines = []
    async with critic, author:  # Both agents stay alive when the root ends.
        for number in range(ROUNDS):
            for role, speaker, listener in ((ROLES[0], critic, author), (ROLES[1], author, critic)):
                await speaker.extend(role)
                said = await speaker.generate(max_tokens=12, temperature=0.8, seed=number, ignore_eos=True)
                await listener.extend(role + said.text)
                lines.append(role.strip() + said.text)
        return Talk(lines, document_token_count, (critic.token_count, author.token_count))


if __name__ == "__main__":
    print("\n".join(run(discuss).lines))
