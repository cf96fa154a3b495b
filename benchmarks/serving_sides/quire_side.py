"""The Quire side: a client in this process, a worker and an allocator as other processes, connected by gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from quire import AsyncClient
from quire.local import LocalStack

from serving_sides.process import Answer, Request, peak_bytes

CACHE_TOKENS, BLOCK_TOKENS = 16384, 16


class QuireSide:
    """A local stack, and a client on an event loop that stays the same."""

    def __init__(self, folder: Path, dtype: str, device: str, worker_arguments: Sequence[str] = ()) -> None:
        sizes = ["--blocks", str(CACHE_TOKENS // BLOCK_TOKENS)] if device == "cpu" else []
        self._stack = LocalStack(
            folder,
            worker_arguments=["--dtype", dtype, "--device", device, *sizes, *worker_arguments],
            start_timeout_s=300.0,
        )
        self._runner = asyncio.Runner()
        self._stack.start()
        self._client = self._runner.run(self._connect())

    async def _connect(self) -> AsyncClient:
        return await AsyncClient(self._stack.worker_address).__aenter__()

    @property
    def vocabulary(self) -> int:
        """Returns the size of the vocabulary. Token ids are below it."""
        return self._runner.run(self._client.status()).vocabulary_size

    def generate(self, requests: list[Request]) -> Answer:
        """Runs one round. All requests are sent at once. The memory in the answer is the worker's."""
        return self._runner.run(self._generate(requests))

    async def _generate(self, requests: list[Request]) -> Answer:
        """Streams a single request. With many requests, waits for whole texts, as the other sides do."""
        interval_s = 1.0 if len(requests) > 1 else 0.0
        first: list[float] = []

        async def one(request: Request) -> int:
            count, wanted = 0, request["output_tokens"]
            async with self._client.stream(
                request["prompt"], max_tokens=wanted, ignore_eos=True, interval_s=interval_s
            ) as chunks:
                async for chunk in chunks:
                    if not first:
                        first.append(time.perf_counter())
                    count += len(chunk.token_ids)
            return count

        started = time.perf_counter()
        counts = await asyncio.gather(*map(one, requests))
        seconds = time.perf_counter() - started
        assert counts == [request["output_tokens"] for request in requests]
        assert self._stack.worker is not None
        return Answer(seconds, first[0] - started, peak_bytes(self._stack.worker.process.pid))

    def close(self) -> None:
        """Ends the client, then the stack."""
        try:
            self._runner.run(self._client.__aexit__(None, None, None))
        finally:
            self._runner.close()
            self._stack.stop()
