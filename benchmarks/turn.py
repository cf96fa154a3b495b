"""Cost of a worker's turn outside its forward pass, with a real worker, allocator and client on a CPU.

The worker's process reads the clock on the model's thread (`turn_sides/probed_worker.py`) while requests of one length
decode together. Rows count turns where all requests decode and the pass was planned ahead:

    gap      from the end of a pass, with its tokens drawn, to the beginning of the next pass
    host     from the end of a forward pass to the beginning of the next one: the gap, and the work of the model's
             thread around a forward pass: it reads tokens, batches them, and checks that values are finite
    forward  the forward pass itself

Further columns have the CPU time per turn of the worker's event loop, of its other threads, of the allocator and of the
client (`/proc/PID/task/TID/schedstat`). All values are medians. The goals are for the turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire import AsyncClient
from quire.local import ServerProcess
from report import Goal, add_output_arguments, publish
from serving_sides.models import DEMO
from serving_sides.workload import KINDS, Workload

GAP_GOAL_MS, HOST_GOAL = 0.3, 0.05
BLOCK_TOKENS, CACHE_TOKENS = 16, 16_384
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the model (default: the demo model)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--requests", nargs="+", type=int, default=[32, 1], help="requests at once (default: 32 and 1)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=10, help="rounds (default: %(default)s)")
    add_output_arguments(parser)
    options = parser.parse_args()
    if min(*options.requests, options.prompt_tokens, options.repeat) < 1 or options.output_tokens < 8:
        parser.error("all numbers must be at least 1, and --output-tokens 8")
    return options


class Stack:
    """An allocator, and a worker that notes its passes."""

    def __init__(self, model: Path, dtype: str, folder: Path) -> None:
        addresses = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
        self._turns = folder / "turns.json"
        self.allocator = ServerProcess("quire_allocator", addresses, folder=folder, log=folder / "allocator.log")
        self.allocator.wait_ready(deadline=time.monotonic() + 60)
        sizes = ["--blocks", str(CACHE_TOKENS // BLOCK_TOKENS), "--block-size", str(BLOCK_TOKENS)]
        self.worker = ServerProcess(
            "turn_sides.probed_worker",
            ["--model", str(model), "--dtype", dtype, "--allocator", self.allocator.address, *addresses, *sizes],
            folder=folder,
            log=folder / "worker.log",
            environment={
                "OMP_WAIT_POLICY": "PASSIVE",
                "PYTHONPATH": str(Path(__file__).parent),
                "QUIRE_TURNS": str(self._turns),
            },
        )
        self.worker.wait_ready(deadline=time.monotonic() + 120)

    def turns(self) -> list[Row]:
        """Returns the passes noted since the last call."""
        self._turns.unlink(missing_ok=True)
        self.worker.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while not self._turns.exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the worker did not send its notes")
            time.sleep(0.01)
        found: list[Row] = json.loads(self._turns.read_text())
        return found

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU time of each part so far: the worker's event loop, its other threads, the allocator, the
        client."""
        worker = _thread_seconds(self.worker.process.pid)
        loop = worker.pop(self.worker.process.pid)
        return {
            "loop": loop,
            "worker": sum(worker.values()),
            "allocator": sum(_thread_seconds(self.allocator.process.pid).values()),
            "client": sum(_thread_seconds(os.getpid()).values()),
        }

    def stop(self) -> None:
        """Ends the worker, then the allocator."""
        self.worker.stop()
        self.allocator.stop()


def _thread_seconds(pid: int) -> dict[int, float]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # The thread has just ended.
            continue
    return found


async def rounds(stack: Stack, workload: Workload, repeat: int) -> tuple[list[Row], dict[str, float]]:
    """Runs rounds after a warm-up round; returns their passes, and the CPU time of all parts during them."""
    turns: list[Row] = []
    spent: dict[str, float] = {}
    async with AsyncClient(stack.worker.address) as client:
        vocabulary = (await client.status()).vocabulary_size
        for number in range(-1, repeat):
            asked = workload.draw(number, vocabulary)
            before = stack.cpu_s()
            await asyncio.gather(
                *(client.generate(each["prompt"], max_tokens=each["output_tokens"], ignore_eos=True) for each in asked)
            )
            after, noted = stack.cpu_s(), stack.turns()
            if number >= 0:
                turns += [*noted, {}]  # {} stands for the end of a round.
                spent = {name: spent.get(name, 0.0) + after[name] - before[name] for name in after}
    return turns, spent


def row_of(turns: list[Row], spent: dict[str, float], request_count: int) -> Row:
    """Returns medians of the turns where all requests decode."""
    decoding = [1] * request_count
    pairs = [
        (one, two)
        for one, two in pairwise(turns)
        if one.get("lengths") == two.get("lengths") == decoding and two["is_behind"]
    ]
    forward_ms = statistics.median(1e3 * (two["forward_s"][1] - two["forward_s"][0]) for _, two in pairs)
    host_ms = [1e3 * (two["forward_s"][0] - one["forward_s"][1]) for one, two in pairs]
    gaps_ms = sorted(1e3 * (two["begin_s"] - one["end_s"]) for one, two in pairs)
    passes = sum(bool(turn) for turn in turns)
    return {
        "requests": request_count,
        "turns": len(pairs),
        "forward_ms": round(forward_ms, 3),
        "host_ms": round(statistics.median(host_ms), 3),
        "gap_ms": round(statistics.median(gaps_ms), 3),
        "gap_p90_ms": round(gaps_ms[len(gaps_ms) * 9 // 10], 3),
        **{f"{name}_cpu_ms": round(1e3 * seconds / passes, 3) for name, seconds in spent.items()},
    }


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    rows: list[Row] = []
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            stack = Stack(options.model, dtype, Path(folder))
            try:
                for count in options.requests:
                    workload = Workload(KINDS[0], count, options.prompt_tokens, options.output_tokens)
                    turns, spent = asyncio.run(rounds(stack, workload, options.repeat))
                    rows.append({"model": options.model.name, "dtype": dtype, **row_of(turns, spent, count)})
            finally:
                stack.stop()
    goals = []
    for row in rows:
        title = f"{row['model']}, {row['dtype']}, {row['requests']} decode"
        goals.append(Goal(f"next pass after the end of one, ms, {title}", row["gap_ms"], GAP_GOAL_MS, "lower"))
        share = round(row["host_ms"] / row["forward_ms"], 3)
        goals.append(Goal(f"host work over forward, {title}", share, HOST_GOAL, "lower"))
    publish("A turn of the worker", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
