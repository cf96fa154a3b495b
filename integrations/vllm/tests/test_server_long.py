"""vLLM's OpenAI server on an allocator that is killed -9 during 1,000 random requests; some callers leave early.

Another allocator replaces it. Answers, cached tokens and metrics are compared with vLLM alone.

Takes minutes; run by `make test-vllm-long`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
import pytest
from peers import MODEL, PYTHON, ROOT, SOURCES, WHY_NOT
from quire import Allocator
from quire.local import ServerProcess

from tests.client.servers import allocator_process

sys.path.append(str(ROOT / "benchmarks"))

from gateway_sides.vllm_server import vllm_server

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1_500),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

REQUESTS: Final = int(os.environ.get("QUIRE_VLLM_REQUESTS", "1000"))
AT_ONCE: Final = 32
BLOCKS: Final = 240  # blocks of 32 tokens: about 30 requests fit at once
HEALTHY_S: Final = 10.0
OUTAGE_S: Final = 2.0


def some_requests() -> list[dict[str, Any]]:
    """Returns turns of chats that share a prefix, all with greedy sampling."""
    rng = random.Random(7)
    chats = [[rng.randrange(1, 2048) for _ in range(192)] for _ in range(40)]
    asked = []
    for _ in range(REQUESTS):
        prompt = rng.choice(chats)[: rng.randrange(8, 193)] + [rng.randrange(1, 2048) for _ in range(rng.randrange(16))]
        asked.append({"prompt": prompt, "max_tokens": rng.randrange(2, 24), "is_left": rng.random() < 0.1})
    return asked


@contextlib.contextmanager
def server(folder: Path, *arguments: str, **environment: str) -> Iterator[str]:
    """Serves vLLM's server, with this package on its path; yields the address."""
    before = dict(os.environ)
    os.environ.update(PYTHONPATH=os.pathsep.join(str(ROOT / each) for each in SOURCES), **environment)
    try:
        further = ["--num-gpu-blocks-override", str(BLOCKS), "--block-size", "32", *arguments]
        with vllm_server(Path(MODEL), "demo", folder / "log", sequence_tokens_max=512, further=further) as address:
            yield address
    finally:
        os.environ.clear()
        os.environ.update(before)


async def ask(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, int] | None:
    """Returns the text and the number of cached prompt tokens; None if the caller left."""
    body = {"model": "demo", "prompt": asked["prompt"], "max_tokens": asked["max_tokens"], "temperature": 0}
    body["ignore_eos"] = True
    if asked["is_left"]:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_lines():
                return None
        return None
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    details = told["usage"].get("prompt_tokens_details") or {}
    return told["choices"][0]["text"], details.get("cached_tokens") or 0


async def ask_all(address: str, asked: list[dict[str, Any]], at: dict[int, Any] | None = None) -> list[Any]:
    """Sends all requests, `AT_ONCE` at a time. `at` maps numbers of answers to actions."""
    answers: list[Any] = [None] * len(asked)
    done = 0
    places = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal done
        async with places:
            answers[number] = await ask(client, asked[number])
            done += 1
            if at is not None and done in at:
                await asyncio.to_thread(at[done])

    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=300) as client, watched(client):
        await asyncio.gather(*(one(client, number) for number in range(len(asked))))
    return answers


@contextlib.asynccontextmanager
async def watched(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Checks all the time that the server reports itself healthy."""

    over = asyncio.Event()  # This event is never set. Waiting for it with a timeout is a pause of half a second.

    async def watch() -> None:
        while True:
            assert (await client.get("/health", timeout=HEALTHY_S)).status_code == 200
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 0.5)

    watching = asyncio.create_task(watch())
    try:
        yield
        assert not watching.done(), "the server was not healthy"
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def metric(address: str, name: str) -> float:
    """Returns the sum of a metric's samples."""
    lines = httpx.get(f"http://{address}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


class Killed:
    """An allocator that is killed -9 and replaced by another one a moment later."""

    def __init__(self, first: ServerProcess, folder: Path) -> None:
        self.first = first
        self._folder = folder
        self._stack = contextlib.ExitStack()

    def kill(self) -> None:
        """Kills the allocator. New prompts then wait, and running answers continue."""
        self.first.process.kill()
        self.first.process.wait()
        threading.Event().wait(OUTAGE_S)
        arguments = ("--check-invariants", "--listen", self.first.address)
        self._stack.enter_context(allocator_process(self._folder, *arguments))

    def close(self) -> None:
        self._stack.close()


def test_a_thousand_requests_are_answered_as_by_vllm_alone_while_the_allocator_dies(tmp_path: Path) -> None:
    asked = some_requests()
    again = [{"prompt": asked[0]["prompt"], "max_tokens": 4, "is_left": False}] * 2
    folders = [tmp_path / name for name in ("stock", "ours", "first", "next")]
    for folder in folders:
        folder.mkdir()
    with server(folders[0]) as address:
        stock_again = [asyncio.run(ask_all(address, [each]))[0] for each in again]
        stock = asyncio.run(ask_all(address, asked))
    with allocator_process(folders[2], "--check-invariants") as first:
        killed = Killed(first, folders[3])
        chosen = {"QUIRE_VLLM_ALLOCATOR": first.address, "QUIRE_VLLM_POOL": "mine"}
        with server(folders[1], "--scheduler-cls", "quire_vllm.QuireAsyncScheduler", **chosen) as address:
            ours_again = [asyncio.run(ask_all(address, [each]))[0] for each in again]
            ours = asyncio.run(ask_all(address, asked, {len(asked) // 3: killed.kill}))
            hits = metric(address, "vllm:prefix_cache_hits_total")
            with Allocator(first.address) as client:
                pool = client.get_pool("mine")
        killed.close()
    assert ours_again == stock_again
    assert ours_again[1][1] > 0, "the second time the prompt is cached"
    wrong = [number for number, pair in enumerate(zip(ours, stock, strict=True)) if _text(pair[0]) != _text(pair[1])]
    assert wrong == []
    assert sum(answer[1] for answer in ours if answer) > 0
    assert hits > 0
    assert (pool.held_block_count, pool.sequence_count) == (0, 0), "what callers have left is held still"
    assert pool.cached_block_count > 0


def _text(answer: tuple[str, int] | None) -> str | None:
    return answer[0] if answer else None
