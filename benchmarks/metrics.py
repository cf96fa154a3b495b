"""CPU time that metrics, the shadow index and log lines take of each server, with real processes under load.

The servers run with their metrics and log lines on, as they do by default. Each server adds up the CPU time of its
functions that count and log (`metrics_sides/probed.py`). The rest of its CPU time is its time without these functions.
A row's ratio is the part over that rest. Both parts of the ratio are CPU times of one run, so other programs hardly
change it.

The shadow index is the allocator's sample of blocks, which shows the hits of pools of other sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from metrics_sides.probed import PROBED
from quire.local import ServerProcess
from report import Goal, add_output_arguments, publish
from serving_sides.models import DEMO

RATIO_GOAL: Final = 0.01
MODULE: Final = "metrics_sides.probed"
SHARED_TOKENS: Final = 64  # common tokens at the beginning of half of the prompts
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="(default: %(default)s)")
    add_output_arguments(parser)
    options = parser.parse_args()
    if min(options.requests, options.at_once, options.prompt_tokens, options.output_tokens) < 1:
        parser.error("all numbers must be at least 1")
    return options


class Stack:
    """A probed allocator, worker and gateway. `stop` ends them; then `parts` has their CPU times."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self.servers: dict[str, ServerProcess] = {}
        allocator = self._start(files, "quire_allocator", "--metrics", "127.0.0.1:0")
        own = ("--allocator", allocator.address, "--metrics", "127.0.0.1:0", "--blocks", "4096")
        worker = self._start(files, "quire_worker", "--model", str(DEMO), *own)
        self.gateway = self._start(files, "quire_gateway", "--worker", worker.address, "--allocator", allocator.address)

    def _start(self, files: ExitStack, package: str, *options: str) -> ServerProcess:
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(Path(__file__).parent),
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
        self.servers[package] = server
        return server

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU time of each server so far."""
        return {package: _cpu_s(server.process.pid) for package, server in self.servers.items()}

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


def measured(options: argparse.Namespace) -> list[Row]:
    """Returns a row for each part of each server."""
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as files:
            stack = Stack(Path(folder), files)
            before = stack.cpu_s()
            load(stack.gateway.address, options)
            after = stack.cpu_s()
        parts = {package: stack.parts(package) for package in PROBED}
    rows: list[Row] = []
    rests_s = {}
    for package, own in parts.items():
        rests_s[package] = after[package] - before[package] - sum(part["seconds"] for part in own.values())
        rows += [row_of(package.removeprefix("quire_"), name, [part], rests_s[package]) for name, part in own.items()]
    for name in dict.fromkeys(name for own in parts.values() for name in own):
        of_all = [own[name] for own in parts.values() if name in own]
        rows.append(row_of("all three", name, of_all, sum(rests_s.values())))
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
