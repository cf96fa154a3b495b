"""CPU time that metrics, the shadow index and log lines take in each server, with real processes under load.

The servers run with their metrics and log lines on, as they do by default. Each server adds up the CPU time of its
functions that count and log (`metrics_sides/probed.py`). The rest of its CPU time is its time without these functions.
A row's ratio is the part over that rest. Both parts of the ratio are CPU times of one run, so other programs hardly
change it.

Completions load the servers for the rows of worker, gateway, and all three servers together. They leave the allocator
nearly idle, so that its caches are cold. For the allocator's own rows, owners admit a prompt with each step, into pools
that fill up. The shadow index is the allocator's sample of blocks, which tells what pools of other sizes would have
hit.

`make bench-metrics` measures the compiled core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from metrics_sides.probed import PROBED
from quire.local import ServerProcess
from quire.protocol.steps import StepBuilder
from report import Goal, add_output_arguments, publish
from serving_sides.models import DEMO
from session_sides.streams import BLOCK_TOKENS, SESSION, Owner, Stream, check

RATIO_GOAL: Final = 0.01
MODULE: Final = "metrics_sides.probed"
SHARED_TOKENS: Final = 64  # common tokens at the beginning of half of the prompts
OWNERS: Final = 8
POOL_BLOCKS: Final = 16_384
PROMPT_BLOCKS: Final = 32
SHARED_BLOCKS: Final = 4
LIVE: Final = 8  # number of sequences that an owner has at a time
DIGEST_BYTES: Final = 32
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1_000, help="of each owner (default: %(default)s)")
    add_output_arguments(parser)
    options = parser.parse_args()
    if min(options.requests, options.at_once, options.prompt_tokens, options.output_tokens, options.steps) < 1:
        parser.error("all numbers must be at least 1")
    return options


class Servers:
    """Probed servers. After they have stopped, `parts` has the CPU time of each part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[str, ServerProcess] = {}

    def start(self, files: ExitStack, package: str, *options: str) -> ServerProcess:
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "QUIRE_PROBED": package,
            "QUIRE_SPENT": str(self._folder / f"{package}.json"),
        }
        server = ServerProcess(
            MODULE,
            ["--listen", "127.0.0.1:0", *options],
            folder=self._folder,
            log=self._folder / f"{package}.log",
            environment=environment,
        )
        files.callback(server.stop)
        server.wait_ready(deadline=time.monotonic() + 120)
        self._servers[package] = server
        return server

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU time of each server so far."""
        return {package: _cpu_s(server.process.pid) for package, server in self._servers.items()}

    def parts(self, package: str) -> dict[str, dict[str, float]]:
        """Returns the CPU time that a stopped server spent on each part."""
        found: dict[str, dict[str, float]] = json.loads((self._folder / f"{package}.json").read_text())
        return found


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def load(address: str, options: argparse.Namespace) -> None:
    """Sends all requests. Half of the prompts have the same beginning."""
    dice = random.Random(7)
    shared = [dice.randrange(100, 2_000) for _ in range(SHARED_TOKENS)]

    def prompt(number: int) -> list[int]:
        tokens = [*shared] if number % 2 else []
        return (tokens + [dice.randrange(100, 2_000) for _ in range(options.prompt_tokens)])[: options.prompt_tokens]

    def ask(tokens: list[int]) -> None:
        body = {"model": "demo", "prompt": tokens, "max_tokens": options.output_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()

    with ThreadPoolExecutor(options.at_once) as threads:
        list(threads.map(ask, [prompt(number) for number in range(options.requests)]))


async def admit(address: str, owners: int, steps: int) -> None:
    """Sends steps of several owners at once. Each admits a prompt, commits the previous one, and frees an older one."""

    async def run(number: int) -> None:
        dice = random.Random(number)
        shared = dice.randbytes(DIGEST_BYTES * SHARED_BLOCKS)
        async with Stream(address, SESSION) as stream:
            owner = Owner(stream, f"pool-{number}", POOL_BLOCKS, os.urandom(16))
            await owner.open()
            computed, messages = b"", []
            for sequence_id in range(1, steps + 1):
                step, is_shared = StepBuilder(), sequence_id % 2
                if computed:
                    step.commit(sequence_id - 1, PROMPT_BLOCKS * BLOCK_TOKENS, computed)
                if sequence_id > LIVE:
                    step.free(sequence_id - LIVE)
                own = dice.randbytes(DIGEST_BYTES * (PROMPT_BLOCKS - SHARED_BLOCKS * is_shared))
                digests = shared * is_shared + own
                step.allocate(sequence_id, PROMPT_BLOCKS * BLOCK_TOKENS + 1, digests)
                computed = digests if sequence_id == 1 else own  # All other sequences hit the shared blocks.
                messages.append(owner.message(step))
            for message in messages:
                check(message, await stream.ask(message))

    await asyncio.gather(*map(run, range(owners)))


def measured(options: argparse.Namespace) -> list[Row]:
    """Returns a row for each part of each server."""
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as files:
            alone = Servers(Path(folder))
            address = alone.start(files, "quire_allocator", "--metrics", "127.0.0.1:0").address
            before = alone.cpu_s()
            asyncio.run(admit(address, OWNERS, options.steps))
            spent_s = {"alone": alone.cpu_s()["quire_allocator"] - before["quire_allocator"]}
        parts = {"alone": alone.parts("quire_allocator")}
        with ExitStack() as files:
            stack = Servers(Path(folder))
            metrics = ("--metrics", "127.0.0.1:0")
            allocator = ("--allocator", stack.start(files, "quire_allocator", *metrics).address)
            own = ("--model", str(DEMO), "--blocks", "4096", *metrics, *allocator)
            worker = stack.start(files, "quire_worker", *own)
            gateway = stack.start(files, "quire_gateway", "--worker", worker.address, *allocator)
            before = stack.cpu_s()
            load(gateway.address, options)
            spent_s |= {package: after - before[package] for package, after in stack.cpu_s().items()}
        parts |= {package: stack.parts(package) for package in PROBED}
    rests_s = {name: spent_s[name] - sum(part["seconds"] for part in own.values()) for name, own in parts.items()}
    rows: list[Row] = []
    for name, server in (("alone", "allocator"), ("quire_worker", "worker"), ("quire_gateway", "gateway")):
        rows += [row_of(server, part, [numbers], rests_s[name]) for part, numbers in parts[name].items()]
    stack_s = sum(rests_s[package] for package in PROBED)
    for part in dict.fromkeys(part for package in PROBED for part in parts[package]):
        of_all = [parts[package][part] for package in PROBED if part in parts[package]]
        rows.append(row_of("all three", part, of_all, stack_s))
    return rows


def row_of(server: str, name: str, parts: list[dict[str, float]], rest_s: float) -> Row:
    """Returns the row of a part of one server, or of all of them."""
    seconds, calls = sum(part["seconds"] for part in parts), sum(part["calls"] for part in parts)
    return {
        "server": server,
        "part": name,
        "calls": calls,
        "us_per_call": round(1e6 * seconds / calls, 2),
        "rest_cpu_s": round(rest_s, 3),
        "ratio": round(seconds / rest_s, 5),
    }


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    rows = measured(options)
    goals = [
        Goal(f"CPU time over the rest, {row['part']}, {row['server']}", row["ratio"], RATIO_GOAL, "lower")
        for row in rows
    ]
    publish("What metrics and log lines cost", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
