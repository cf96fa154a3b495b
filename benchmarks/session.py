"""Cost of the session stream, compared with an echo server. Both get messages of the same sizes, alternately.

The allocator and the echo (grpc.aio on uvloop, like the allocator) are processes on one CPU (`--cpu`). The clients have
another CPU. A Unix socket connects them, or TCP (`--transport tcp`). Steps are made beforehand, so that only the wire
and the server are measured. The row "through AsyncSession" also includes building steps and keeping the ledger. A step
of 256 operations is an append for each of 256 sequences; 16 of them take a block.

CPU columns have a whole process's CPU time per message. The handler, from message to reply, core included, is measured
twice: in this process, where nothing else runs in between, and by the server's own histogram of steps
(`quire_allocator_step_seconds`), where gRPC's threads and the kernel use the CPU and its caches between two steps. The
last rows have the waits of a pool's owner while another owner floods the same allocator. `make bench` measures the
compiled core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from quire import AsyncAllocator
from quire._serving.process import take_cpu
from quire.local import ServerProcess
from quire.protocol.outcomes import Result
from quire.protocol.steps import StepBuilder
from quire.types import PoolSpec
from report import Goal, add_output_arguments, core_build, publish
from session_sides import echo
from session_sides.handler import Handler
from session_sides.streams import BLOCK_TOKENS, SESSION, Owner, Stream, check

OPERATIONS = 256
POOL_BLOCKS = 200_000
PROMPT_BLOCKS = 2_048
# Bytes of the echo's message and answer beside admissions. An admission has 64 kB of digests, and its reply has 8 kB.
ECHO_SIZE = (32 << 10, 32 << 10)
STREAMS = (1, 8, 64)
START_S = 30.0
FLOOD_WINDOW = 8
FLOOD_OPERATIONS = 1_024
FLOOD_BLOCKS = 1_000_000
VICTIM_OPERATIONS = 64
BUILD = core_build()


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=11, help="rounds, both sides in turn (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="messages in a side's turn (default: %(default)s)")
    parser.add_argument(
        "--transport", choices=("unix", "tcp"), default="unix", help="sockets of both sides (default: %(default)s)"
    )
    add_output_arguments(parser)
    return parser.parse_args()


class Turn(NamedTuple):
    """One side's times for its messages.

    Attributes:
        times: seconds of each round trip.
        wall_s: from the first message to the last answer.
        server_us, client_us: CPU time of each process per message.
        handler_us: time in the allocator's handler for each message.
    """

    times: list[float]
    wall_s: float
    server_us: float
    client_us: float
    handler_us: float = 0.0

    @property
    def rate(self) -> float:
        """Returns the messages per second."""
        return len(self.times) / self.wall_s


class Servers:
    """The allocator and the echo, on one CPU."""

    def __init__(self, folder: Path, cpu: int, transport: str) -> None:
        listen = dict.fromkeys(("allocator", "echo"), "127.0.0.1:0")
        if transport == "unix":
            listen = {side: f"unix://{folder}/{side}" for side in listen}
        command = {"--listen": listen["allocator"], "--metrics": "127.0.0.1:0", "--cpu": str(cpu), "--lease": "3600"}
        command |= {"--streams-per-caller": "128", "--blocks-per-caller": str(1 << 25)}  # high: one owner has all pools
        command |= {"--memory-per-caller": "4096"}
        arguments = list(chain.from_iterable(command.items()))
        self.allocator = ServerProcess("quire_allocator", arguments, folder=folder, log=folder / "log")
        script = [sys.executable, str(Path(echo.__file__)), "--cpu", str(cpu), "--listen", listen["echo"]]
        self._echo = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._echo.stdout is not None
        self.echo_address = self._echo.stdout.readline().strip()
        self.allocator.wait_ready(deadline=time.monotonic() + START_S)
        self.echo_clock = _cpu_clock(self._echo.pid)
        self.allocator_clock = _cpu_clock(self.allocator.process.pid)

    def stop(self) -> None:
        """Ends the echo and the allocator."""
        assert self._echo.stdin is not None
        self._echo.stdin.close()
        self._echo.wait()
        self.allocator.stop(grace_s=1.0)


def _cpu_clock(pid: int) -> int:
    """Returns the id of the clock of another process's CPU time, as clock_getcpuclockid(3) does on Linux."""
    return (~pid << 3) | 2


async def handler_in_process(options: argparse.Namespace) -> float:
    """Returns the handler's CPU microseconds for a step of 256 appends: the median over the rounds."""
    handler = Handler()
    owner = Owner(handler, "in-process", POOL_BLOCKS, os.urandom(16))
    await owner.open()
    make = decoding(owner, options.steps)
    return statistics.median([handler.cost_us(make()) for _ in range(options.repeat + 1)][1:])


def handler_seconds(servers: Servers) -> float:
    """Returns the seconds that all steps so far spent in the handler."""
    url = f"http://{servers.allocator.metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=START_S) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = chain.from_iterable(family.samples for family in families)
    return sum(sample.value for sample in samples if sample.name == "quire_allocator_step_seconds_sum")


async def take_turn(streams: Sequence[Stream], requests: Sequence[Sequence[bytes]], clock: int) -> Turn:
    """Runs all streams at once. Each owner sends its messages one by one, and waits for each answer."""
    server_ns, client_ns, started = time.clock_gettime_ns(clock), time.process_time_ns(), time.perf_counter()
    rounds = zip(streams, requests, strict=True)
    times = await asyncio.gather(*(stream.round_trips(messages) for stream, messages in rounds))
    wall_s = time.perf_counter() - started
    flat = list(chain.from_iterable(times))
    server_us = (time.clock_gettime_ns(clock) - server_ns) / 1_000 / len(flat)
    return Turn(flat, wall_s, server_us, (time.process_time_ns() - client_ns) / 1_000 / len(flat))


@contextlib.asynccontextmanager
async def connected(servers: Servers, count: int, name: str) -> AsyncIterator[tuple[list[Stream], list[Owner]]]:
    """Opens this many streams to the echo, and as many owners."""
    async with contextlib.AsyncExitStack() as stack:
        echoes, owners = [], []
        for number in range(count):
            echoes.append(await stack.enter_async_context(Stream(servers.echo_address, echo.METHOD)))
            stream = await stack.enter_async_context(Stream(servers.allocator.address, SESSION))
            owners.append(Owner(stream, f"{name}-{number}", POOL_BLOCKS, os.urandom(16)))
            await owners[-1].open()
        yield echoes, owners


async def compare(
    servers: Servers,
    count: int,
    name: str,
    make: Callable[[Owner], Callable[[], list[bytes]]],
    repeat: int,
    *,
    size: tuple[int, int] | None = None,
) -> tuple[list[Turn], list[Turn]]:
    """Runs turns of the echo and of the allocator. `make` returns a function that makes an owner's messages for one
    turn. The echo's messages and answers have the same lengths, or those in `size`. Each message has its own memory,
    like a step."""
    async with connected(servers, count, name) as (echoes, owners):
        makers, streams = [make(owner) for owner in owners], [owner.stream for owner in owners]
        first = makers[0]()
        answers = [await owners[0].stream.ask(message) for message in first]
        check(first[0], answers[0])
        # The echo's sizes are the bytes of an ordinary step and its answer.
        size = size or (len(first[-2]), round(statistics.mean(map(len, answers[1:-1]))))
        turns: tuple[list[Turn], list[Turn]] = ([], [])
        for number in range(-1, repeat):  # Round -1 is a warm-up.
            steps = [maker() for maker in makers]
            gc.collect()
            requests = [[echo.request_of(*size) for _ in each] for each in steps]
            before = handler_seconds(servers)
            sides = ((echoes, requests, servers.echo_clock), (streams, steps, servers.allocator_clock))
            order = (0, 1) if number % 2 else (1, 0)  # The sides alternate: the first fills CPU caches for the second.
            pair = {side: await take_turn(*sides[side]) for side in order}
            handler_us = (handler_seconds(servers) - before) * 1e6 / len(pair[1].times)
            if number >= 0:
                turns[0].append(pair[0])
                turns[1].append(pair[1]._replace(handler_us=handler_us))
        return turns


def decoding(owner: Owner, count: int, operations: int = OPERATIONS) -> Callable[[], list[bytes]]:
    """Returns a function that makes steps of `operations` appends. The first turn makes the sequences."""
    state = owner.decoding(operations)
    return lambda: state.steps(count)


def admitting(owner: Owner, count: int) -> Callable[[], list[bytes]]:
    """Returns a function that makes steps. Each step admits a long unpublished prompt and frees the previous one."""
    prompts = [random.Random(number).randbytes(32 * PROMPT_BLOCKS) for number in range(count)]
    return lambda: owner.admissions(prompts)


def percentile(turns: Sequence[Turn], share: float) -> float:
    """Returns a percentile of each turn's round trips, as the median over the turns, in microseconds."""
    return statistics.median(sorted(turn.times)[int(share * (len(turn.times) - 1))] for turn in turns) * 1e6


def row(what: str, streams: int, turns: Sequence[Turn], over_echo: float | None = None) -> dict[str, object]:
    """Returns one row of results."""
    numbers = {
        "per_s": statistics.median(turn.rate for turn in turns),
        "p50_us": percentile(turns, 0.5),
        "p99_us": percentile(turns, 0.99),
        "server_cpu_us": statistics.median(turn.server_us for turn in turns),
        "client_cpu_us": statistics.median(turn.client_us for turn in turns),
    }
    rounded = {name: round(value, 1) for name, value in numbers.items()}
    over = "" if over_echo is None else round(over_echo, 3)
    return {"what": what, "core": BUILD, "streams": streams, **rounded, "over_echo": over}


def ratio(sides: tuple[list[Turn], list[Turn]], value: Callable[[Turn], float]) -> float:
    """Returns the allocator's value divided by the echo's: the median over the rounds."""
    return statistics.median(value(step) / value(plain) for plain, step in zip(*sides, strict=True))


async def through_session(servers: Servers, options: argparse.Namespace) -> list[Turn]:
    """Runs the same steps through `AsyncSession`."""
    spec = PoolSpec.full_attention(block_count=POOL_BLOCKS, block_size=BLOCK_TOKENS)
    turns = []
    async with AsyncAllocator(servers.allocator.address) as client:
        session = client.session("session", spec)
        await session.open()
        tokens = {number: 1 + number % BLOCK_TOKENS for number in range(1, OPERATIONS + 1)}
        step = StepBuilder()
        for sequence_id, count in tokens.items():
            step.allocate(sequence_id, count)
        await session.step(step)
        for _ in range(options.repeat):
            server_ns, client_ns = time.clock_gettime_ns(servers.allocator_clock), time.process_time_ns()
            begun, times = time.perf_counter(), []
            for _ in range(options.steps):
                started, step = time.perf_counter(), StepBuilder()
                tokens = {sequence_id: count + 1 for sequence_id, count in tokens.items()}
                for sequence_id, count in tokens.items():
                    step.grow(sequence_id, count)
                outcome = await session.step(step)
                times.append(time.perf_counter() - started)
                assert outcome.grows[-1].result is Result.OK
            server_us = (time.clock_gettime_ns(servers.allocator_clock) - server_ns) / 1_000 / options.steps
            client_us = (time.process_time_ns() - client_ns) / 1_000 / options.steps
            turns.append(Turn(times, time.perf_counter() - begun, server_us, client_us))
        await session.close()
    return turns


async def victim(servers: Servers, options: argparse.Namespace) -> tuple[list[Turn], list[Turn]]:
    """Returns an owner's turns while it is alone, and while another owner floods. Turns that outlast the flood are left
    out.

    Both owners are in this process: two processes on one CPU would wait for each other's time slices of milliseconds.
    """
    address = servers.allocator.address
    async with Stream(address, SESSION) as stream, Stream(address, SESSION) as other:
        owner = Owner(stream, "victim", POOL_BLOCKS, os.urandom(16))
        rival = Owner(other, "flood", FLOOD_BLOCKS, os.urandom(16), FLOOD_WINDOW)
        await owner.open()
        await rival.open()
        make = decoding(owner, options.steps, VICTIM_OPERATIONS)
        make_flood = decoding(rival, 3 * options.steps, FLOOD_OPERATIONS)
        await stream.round_trips(make())
        quiet, flooded = [], []
        for _ in range(options.repeat):
            quiet.append(await take_turn([stream], [make()], servers.allocator_clock))
            steps = make()
            flooding = asyncio.create_task(other.flood(make_flood(), FLOOD_WINDOW))
            flooded.append(await take_turn([stream], [steps], servers.allocator_clock))
            if flooding.done():
                flooded.pop()
            await flooding
    return quiet, flooded


async def measure(options: argparse.Namespace, servers: Servers) -> tuple[list[dict[str, object]], list[Goal]]:
    """Returns all rows and goals."""
    rows: list[dict[str, object]] = []
    goals: list[Goal] = []
    for count in STREAMS:
        steps = max(20, options.steps // count)
        make = partial(decoding, count=steps)
        sides = await compare(servers, count, f"decode-{count}", make, options.repeat)
        over = ratio(sides, lambda turn: statistics.median(turn.times))
        rate = ratio(sides, lambda turn: turn.rate)
        rows.append(row("echo of a step of 256 appends", count, sides[0]))
        rows.append(row("step of 256 appends", count, sides[1], over))
        if count == 1:
            in_server = statistics.median(turn.handler_us for turn in sides[1])
            in_process = await handler_in_process(options)
            for what, cost in (("of which in the handler", in_server), ("the handler, in process", in_process)):
                rows.append(
                    {**dict.fromkeys(rows[0], ""), "what": what, "core": BUILD, "server_cpu_us": round(cost, 1)}
                )
            goals.append(Goal("step of 256 operations over its echo, round trip", over, 2.0, "lower"))
            goals.append(Goal("CPU of the handler, in process, us a step of 256 operations", in_process, 40.0, "lower"))
        if count == 8:
            appends = statistics.median(turn.rate for turn in sides[1]) * OPERATIONS
            goals.append(Goal("8 streams, steps a second over echoes a second", rate, 0.33, "higher"))
            goals.append(Goal("8 streams, appends a second", appends, 1.7e6, "higher"))
    turns = await through_session(servers, options)
    over = percentile(turns, 0.5) / float(str(rows[0]["p50_us"]))
    rows.append(row("step of 256 appends through AsyncSession", 1, turns, over))
    sides = await compare(
        servers, 1, "admit", lambda owner: admitting(owner, max(20, options.steps // 4)), options.repeat, size=ECHO_SIZE
    )
    over = ratio(sides, lambda turn: statistics.median(turn.times))
    rows.append(row("echo of 32 kB", 1, sides[0]))
    rows.append(row("admit 2,048 blocks and free as many", 1, sides[1], over))
    goals.append(Goal("admit and free 2,048 blocks over an echo of 32 kB, round trip", over, 1.6, "lower"))
    quiet, flooded = await victim(servers, options)
    rows.append(row("step of 64 appends, alone", 1, quiet))
    goal = "a victim's p99 over its quiet p99"
    if flooded:
        rows.append(row("the same while another pool floods", 1, flooded))
    if len(flooded) < len(quiet):
        goal += f"; {len(quiet) - len(flooded)} of {len(quiet)} turns outlasted the flood and are left out"
    value = percentile(flooded, 0.99) / percentile(quiet, 0.99) if flooded else None
    goals.append(Goal(goal, value, 3.0, "lower"))
    return rows, goals


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    cpus = sorted(os.sched_getaffinity(0))
    take_cpu(cpus[-1])
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        servers = Servers(Path(folder), cpus[0], options.transport)
        try:
            rows, goals = asyncio.run(measure(options, servers))
        finally:
            servers.stop()
    os.sched_setaffinity(0, cpus)
    publish(f"The session stream, core {BUILD}", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
