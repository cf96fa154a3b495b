"""A worker that streams real text, and its allocators behind one name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import AsyncClient
from quire._transport import channel
from quire.local import ServerProcess
from quire.protocol.state_digest import state_digest

from tests.faults.scene import Name, pool_of, rows_of

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
BLOCKS = 400
SOON_S = 30.0
PATIENT = {f"grpc.{name}": 100_000 for name in ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms")}
# The first request is a greedy text, long enough to still run when a busy client sees its first tokens. The second has
# samples that fork from a half-filled block and append to it concurrently. The third is a long prompt.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("The import statement", {"max_tokens": 1_200}),
    ("def join(self, iterable):", {"max_tokens": 80, "n": 3, "temperature": 0.8, "seed": 7}),
    ("A class is " * 40, {"max_tokens": 120}),
]


def worker_process(
    folder: Path, allocator: str, *arguments: str, model: Path = DEMO, environment: Mapping[str, str] | None = None
) -> ServerProcess:
    """Starts a worker. The worker is ready once it owns its pool."""
    folder.mkdir()
    where = ["--allocator", allocator, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    return ServerProcess(
        "quire_worker",
        # With an interval of 0, each token comes in its own message, so counting messages counts tokens.
        ["--model", str(model), "--blocks", str(BLOCKS), "--stream-interval-ms", "0", *where, *arguments],
        folder=folder,
        log=folder / "log",
        environment={"OMP_WAIT_POLICY": "PASSIVE", **(environment or {})},
    )


async def is_ready(process: ServerProcess) -> None:
    """Returns when the process serves."""
    await asyncio.to_thread(process.wait_ready, deadline=time.monotonic() + 100)


async def logged(log: Path, text: str) -> bool:
    """Returns whether a log contains a text, now or soon. A thread writes a server's log with some delay."""
    deadline = time.monotonic() + SOON_S
    while text not in await asyncio.to_thread(log.read_text) and time.monotonic() < deadline:
        pass
    return time.monotonic() < deadline


class Streams:
    """All requests of `REQUESTS`, in flight."""

    def __init__(self, client: AsyncClient, namespace: str = "") -> None:
        self._namespace = namespace
        self._chunk_count = 0
        self._waiting_count = len(REQUESTS)  # requests that still wait for their first chunk
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._stream(client, *request)) for request in REQUESTS]

    @property
    def are_done(self) -> bool:
        """Whether all streams have ended."""
        return all(task.done() for task in self._tasks)

    async def begun(self) -> None:
        """Returns when each request has its first chunk. Later, a request without a session could be refused."""
        while self._waiting_count and not self.are_done:
            self._news.clear()
            await self._news.wait()

    async def more(self, chunk_count: int) -> None:
        """Returns after this many more chunks, or when all streams have ended."""
        until = self._chunk_count + chunk_count
        while self._chunk_count < until and not self.are_done:
            self._news.clear()
            await self._news.wait()

    async def texts(self) -> list[list[str]]:
        """Returns the text of each sample of each request; raises the error that ended one."""
        return await asyncio.gather(*self._tasks)

    async def _stream(self, client: AsyncClient, prompt: str, sampling: dict[str, Any]) -> list[str]:
        texts, is_first = [""] * sampling.get("n", 1), True
        try:
            async with client.stream(
                prompt, namespace=self._namespace, ignore_eos=True, timeout_s=300, **sampling
            ) as chunks:
                async for chunk in chunks:
                    self._waiting_count -= is_first
                    is_first = False
                    texts[chunk.sample] += chunk.text
                    self._chunk_count += 1
                    self._news.set()
        finally:
            asyncio.get_running_loop().call_soon(self._news.set)
        return texts


class Worker:
    """A worker, and the text that it generates without faults."""

    def __init__(self, process: ServerProcess, client: AsyncClient, name: Name) -> None:
        self.process = process
        self.client = client
        self._name = name
        self.undisturbed: list[list[str]] = []

    @asynccontextmanager
    async def streaming(self, namespace: str = "") -> AsyncIterator[Streams]:
        """Sends all requests at once. At the end checks that each has its text, and that every cache block is free."""
        await self.attached()
        streams = Streams(self.client, namespace)
        await streams.begun()
        yield streams
        assert await streams.texts() == self.undisturbed
        await self.idle()
        assert (await self.client.status()).disagreement_count == 0

    async def attached(self) -> None:
        """Returns when the worker knows that it has a session. The allocator, which `agree` asks, may know it
        sooner."""
        deadline = time.monotonic() + SOON_S
        while not (await self.client.status()).allocator_connected:
            assert time.monotonic() < deadline, "the worker has no session"

    async def idle(self) -> None:
        """Waits until worker and allocator hold no blocks. The worker frees ended samples with its next step, possibly
        after the caller has the text."""
        deadline = time.monotonic() + SOON_S
        while (held := await self.agree()) and time.monotonic() < deadline:
            pass
        assert held == 0, "what ended is still held"

    async def generates(self, token_count: int) -> bool:
        """Returns whether the worker generates this many tokens in total since its start, now or soon."""
        deadline = time.monotonic() + SOON_S
        while (await self.client.status()).output_token_count < token_count and time.monotonic() < deadline:
            pass
        return time.monotonic() < deadline

    async def agree(self) -> int:
        """Returns when worker and allocator have exactly the same sequences on the same blocks.

        Asks allocator and worker in turn while the worker generates. Returns the number of sequences.
        """
        deadline = time.monotonic() + 2 * SOON_S
        while time.monotonic() < deadline:
            try:
                seen = await pool_of(self._name.place, "default")
            except grpc.aio.AioRpcError:  # The worker has not attached yet.
                continue
            digest = (await self.client.status()).state_digest
            if digest == state_digest(rows_of(seen)):
                held = {block for *_, tables in rows_of(seen) for table in tables for block in table}
                assert held == {block for block, state in enumerate(seen.block_states) if state >= 2}, "a block leaked"
                return len(seen.sequences)
        raise AssertionError("worker and allocator have not come to agree")


@asynccontextmanager
async def closing(client: AsyncClient) -> AsyncIterator[None]:
    """Closes a client at the end of the block."""
    try:
        yield
    finally:
        await client.__aexit__(None, None, None)


@asynccontextmanager
async def worker(name: Name, folder: Path, environment: Mapping[str, str]) -> AsyncIterator[Worker]:
    """Runs a worker of the demo model on the allocators behind a name."""
    process = worker_process(folder / "worker", name.proxy.address, environment=environment)
    try:
        await is_ready(process)
        # Tests of text do not check how soon a client leaves a silent worker, so this client is patient.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "OPTIONS", [(key, PATIENT.get(key, value)) for key, value in channel.OPTIONS])
            client = await AsyncClient(process.address).__aenter__()
        async with closing(client):
            started = Worker(process, client, name)
            started.undisturbed = await Streams(client).texts()
            yield started
    finally:
        process.stop()
