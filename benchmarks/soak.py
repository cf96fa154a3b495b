"""Memory growth of an allocator while streams are opened and canceled, and sequences come and go.

    python benchmarks/soak.py --minutes 5 --json

The allocator is its own process. The allocator's resident memory is read before and after each phase. Bytes per
canceled stream (a watch and an owner's stream alternate) are counted after the first 2,000 streams, which fill caches.
Bytes per hour while sequences come and go are counted after a fifth of that phase. At the end every block must be free.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from grpc import aio
from quire import AsyncAllocator, PoolSpec
from quire.local import ServerProcess
from quire.protocol.steps import StepBuilder
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from report import Goal, add_output_arguments, core_build, publish

BLOCKS = 4096
WARM_STREAMS = 2_000
DIGESTS = [number.to_bytes(32, "big") for number in range(20_000)]


class Streams:
    """Opens streams of both kinds, waits until each is served, and cancels it."""

    def __init__(self, client: AsyncAllocator, channel: aio.Channel) -> None:
        self._client = client
        self._sessions: Any = pb_grpc.AllocatorServiceStub(channel)
        group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=16)
        self._attach = pb.Attach(version=3, pool="hung-up", incarnation=bytes(range(16)), window=8)
        self._attach.spec.CopyFrom(pb.PoolSpec(block_count=BLOCKS, groups=[group]))

    async def cancel(self, count: int) -> None:
        """Opens and cancels `count` streams. A watch and an owner's stream alternate."""
        for _ in range(count // 2):
            await self._watch()
            await self._own()

    async def _watch(self) -> None:
        events = self._client.watch_events("soak")
        with contextlib.suppress(aio.AioRpcError):
            await anext(events)
        await events.aclose()

    async def _own(self) -> None:
        call = self._sessions.Session()
        self._attach.epoch += 1
        await call.write(pb.SessionRequest(attach=self._attach))
        reply = await call.read()
        assert isinstance(reply, pb.SessionReply), "the stream has ended"
        assert reply.HasField("report_required")
        call.cancel()


async def churn(client: AsyncAllocator, seconds: float) -> int:
    """Admits, computes and frees sequences for some seconds; returns the number of steps."""
    session = client.session("churn", PoolSpec.full_attention(block_count=BLOCKS, block_size=16))
    await session.open()
    chance, steps, last, living = random.Random(1), 0, 0, list[int]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step = StepBuilder()
        for sequence_id in living:
            step.free(sequence_id)
        living = []
        for _ in range(32):
            last += 1
            first = chance.randrange(len(DIGESTS) - 40)
            step.allocate(last, 16 * 20, DIGESTS[first : first + 19])
            living.append(last)
        await session.step(step)
        steps += 1
    step = StepBuilder()
    for sequence_id in living:
        step.free(sequence_id)
    outcome = await session.step(step)
    assert outcome.free_block_count == BLOCKS, "blocks leaked"
    await session.close()
    return steps


async def measure(minutes: float) -> dict[str, float]:
    """Runs all phases and returns their rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
        server = ServerProcess("quire_allocator", arguments, folder=folder, log=folder / "log")
        await asyncio.to_thread(server.wait_ready, deadline=time.monotonic() + 60)
        memory = psutil.Process(server.process.pid).memory_info
        try:
            async with AsyncAllocator(server.address) as client, aio.insecure_channel(server.address) as channel:
                session = client.session("soak", PoolSpec.full_attention(block_count=64, block_size=16))
                await session.open()
                hang_up = Streams(client, channel)
                await hang_up.cancel(WARM_STREAMS)
                before, started, streams = memory().rss, time.monotonic(), 0
                while time.monotonic() < started + minutes * 30:
                    await hang_up.cancel(100)
                    streams += 100
                per_stream = (memory().rss - before) / streams
                await churn(client, minutes * 6)
                before, started = memory().rss, time.monotonic()
                steps = await churn(client, minutes * 24)
                per_hour = (memory().rss - before) * 3600 / (time.monotonic() - started)
                await session.close()
        finally:
            server.stop()
    return {
        "streams": streams,
        "bytes_per_cancelled_stream": round(per_stream, 1),
        "steps": steps,
        "rss_growth_mb_per_hour": round(per_hour / 1e6, 2),
    }


def main() -> None:
    """Measures everything, and prints or writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="duration of both phases together (default: %(default)s)"
    )
    add_output_arguments(parser)
    options = parser.parse_args()
    print(f"this takes {options.minutes:g} minutes", file=sys.stderr)
    figures = asyncio.run(measure(options.minutes))
    goals = [
        Goal("bytes a cancelled stream", figures["bytes_per_cancelled_stream"], 512.0, "lower"),
        Goal("growth of resident memory, MB an hour", figures["rss_growth_mb_per_hour"], 1.0, "lower"),
    ]
    row: dict[str, object] = {"core": core_build(), "minutes": options.minutes, **figures}
    publish("An allocator's memory over time", [row], goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
