"""The Quire sides: branches, and the same texts as separate requests, over gRPC."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import NamedTuple, Self

from quire import Allocator, AsyncBranch, AsyncClient
from quire.local import LocalStack

from trees_sides.workload import Workload, distinct_blocks

BLOCK_TOKENS = 16
WATCH_S = 0.001


class Found(NamedTuple):
    """The result of a round. `blocks_least` is the minimum of blocks, if it follows from the texts alone."""

    seconds: float
    tokens_computed: int
    blocks_held: int
    table_entries: int
    blocks_least: int | None = None


class QuireTrees:
    """A local stack, and a client on an event loop that stays the same."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, folder: Path, dtype: str, cache_tokens: int) -> None:
        sizes = ["--blocks", str(cache_tokens // BLOCK_TOKENS)]
        self._stack = LocalStack(folder, worker_arguments=["--dtype", dtype, *sizes], start_timeout_s=300.0)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._stack.start()
        self._client = self._runner.run(self._connect())
        return self

    async def _connect(self) -> AsyncClient:
        return await AsyncClient(self._stack.worker_address).__aenter__()

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.__aexit__(None, None, None))
        self._runner.close()
        self._stack.stop()

    def run(self, side: str, workload: Workload, number: int) -> Found:
        """Runs one round of a workload."""
        before = self._runner.run(self._computed())
        if workload.is_searched:
            started = time.perf_counter()
            self._runner.run(self._search(workload, number, workload.step_tokens, "timed"))
            seconds, computed = time.perf_counter() - started, self._runner.run(self._computed()) - before
            held, least = self._runner.run(self._beams(workload, number))
            return Found(seconds, computed, held, held, least)
        run = self._branches if side == "branches" else self._requests
        seconds, held = self._runner.run(run(workload, number, side))
        computed = self._runner.run(self._computed()) - before
        return Found(seconds, computed, held, held)

    async def _computed(self) -> int:
        status = await self._client.status()
        return status.prompt_token_count - status.cached_token_count + status.output_token_count

    def _held(self) -> int:
        with Allocator(self._stack.allocator_address) as allocator:
            return allocator.get_pool("default").held_block_count

    async def _branches(self, workload: Workload, number: int, side: str) -> tuple[float, int]:
        started = time.perf_counter()
        root = await self._client.prefill(workload.prompt(number), namespace=f"{side} {number}", ttl_s=600.0)
        every: list[AsyncBranch] = [root]
        if workload.is_scored:
            scores = await root.score(workload.candidates(number))
            assert len(scores) == workload.width
        level = [root]
        for _ in range(0 if workload.is_scored else workload.depth):
            level = [fork for parent in level for fork in await parent.fork(workload.width)]
            seeds = range(len(every), len(every) + len(level))
            await asyncio.gather(*(self._step(fork, workload, seed) for fork, seed in zip(level, seeds, strict=True)))
            every += level
        seconds = time.perf_counter() - started
        await asyncio.sleep(0.3)  # The worker frees unused blocks with its next step, within 0.1 s.
        held = await asyncio.to_thread(self._held)
        await asyncio.gather(*(branch.release() for branch in every))
        return seconds, held

    @staticmethod
    async def _step(branch: AsyncBranch, workload: Workload, seed: int) -> None:
        await branch.generate(max_tokens=workload.step_tokens, ignore_eos=True, temperature=1.0, seed=seed)

    async def _beams(self, workload: Workload, number: int) -> tuple[int, int]:
        """Returns the blocks held just before a search ends, and the minimum for the beams alive at that time. A second
        search that is one token shorter returns these beams."""
        done, held = threading.Event(), [0]

        def watch() -> None:
            with Allocator(self._stack.allocator_address) as allocator:
                while not done.wait(WATCH_S):
                    held[0] = allocator.get_pool("default").held_block_count or held[0]

        watching = asyncio.create_task(asyncio.to_thread(watch))
        await self._search(workload, number, workload.step_tokens, "watched")
        done.set()
        await watching
        prompt = workload.prompt(number)
        alive = await self._search(workload, number, workload.step_tokens - 1, "alive")
        texts = [[*prompt, *tokens, -1] for tokens in alive]  # During the last pass, all tokens but -1 are in pages.
        return held[0], distinct_blocks(texts, BLOCK_TOKENS)

    async def _search(self, workload: Workload, number: int, token_count: int, name: str) -> list[tuple[int, ...]]:
        found = await self._client.generate(
            workload.prompt(number),
            max_tokens=token_count,
            ignore_eos=True,
            num_beams=workload.width,
            n=workload.width,
            namespace=f"beams {number} {name}",
        )
        return [tuple(sample.token_ids) for sample in found.samples]

    async def _requests(self, workload: Workload, number: int, side: str) -> tuple[float, int]:
        granted, started = 0, time.perf_counter()
        for level_number, level in enumerate(workload.levels(number)):
            usages = await asyncio.gather(
                *(
                    self._client.generate(
                        request["prompt"],
                        max_tokens=request["output_tokens"],
                        ignore_eos=True,
                        temperature=1.0,
                        seed=place,
                        namespace=f"{side} {number}" if side == "cached" else f"{side} {number} {level_number} {place}",
                    )
                    for place, request in enumerate(level)
                )
            )
            granted += sum(each.usage.granted_block_count for each in usages)
        return time.perf_counter() - started, granted
