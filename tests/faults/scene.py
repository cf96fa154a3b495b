"""Real allocator processes, a proxy on the way to them, and an owner that reads back what it wrote into its pages."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from quire import AsyncAllocatorClient
from quire.local import ServerProcess
from quire.session import PoolSession
from quire.steps import StepBuilder, StepOutcome
from quire.v1 import allocator_pb2 as pb

from tests.simulation.histories import History, pool_spec


class Proxy:
    """Forwards TCP connections to whatever `target` is; can cut them, or swallow everything."""

    def __init__(self) -> None:
        self.target = ""
        self.address = ""
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listens on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        """Ends everything."""
        self._server.close()
        self._open.set()
        self.cut()

    def cut(self) -> None:
        """Closes every connection; new ones are forwarded."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def swallow(self) -> None:
        """A black hole: connections stay, nothing gets through."""
        self._open.clear()

    def let_through(self) -> None:
        """Ends that; what was swallowed is late, not lost."""
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.rsplit(":", 1)
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


class Place:
    """Where an allocator runs: one process after another on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        """A new process, which is empty; returns when it serves."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir(parents=True)
        arguments = ["--listen", self.address, "--metrics", "127.0.0.1:0", "--check-invariants"]
        self.server = ServerProcess("quire_allocator", arguments, folder=folder, log=folder / "log")
        await asyncio.to_thread(self.server.wait_ready, deadline=time.monotonic() + 60)
        self.address = self.server.address

    def kill(self) -> None:
        """kill -9, and nothing before it."""
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait()

    def send(self, number: signal.Signals) -> None:
        """Any other signal."""
        self.server.process.send_signal(number)


class Owner:
    """A session with an engine at random behind it."""

    def __init__(self, session: PoolSession, spec: pb.PoolSpec, seed: int) -> None:
        self.session = session
        self.history = History(spec, random.Random(seed))

    async def step(self) -> None:
        """Asks, acts on the answer, and reads everything back."""
        step = self.history.make()
        await self.act(step, await self.session.submit(step))

    async def act(self, step: StepBuilder, answer: asyncio.Future[StepOutcome]) -> None:
        """The second half of a step."""
        self.history.take(step.message, await answer, self.session.ledger)
        self.history.check(self.session.ledger)

    async def check(self, place: Place) -> None:
        """The allocator has the same sequences on the same blocks, and all others are free."""
        async with AsyncAllocatorClient(place.address) as client:
            seen = await client._stub.GetPool(pb.GetPoolRequest(pool="pool", view=pb.POOL_VIEW_BLOCKS))
        there = {
            s.sequence_id: (s.token_count, s.committed_token_count, [array("I", t.blocks) for t in s.tables])
            for s in seen.sequences
        }
        ledger = self.session.ledger
        here = {
            row.sequence_id: (row.token_count, row.committed_token_count, list(row.tables)) for row in ledger.rows()
        }
        assert there == here
        held = {block for block, state in enumerate(seen.block_states) if state >= 2}
        assert held == ledger.held_blocks(), "a block leaked"


@asynccontextmanager
async def scene(folder: Path, *, kinds: str = "hybrid", seed: int = 1) -> AsyncIterator[tuple[Owner, Place, Proxy]]:
    """One allocator behind a proxy, and an owner that is attached."""
    place, proxy = Place(folder / "place"), Proxy()
    await place.start()
    await proxy.start()
    proxy.target = place.address
    spec = pool_spec(kinds, 64)
    async with AsyncAllocatorClient(proxy.address) as client:
        session = PoolSession(client._stub, "pool", spec)
        await session.open()
        try:
            yield Owner(session, spec, seed), place, proxy
        finally:
            await session.close()
            await proxy.stop()
            place.send(signal.SIGCONT)
            place.server.stop()
