"""A tree of thoughts over HTTP, for programs in any language. It prefills, forks, continues and scores branches at the
gateway's `/v1/branches`.

    quire up --model models/demo
    python examples/tree_of_thoughts.py http://127.0.0.1:8000

On each of three levels, it tries four continuations of every thought, and keeps the two best. A thought is good if the
model finds a good verdict likely after it. Every branch computes only its own tail.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

PROBLEM: Final = "How does a program read a file line by line? Think step by step.\n"
VERDICT: Final = "\nThis is the way to do it."
DEPTH, WIDTH, KEPT = 3, 4, 2


class Thought(NamedTuple):
    """The id of a branch, its text since the problem, and how good it is."""

    branch: str
    text: str
    value: float


class Gateway:
    """Calls of a gateway.

    Args:
        address: the gateway's address, such as http://127.0.0.1:8000.
        key: the API key, if the gateway asks for one.
    """

    def __init__(self, address: str, key: str = "none") -> None:
        self._address, self._key = address, key

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the gateway's answer.

        Raises:
            urllib.error.HTTPError: the gateway refuses.
        """
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}/v1/branches{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def think(gateway: Gateway, parent: Thought, branch: str, seed: int) -> Thought:
    """Continues a thought by one step and judges the result."""
    options = {"max_tokens": 16, "temperature": 0.8, "seed": seed, "ignore_eos": True}
    step = gateway.call("POST", f"/{branch}/generate", options)["choices"][0]["text"]
    (verdict,) = gateway.call("POST", f"/{branch}/score", {"candidates": [VERDICT]})["data"]
    return Thought(branch, parent.text + step, verdict["mean_logprob"])


def tree_of_thoughts(gateway: Gateway) -> Thought:
    """Returns the best thought of the last level."""
    root = gateway.call("POST", "", {"prompt": PROBLEM})
    level = [Thought(root["id"], "", 0.0)]
    with ThreadPoolExecutor(WIDTH * KEPT) as threads:
        for depth in range(DEPTH):
            forks = [
                (parent, fork["id"])
                for parent in level
                for fork in gateway.call("POST", f"/{parent.branch}/fork", {"count": WIDTH})["data"]
            ]
            found = threads.map(
                lambda each: think(gateway, *each),
                [(parent, fork, 100 * depth + seed) for seed, (parent, fork) in enumerate(forks)],
            )
            ranked = sorted(found, key=lambda thought: -thought.value)
            for left in (*level, *ranked[KEPT:]):
                gateway.call("DELETE", f"/{left.branch}")
            level = ranked[:KEPT]
    for thought in level:
        gateway.call("DELETE", f"/{thought.branch}")
    return level[0]


if __name__ == "__main__":
    best = tree_of_thoughts(Gateway(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    print(f"{best.value:.3f} {best.text}")
