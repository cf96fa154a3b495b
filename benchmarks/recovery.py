"""Outage of an owner after kill -9 of its allocator: the time until the first new grant.

A pool is filled with prompts of 2,048 blocks, all published, half of them still held. The script kills the allocator,
starts a new process at once, as a supervisor would, and asks for another block. The parts of the outage are

    process   from the kill until the new process serves
    attach    until the allocator asks the owner for a report
    build     until the owner has built the report
    send      until the owner has sent the last chunk; the allocator stages chunks meanwhile
    swap      until the rebuilt pool is in force
    grant     until the block is granted

With many pools at once, the outage ends when the last pool has its block. `make bench` measures the compiled core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import random
import signal
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from itertools import count, pairwise
from pathlib import Path

from quire import AsyncAllocator
from quire.local import ServerProcess
from quire.protocol.outcomes import Result
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession
from quire.session.owner import Answer, PoolOwner
from quire.types import PoolSpec
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from report import Goal, add_output_arguments, core_build, publish

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 2_048
PROMPTS_PER_STEP = 8  # prompts in a step; their digests take 512 KiB
START_S = 60.0
BUILD = core_build()
PARTS = ("process", "attach", "build", "send", "swap", "grant")


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=100_000, help="blocks of the smaller pool (default: %(default)s)")
    parser.add_argument("--large", type=int, default=1_000_000, help="blocks of the larger pool (default: %(default)s)")
    parser.add_argument("--pools", type=int, default=32, help="number of smaller pools at once (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=50, help="kills of the smaller pool's allocator (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat-large", type=int, default=5, help="kills of the other allocators (default: %(default)s)"
    )
    add_output_arguments(parser)
    return parser.parse_args()


class Supervisor:
    """Starts one allocator process after another on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        """Starts a new, empty process; returns when it serves."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        command = ["--listen", self.address, "--metrics", "127.0.0.1:0", "--log-format", "json"]
        command += ["--streams-per-caller", "512", "--blocks-per-caller", str(1 << 25)]  # high: one owner has all pools
        command += ["--memory-per-caller", "4096"]
        self.server = ServerProcess("quire_allocator", command, folder=folder, log=folder / "log")
        ready = folder / "quire_allocator.json"
        while not ready.exists():
            assert self.server.process.poll() is None, "the allocator has ended"
            await asyncio.sleep(0.002)
        self.server.wait_ready(deadline=time.monotonic() + START_S)
        self.address = self.server.address

    def kill(self) -> None:
        """Kills the process with SIGKILL, without any other signal before."""
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait()


class Watched(PoolOwner):
    """A session's machine that notes when each part of the recovery ends."""

    def __init__(self, pool: str, spec: pb.PoolSpec, *, incarnation: bytes, window: int = 1) -> None:
        super().__init__(pool, spec, incarnation=incarnation, window=window)
        self.times: dict[str, float] = {}
        self.outbox = Outbox(self)

    def note(self, part: str) -> None:
        """Notes that a part is over."""
        self.times[part] = time.perf_counter()

    def receive(self, reply: packed.SessionReply) -> Answer | None:
        """Notes the ends of attaching, building and opening from the replies."""
        kind = reply.WhichOneof("message")
        if kind == "report_required":
            self.note("attach")
        elif kind == "ready":
            self.note("swap")
        answer = super().receive(reply)
        if kind == "report_required":
            self.note("build")
        return answer


class Outbox(deque[packed.SessionRequest]):
    """An outgoing queue that notes when the end of a report leaves."""

    def __init__(self, owner: Watched) -> None:
        super().__init__()
        self._owner = owner

    def popleft(self) -> packed.SessionRequest:
        """Takes the next message."""
        request = super().popleft()
        if request.HasField("report_end"):
            self._owner.note("send")
        return request


class Owner:
    """A session with a full pool."""

    def __init__(self, session: AsyncSession, block_count: int, seed: int) -> None:
        self.session = session
        self.block_count = block_count
        self._dice = random.Random(seed)
        self._ids = count(1)
        self.watched = Watched(session.pool, session.spec, incarnation=session._owner.incarnation, window=4)
        session._owner = self.watched

    async def fill(self) -> None:
        """Admits prompts until every block is published, and frees every other prompt."""
        left = self.block_count - 1
        while left:
            step, held = StepBuilder(), list[tuple[int, int, bytes]]()
            for _ in range(PROMPTS_PER_STEP):
                blocks = min(left, PROMPT_BLOCKS)
                if blocks:
                    held.append((next(self._ids), blocks * BLOCK_TOKENS, self._dice.randbytes(32 * blocks)))
                    step.allocate(*held[-1])
                    left -= blocks
            outcome = await self.session.step(step)
            assert all(grow.result is Result.OK for grow in outcome.grows)
            step = StepBuilder()
            for sequence in held:
                step.commit(*sequence)
            for sequence_id, *_ in held[::2]:
                step.free(sequence_id)
            await self.session.step(step)

    async def next_block(self) -> None:
        """Asks for one more block, which is given back later."""
        step, sequence_id = StepBuilder(), next(self._ids)
        step.allocate(sequence_id, 1)
        (grown,) = (await self.session.step(step)).grows
        assert grown.result is Result.OK
        self.watched.note("grant")

    async def give_back(self) -> None:
        """Frees the block that was granted."""
        step = StepBuilder()
        step.free(self.session.ledger.last_sequence_id)
        await self.session.step(step)


@contextlib.asynccontextmanager
async def owners(supervisor: Supervisor, pools: int, block_count: int) -> AsyncIterator[list[Owner]]:
    """Opens `pools` sessions with full pools."""
    spec = PoolSpec.full_attention(block_count=block_count, block_size=BLOCK_TOKENS)
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for number in range(pools):
            client = await stack.enter_async_context(AsyncAllocator(supervisor.address))
            owner = Owner(client.session(f"pool-{number}", spec), block_count, number)
            await owner.session.open()
            stack.push_async_callback(owner.session.close)
            await owner.fill()
            found.append(owner)
        gc.collect()
        gc.freeze()
        yield found
        gc.unfreeze()


async def recover(supervisor: Supervisor, pools: list[Owner]) -> tuple[float, dict[str, float]]:
    """Kills the allocator once; returns the seconds to the last pool's grant, and the parts of the slowest pool."""
    for owner in pools:
        owner.watched.times.clear()
    killed = time.perf_counter()
    supervisor.kill()
    grants = asyncio.gather(*(owner.next_block() for owner in pools))
    await supervisor.start()
    served = time.perf_counter()
    await grants
    for owner in pools:
        assert owner.watched.disagreement_count == 0
        await owner.give_back()
    slowest = max(pools, key=lambda owner: owner.watched.times["grant"]).watched.times
    times = [killed, served, *(slowest[part] for part in PARTS[1:])]
    return times[-1] - killed, dict(zip(PARTS, (b - a for a, b in pairwise(times)), strict=True))


async def measure(pools: int, block_count: int, repeat: int) -> dict[str, object]:
    """Returns one row of results."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        supervisor = Supervisor(Path(folder))
        await supervisor.start()
        try:
            async with owners(supervisor, pools, block_count) as found:
                rounds = [await recover(supervisor, found) for _ in range(repeat)]
        finally:
            supervisor.server.stop(grace_s=1.0)
    totals = sorted(total for total, _ in rounds)
    p99 = totals[math.ceil(0.99 * len(totals)) - 1]
    parts = {part: round(statistics.median(each[part] for _, each in rounds), 4) for part in PARTS}
    row: dict[str, object] = {"pools": pools, "blocks": block_count, "core": BUILD, "kills": repeat}
    return {**row, "median_s": round(statistics.median(totals), 4), "p99_s": round(p99, 4), **parts}


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    cases = (
        (1, options.small, options.repeat, 1.0),
        (1, options.large, options.repeat_large, 4.0),
        (options.pools, options.small, options.repeat_large, 15.0),
    )
    rows, goals = [], []
    for pools, blocks, repeat, goal_s in cases:
        if not (pools and blocks and repeat):
            continue
        row = asyncio.run(measure(pools, blocks, repeat))
        rows.append(row)
        name = f"{pools} x {blocks:,} blocks, s to the first grant, p99"
        goals.append(Goal(name, float(str(row["p99_s"])), goal_s, "lower"))
    publish(f"Recovery, core {BUILD}", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
