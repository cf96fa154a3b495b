"""KV events of a real worker process, read by a subscriber and by Dynamo's router.

Dynamo's wheel is not among the development tools: `pip install --no-deps ai-dynamo-runtime==1.6.1` adds it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quire import Client

from tests.e2e.stack import clients, eventually, started
from tests.worker.kv_readers import Subscriber

SIZE = 16
PROMPT = list(range(100, 180))
OTHER = list(range(200, 500))
WITHOUT_DYNAMO = "Dynamo's runtime is not installed: pip install --no-deps ai-dynamo-runtime==1.6.1"


def addresses_in(log: Path) -> tuple[str, str]:
    """Returns the addresses of events and of replay that a worker has logged."""
    for line in log.read_text(encoding="utf-8").splitlines():
        if "publishing KV events" in line:
            told = json.loads(line)
            return told["address"], told["replay"]
    raise AssertionError("the worker did not log its addresses")


@contextmanager
def publishing(folder: Path) -> Iterator[tuple[Client, str, str]]:
    """Starts a worker with 22 blocks that publishes its events. Yields a client and both addresses."""
    options = ("--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0", "--log-format", "json")
    stack = started("--blocks", "22", "--max-model-len", "320", *options, log_folder=folder)
    with stack, clients(stack) as (client, _):
        yield client, *addresses_in(folder / "quire_worker.log")


def test_a_subscriber_follows_a_worker(tmp_path: Path) -> None:
    with publishing(tmp_path) as (client, address, replay), Subscriber(address, replay) as subscriber:

        def knows(tokens: list[int]) -> bool:
            subscriber.catch_up()
            return {tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)} <= subscriber.reader.prompts()

        client.generate(PROMPT, max_tokens=1)
        eventually(lambda: knows(PROMPT), "the prompt is published", within_s=60)
        client.generate(OTHER, max_tokens=1)
        eventually(lambda: knows(OTHER) and not knows(PROMPT), "a part of it is evicted", within_s=60)


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason=WITHOUT_DYNAMO)
async def test_dynamos_router_knows_what_a_worker_has_cached(tmp_path: Path) -> None:
    from dynamo._core import SelectionService

    router = SelectionService(indexer_threads=1)

    async def cached_block_count(tokens: list[int]) -> int:
        scores: Any = await router.overlap_scores({"model_name": "demo", "token_ids": tokens})
        (worker,) = scores["workers"]
        return worker["device_blocks"]

    async def until(tokens: list[int], count: int = 0, below: int = 1_000) -> None:
        deadline = time.monotonic() + 60
        while not count <= (found := await cached_block_count(tokens)) < below:
            assert time.monotonic() < deadline, f"Dynamo knows {found} blocks"
            await asyncio.sleep(0.02)

    with publishing(tmp_path) as (client, address, replay):
        # Dynamo subscribes only after these events, so Dynamo has to ask for a replay.
        await asyncio.to_thread(client.generate, PROMPT, max_tokens=1)
        await router.upsert_worker(
            {
                "worker_id": 1,
                "model_name": "demo",
                "endpoint": "http://127.0.0.1:1",
                "block_size": SIZE,
                "kv_events_endpoints": {0: address},
                "replay_endpoint": replay,
            }
        )
        fork = PROMPT[:48] + list(range(600, 640))
        number = 0
        # Each prompt causes a message, but Dynamo gets messages only after its subscription has arrived.
        while not await cached_block_count(PROMPT):
            number += 1
            await asyncio.to_thread(client.generate, [*fork, number], max_tokens=1)
        await until(fork, 5)
        await until(PROMPT, 5)
        assert await cached_block_count(PROMPT[:40] + [7] * 40) == 2
        await asyncio.to_thread(client.generate, OTHER, max_tokens=1)
        await until(OTHER, 18)
        await until(PROMPT, below=5)
    await until(OTHER, below=1)  # The stopped worker's last message clears all blocks.
    router.shutdown()
