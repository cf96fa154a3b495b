"""Monte Carlo tree search on a toy task: the text with the most words that begin with a vowel.

A node is a branch. A node's children are forks, each eight tokens longer. A rollout tries a node on a fork that is
dropped afterwards, so the tree holds each token once.

Needs a clone and `pip install '.[all]'`; starts its own servers with the demo model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from quire import AsyncBranch, AsyncClient
from stack import run

PROMPT = "An object is an instance of a class, and "
ROUNDS, CHILDREN, STEP, ROLLOUT = 12, 3, 8, 16
EXPLORATION = 0.5


@dataclass
class Node:
    """A node of the tree: how often it was tried, and the sum of its rewards."""

    branch: AsyncBranch
    text: str = ""
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    reward: float = 0.0

    def urgency(self, parent_visits: int) -> float:
        """Returns the urgency of trying this node next (UCT)."""
        if not self.visits:
            return math.inf
        return self.reward / self.visits + EXPLORATION * math.sqrt(math.log(parent_visits) / self.visits)


def reward_of(text: str) -> float:
    """Returns the share of words that begin with a vowel."""
    words = text.split()
    return sum(word[0].lower() in "aeiou" for word in words) / len(words) if words else 0.0


async def expand(node: Node, seed: int) -> None:
    """Adds children to a node."""
    for number, fork in enumerate(await node.branch.fork(CHILDREN)):
        step = await fork.generate(max_tokens=STEP, temperature=1.0, seed=seed + number, ignore_eos=True)
        node.children.append(Node(fork, node.text + step.text))


async def rollout(node: Node, seed: int) -> float:
    """Continues from a node at random and returns the reward."""
    (fork,) = await node.branch.fork(1)
    async with fork:
        rest = await fork.generate(max_tokens=ROLLOUT, temperature=1.0, seed=seed, ignore_eos=True)
    return reward_of(node.text + rest.text)


async def tree_search(client: AsyncClient) -> Node:
    """Returns the root's child that was tried most often: the best move."""
    async with await client.prefill(PROMPT) as branch:
        root = Node(branch)
        for number in range(ROUNDS):
            path = [root]
            while path[-1].children:
                parent = path[-1]
                path.append(max(parent.children, key=lambda child: child.urgency(parent.visits)))
            if path[-1].visits or path[-1] is root:
                await expand(path[-1], 1_000 * number)
                path.append(path[-1].children[0])
            reward = await rollout(path[-1], number)
            for node in path:
                node.visits += 1
                node.reward += reward
        best = max(root.children, key=lambda child: child.visits)
        await release(root.children)
    return best


async def release(nodes: list[Node]) -> None:
    """Ends the branches of these nodes and of all nodes below them."""
    for node in nodes:
        await node.branch.release()
        await release(node.children)


if __name__ == "__main__":
    found = run(tree_search)
    print(f"{found.reward / found.visits:.2f} over {found.visits} visits: {found.text}")
