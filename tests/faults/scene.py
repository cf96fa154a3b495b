"""Real allocator processes, a proxy in front of them, and an owner that reads its pages back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from quire import AsyncAllocator
from quire._transport import messages
from quire.errors import QuireError
from quire.local import ServerProcess
from quire.protocol.outcomes import StepOutcome
from quire.protocol.state_digest import SequenceRow, state_digest
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession
from quire.v1 import allocator_pb2 as pb

from tests.simulation.histories import History, pool_spec

LEASE_S = 3


class Proxy:
    """Forwards TCP connections to `target`. The proxy can cut connections, or hold back their data."""

    def __init__(self) -> None:
        self.target = ""
        self.address = ""
        # The proxy cuts all connections after it has forwarded this many more bytes to the target. None: no cut.
        self._bytes_left: int | None = None
        self._counted_from = b""  # The count of `_bytes_left` begins after these bytes.
        self._connections: set[_Connection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._swallowed = _Open(True, True)

    async def start(self) -> None:
        """Listens on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        """Closes the listener and all connections."""
        self._server.close()
        self.let_through()
        self.cut()
        if self._serving:
            await asyncio.wait(self._serving)

    def cut(self) -> None:
        """Closes every connection; forwards new ones."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def cut_after(self, byte_count: int, text: str = "") -> None:
        """Closes every connection in the middle of a message to the target, this many bytes from now, or this many
        bytes after `text`."""
        self._bytes_left, self._counted_from = byte_count, text.encode()

    def swallow(self) -> None:
        """Turns into a black hole: old and new connections stay open, and no data gets through."""
        self._hold_back(_Open(False, False))

    def swallow_replies(self) -> None:
        """Drops everything that the target sends; still forwards requests."""
        self._hold_back(_Open(True, False))

    def strand(self) -> None:
        """Turns open connections into a black hole; forwards new ones."""
        for connection in self._connections:
            connection.hold_back(_Open(False, False))

    def let_through(self) -> None:
        """Ends all faults. Data that was held back arrives late."""
        self._hold_back(_Open(True, True))

    def _hold_back(self, swallowed: _Open) -> None:
        self._swallowed = swallowed
        for connection in self._connections:
            connection.hold_back(swallowed)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.rsplit(":", 1)
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        connection = _Connection(writer, back)
        connection.hold_back(self._swallowed)
        self._connections.add(connection)
        await asyncio.gather(
            self._pump(reader, back, connection.requests, self._metered),
            self._pump(there, writer, connection.replies, lambda data: data),
        )
        self._connections.discard(connection)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gate: asyncio.Event,
        passing: Callable[[bytes], bytes],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await gate.wait()
                writer.write(passing(data))
                await writer.drain()
                if self._bytes_left == 0 and not self._counted_from:
                    self._bytes_left = None
                    self.cut()
        writer.close()

    def _metered(self, data: bytes) -> bytes:
        if self._bytes_left is None or (found := data.find(self._counted_from)) < 0:
            return data
        start = found + len(self._counted_from)
        data, self._counted_from = data[: start + self._bytes_left], b""
        self._bytes_left -= len(data) - start
        return data


class _Open(NamedTuple):
    requests: bool
    replies: bool


class _Connection:
    """Both ends of a forwarded connection, and a gate in each direction."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.requests, self.replies = asyncio.Event(), asyncio.Event()
        self._writers = writers

    def hold_back(self, is_open: _Open) -> None:
        for gate, opens in zip((self.requests, self.replies), is_open, strict=True):
            gate.set() if opens else gate.clear()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self.hold_back(_Open(True, True))  # Callers that wait at a gate then find the connection closed.


class Place:
    """The address of an allocator. One process after another serves on the same port."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._arguments = arguments
        self._environment = environment
        self._count = 0
        self.address = "127.0.0.1:0"

    async def start(self, *arguments: str) -> None:
        """Starts a new, empty process with these arguments; returns when it serves."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir(parents=True)
        common = ["--listen", self.address, "--metrics", "127.0.0.1:0", "--check-invariants", *self._arguments]
        self.server = ServerProcess(
            "quire_allocator",
            [*common, *arguments],
            folder=folder,
            log=folder / "log",
            environment=self._environment,
        )
        await asyncio.to_thread(self.server.wait_ready, deadline=time.monotonic() + 60)
        self.address = self.server.address

    def kill(self) -> None:
        """Kills the process by SIGKILL, without warning."""
        self.server.process.send_signal(signal.SIGKILL)
        self.server.stop()

    def send(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        self.server.process.send_signal(number)

    def stop(self) -> None:
        """Ends the process, even if it is stopped by a signal."""
        self.send(signal.SIGCONT)
        self.server.stop()


class Name:
    """The name that owners connect to. One allocator serves behind it, and the next one is already up."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.proxy = Proxy()
        self.place = Place(folder / "one", *arguments, environment=environment)
        self._next = Place(folder / "two", *arguments, environment=environment)
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts both allocators; returns when owners can attach."""
        await asyncio.gather(self.place.start(), self._next.start(), self.proxy.start())
        self.proxy.target = self.place.address

    async def ready(self) -> None:
        """Returns when the next allocator is up."""
        if self._starting is not None:
            await self._starting
            self._starting = None

    def replace(self) -> None:
        """Kills the allocator by SIGKILL and switches to the next one. Returning owners find it empty. The next one
        must be `ready`."""
        assert self._starting is None
        self.proxy.target = self._next.address
        self.place.kill()
        self.place, self._next = self._next, self.place
        self._starting = asyncio.create_task(self._next.start())

    async def turn(self) -> None:
        """Switches the name to the other allocator, in its present state. Both keep running."""
        await self.ready()
        self.place, self._next = self._next, self.place
        self.proxy.target = self.place.address
        self.proxy.cut()

    async def stop(self) -> None:
        """Stops the proxy and kills both allocators."""
        await self.ready()
        await self.proxy.stop()
        for place in (self.place, self._next):
            place.kill()


def report(what: str, seconds: list[float]) -> None:
    """Prints recovery times."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(
        f"{what}: {len(seconds)} runs, median {statistics.median(seconds):.3f} s, p99 {p99:.3f} s,"
        f" worst {ordered[-1]:.3f} s",
        flush=True,
    )


async def metric(place: Place, name: str) -> float:
    """Returns the sum of an allocator's metric over its labels."""
    with await asyncio.to_thread(urllib.request.urlopen, f"http://{place.server.metrics_address}/metrics") as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


class Owner:
    """A session, driven by an engine that makes random steps."""

    def __init__(self, session: AsyncSession, spec: pb.PoolSpec, seed: int) -> None:
        self.session = session
        self.history = History(spec, random.Random(seed))

    async def step(self) -> StepOutcome:
        """Sends a step, acts on the answer, and reads all pages back."""
        step = self.history.make()
        return await self.act(step, await self.session.submit(step))

    async def act(self, step: StepBuilder, answer: asyncio.Future[StepOutcome]) -> StepOutcome:
        """Acts on a step's answer, and reads all pages back."""
        outcome = await answer
        self.history.take(step.message, outcome, self.session.ledger)
        self.history.check(self.session.ledger)
        return outcome

    async def check(self, place: Place) -> None:
        """Checks that the allocator has the same sequences on the same blocks, and that all other blocks are free."""
        seen = await pool_of(place, self.session.pool)
        assert state_digest(rows_of(seen)) == self.session.ledger.digest()
        held = {block for block, state in enumerate(seen.block_states) if state >= 2}
        assert held == self.session.ledger.held_blocks(), "a block leaked"
        assert self.session.disagreement_count == 0


async def pool_of(place: Place, pool: str) -> pb.GetPoolBlocksResponse:
    """Returns a pool with its tables, without going through a proxy."""
    async with AsyncAllocator(place.address) as client:
        return await client._stub.GetPoolBlocks(pb.GetPoolBlocksRequest(pool=pool))


def rows_of(seen: pb.GetPoolBlocksResponse) -> list[SequenceRow]:
    """Returns the sequences of a pool in the form for the digest of its state."""
    assert not seen.next_page_token
    return [
        (
            row.sequence_id,
            row.token_count,
            row.committed_token_count,
            row.namespace,
            [array("I", table.blocks) for table in row.tables],
        )
        for row in seen.sequences
    ]


@asynccontextmanager
async def named(folder: Path, *, environment: Mapping[str, str] | None = None) -> AsyncIterator[Name]:
    """Yields a name with two allocators that have short leases."""
    name = Name(folder, "--lease", f"{LEASE_S}", environment=environment)
    await name.start()
    try:
        yield name
    finally:
        await name.stop()


@asynccontextmanager
async def attached(
    name: Name,
    *,
    pool: str = "pool",
    kinds: str = "hybrid",
    seed: int = 1,
    address: str = "",
    opens: bool = True,
    on_wait: Callable[[QuireError], None] | None = None,
) -> AsyncIterator[Owner]:
    """Yields an owner of a pool. By default it attaches to the name's current allocator."""
    spec = pool_spec(kinds, 64)
    async with AsyncAllocator(address or name.proxy.address) as client:
        session = client.session(pool, messages.pool_spec(spec), on_wait=on_wait)
        if opens:
            await session.open()
        try:
            yield Owner(session, spec, seed)
        finally:
            await session.close()


async def flood(owner: Owner) -> None:
    """Asks for new sequences as fast as answers come, forever."""
    while True:
        await owner.session.submit(owner.history.make_new())
