"""CPU time of Route over gRPC: an allocator process with pools of one owner, all of whose workers serve one model.

One pool has published each prompt's first part. A call carries the digests of the whole prompt, as gateways send them.
Calls of MatchPrefix with the same digests, in turn with Route's, show how much of the time transport and lookup take.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any, Final

from grpc import aio
from quire.local import ServerProcess
from quire.v1 import allocator_pb2 as pb
from report import Goal, core_build

from fleet_sides.workloads import BLOCK_TOKENS, DIGEST_BYTES

START_S: Final = 60.0
SERVICE: Final = "/quire.v1.AllocatorService/"
WORKERS: Final = (8, 64)
PROMPTS: Final = {"7,200 tokens": (6_000, 7_200), "100,000 tokens": (90_000, 100_000)}  # (published tokens, all tokens)
POOL_BLOCKS: Final = 10_000
CONCURRENT: Final = 8
RESERVATION_MS: Final = 20  # lifetime of a reservation; short, so that only a few calls' reservations exist at a time
_OPTIONS: Final = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


class Calls:
    """Calls of one allocator process."""

    def __init__(self, address: str, pid: int) -> None:
        self.channel = aio.insecure_channel(address, options=_OPTIONS)
        self._clock = (~pid << 3) | 2  # the clock of another process's CPU time, as clock_getcpuclockid(3) returns it

    async def call(self, method: str, request: Any, reply: Any = None) -> Any:
        """Makes one call; `request` is a message or its bytes."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        answer = await self._method(method)(data, timeout=START_S)
        return answer if reply is None else reply.FromString(answer)

    async def cpu_us(self, method: str, request: bytes, count: int) -> float:
        """Returns the process's CPU microseconds for each of `count` equal calls, some of them at once."""
        call, left, begun = self._method(method), iter(range(count)), self._cpu_ns()

        async def work() -> None:
            for _ in left:
                await call(request, timeout=START_S)

        await asyncio.gather(*(work() for _ in range(CONCURRENT)))
        return (self._cpu_ns() - begun) / 1_000 / count

    def _method(self, name: str) -> Any:
        unary: Any = self.channel.unary_unary  # The type stubs lack the defaults of its parameters.
        return unary(SERVICE + name)

    def _cpu_ns(self) -> int:
        return time.clock_gettime_ns(self._clock)


def digests_of(name: str) -> tuple[bytes, bytes]:
    """Returns the digests of a prompt's published part, and those of the whole prompt."""
    shared, length = PROMPTS[name]
    whole = random.Random(name).randbytes(length // BLOCK_TOKENS * DIGEST_BYTES)
    return whole[: shared // BLOCK_TOKENS * DIGEST_BYTES], whole


async def open_pool(calls: Calls, number: int) -> bytes:
    """Opens a pool with a worker, and returns its session's id."""
    group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=BLOCK_TOKENS)
    request = pb.OpenSessionRequest(
        version=3,
        request_id=f"open {number}",
        pool=f"pool-{number}",
        spec=pb.PoolSpec(block_count=POOL_BLOCKS, groups=[group]),
        worker=pb.RoutedWorker(address=f"host-{number}:7000", model="m", prefill_tokens_per_s=12_000),
    )
    opened: pb.OpenSessionResponse = await calls.call("OpenSession", request, pb.OpenSessionResponse)
    return opened.session_id


async def publish(calls: Calls, session_id: bytes) -> None:
    """Publishes the first parts of all prompts."""
    prefixes = [digests_of(name)[0] for name in PROMPTS]
    counts = [len(digests) // DIGEST_BYTES for digests in prefixes]
    columns: dict[str, Any] = {
        "sequences": range(1, len(counts) + 1),
        "token_counts": [count * BLOCK_TOKENS for count in counts],
        "digest_counts": counts,
        "digests": b"".join(prefixes),
    }
    await calls.call("Apply", pb.Step(session_id=session_id, number=1, grows=pb.GrowPhase(**columns)))
    await calls.call("Apply", pb.Step(session_id=session_id, number=2, commits=pb.CommitPhase(**columns)))


async def measure_one(calls: Calls, name: str, workers: int, count: int, repeat: int) -> dict[str, object]:
    """Returns the row of a prompt's length; the pools are open."""
    length, (_, digests) = PROMPTS[name][1], digests_of(name)
    route = pb.RouteRequest(digests=digests, prompt_token_count=length, model="m", reservation_ms=RESERVATION_MS)
    found = await calls.call("Route", route, pb.RouteResponse)
    assert (found.pool, found.hit_token_count) == ("pool-0", PROMPTS[name][0]), found
    match = pb.MatchPrefixRequest(digests=digests).SerializeToString()
    times: dict[str, list[float]] = {"Route": [], "MatchPrefix": []}
    for number in range(-1, repeat):  # Round -1 is a warm-up.
        for method, request in (("Route", route.SerializeToString()), ("MatchPrefix", match)):
            cost = await calls.cpu_us(method, request, count)
            if number >= 0:
                times[method].append(cost)
    cpu_us = statistics.median(times["Route"])
    over = statistics.median(one / other for one, other in zip(*times.values(), strict=True))
    return {
        "prompt": name,
        "workers": workers,
        "core": core_build(),
        "route_cpu_us": round(cpu_us, 1),
        "routes_per_core_s": round(1e6 / cpu_us),
        "over_match_prefix": round(over, 3),
    }


async def measure_all(count: int, repeat: int) -> list[dict[str, object]]:
    """Returns the rows of all lengths and numbers of workers."""
    rows = []
    for workers in WORKERS:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-")))
            options = {"--listen": f"unix://{folder}/allocator", "--lease": "3600"}
            options |= {"--metrics": "127.0.0.1:0", "--cpu": str(min(os.sched_getaffinity(0)))}
            command = list(chain.from_iterable(options.items()))
            server = ServerProcess("quire_allocator", command, folder=folder, log=folder / "log")
            stack.callback(server.stop)
            server.wait_ready(deadline=time.monotonic() + START_S)
            calls = Calls(server.address, server.process.pid)
            sessions = [await open_pool(calls, number) for number in range(workers)]
            await publish(calls, sessions[0])
            rows += [await measure_one(calls, name, workers, count, repeat) for name in PROMPTS]
            await calls.channel.close(None)
    return rows


def measure(count: int, repeat: int) -> tuple[list[dict[str, object]], list[Goal]]:
    """Returns the rows and goals of Route's CPU time."""
    rows = asyncio.run(measure_all(count, repeat))
    short, long = (next(row for row in rows if row["prompt"] == name) for name in PROMPTS)
    return rows, [
        Goal("Route/s of one core, 8 workers, 7,200 tokens", float(str(short["routes_per_core_s"])), 3_000, "higher"),
        Goal("CPU us of a Route of 100,000 tokens, 8 workers", float(str(long["route_cpu_us"])), 500, "lower"),
    ]
