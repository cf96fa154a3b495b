"""Tokens a second through client, worker and allocator, against transformers on the same prompts.

All sides compute the same greedy tokens from the same checkpoint in float32 with one thread of torch each, in turn,
`--repeat` times; medians are printed, and the most resident memory that each side needed. Quire gets the prompts as
concurrent requests over gRPC; transformers gets them without a network, once as one left-padded batch (`generate`) and
once through its own continuous batching (`generate_batch`), each in a process of its own. Prompts are new in every
round, so that nothing is found in a cache.

vLLM's CPU backend is not among the sides yet; a script `serving.py` is to put it beside these in the same rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from end_to_end_sides.llama import DEMO, make_llama_32m
from end_to_end_sides.transformers_side import peak_bytes
from quire import AsyncClient
from quire.local import LocalStack
from report import Goal, add_output_arguments, publish

PEERS = {"generate": "padded", "generate_batch": "continuous"}
WARM_UP_ROUNDS = 1
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        action="append",
        help="`demo`, `llama-32m` (random weights) or a folder; repeatable (default: llama-32m, then demo)",
    )
    parser.add_argument("--requests", type=int, default=32, help="prompts per round (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    add_output_arguments(parser)
    options = parser.parse_args()
    if min(options.requests, options.prompt_tokens, options.output_tokens, options.repeat) < 1:
        parser.error("--requests, --prompt-tokens, --output-tokens and --repeat must be at least 1")
    return options


def draw_prompts(options: argparse.Namespace, *, varied: bool, round_number: int, vocabulary: int) -> list[list[int]]:
    """Random tokens; of one length, or of a quarter to the whole of it.

    The seed is text, because Python takes the seeds 1 and -1 for the same, and a repeated prompt would be cached.
    """
    dice = random.Random(f"{'varied' if varied else 'fixed'} {round_number}")
    lengths = [
        dice.randint(max(options.prompt_tokens // 4, 1), options.prompt_tokens) if varied else options.prompt_tokens
        for _ in range(options.requests)
    ]
    return [[dice.randrange(1, vocabulary) for _ in range(length)] for length in lengths]


class Peer:
    """transformers in a process of its own."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "end_to_end_sides.transformers_side", str(folder), kind],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"transformers ended with {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def generate(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, float]:
        """Seconds, and the peak of resident memory in bytes."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "output_tokens": output_tokens}), file=self._process.stdin, flush=True)
        answer = self._answer()
        return answer["seconds"], answer["peak_bytes"]

    def close(self) -> None:
        """Ends the process, which answers until its input does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Measured:
    """What one side needed, round by round."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0

    def add(self, seconds: float, peak: float) -> None:
        """Adds a round to those measured."""
        self.seconds.append(seconds)
        self.peak_bytes = max(self.peak_bytes, peak)


async def through_quire(client: AsyncClient, prompts: list[list[int]], output_tokens: int) -> float:
    """Seconds for all prompts, sent at once."""
    started = time.perf_counter()
    outputs = await asyncio.gather(
        *(client.generate(prompt, max_tokens=output_tokens, ignore_eos=True) for prompt in prompts)
    )
    seconds = time.perf_counter() - started
    assert all(output.usage.output_token_count == output_tokens for output in outputs)
    return seconds


async def measure(options: argparse.Namespace, name: str, stack: LocalStack, peers: dict[str, Peer]) -> list[Row]:
    """One row per kind of prompt and side."""
    rows: list[Row] = []
    async with AsyncClient(stack.worker_address) as client:
        vocabulary = (await client.status()).vocabulary_size
        for varied in (False, True):
            sides = {side: Measured() for side in ("quire", *peers)}
            for round_number in range(-WARM_UP_ROUNDS, options.repeat):
                prompts = draw_prompts(options, varied=varied, round_number=round_number, vocabulary=vocabulary)
                found = {"quire": (await through_quire(client, prompts, options.output_tokens), quire_bytes(stack))}
                for side, peer in peers.items():
                    found[side] = await asyncio.to_thread(peer.generate, prompts, options.output_tokens)
                if round_number >= 0:
                    for side, values in found.items():
                        sides[side].add(*values)
            rows += [row_of(options, name, side, varied, sides) for side in sides]
            print(f"{name}, {rows[-1]['prompts']}: measured", file=sys.stderr)
    return rows


def quire_bytes(stack: LocalStack) -> float:
    """The peak of resident memory of the allocator and the worker together, in bytes."""
    servers = [server for server in (stack.allocator, stack.worker) if server is not None]
    return float(sum(peak_bytes(server.process.pid) for server in servers))


def row_of(options: argparse.Namespace, name: str, side: str, varied: bool, sides: dict[str, Measured]) -> Row:
    """Medians of one side; `quire_over_it` is the median of the ratios of each round."""
    mine, quire = sides[side], sides["quire"]
    ratios = [theirs / ours for theirs, ours in zip(mine.seconds, quire.seconds, strict=True)]
    tokens = options.requests * options.output_tokens
    return {
        "model": name,
        "prompts": "varied lengths" if varied else "one length",
        "requests": options.requests,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "side": side,
        "tokens_per_s": round(tokens / statistics.median(mine.seconds), 1),
        "peak_mib": round(mine.peak_bytes / 2**20),
        "quire_over_it": round(statistics.median(ratios), 3),
    }


def goals_of(rows: list[Row]) -> list[Goal]:
    """Quire over the better of both peers, for every model and kind of prompt."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["side"] != "quire":
            key = (row["model"], row["prompts"])
            best[key] = min(best.get(key, float("inf")), row["quire_over_it"])
    return [
        Goal(f"tokens/s, Quire over the best of transformers, {model}, {prompts}", ratio, 1.0, "higher")
        for (model, prompts), ratio in best.items()
    ]


def measure_model(options: argparse.Namespace, name: str, folder: Path) -> list[Row]:
    """Starts all sides for a model and measures them in turn."""
    peers: dict[str, Peer] = {}
    try:
        with LocalStack(str(folder), worker_arguments=("--dtype", "float32")) as stack:
            for side, kind in PEERS.items():
                peers[side] = Peer(folder, kind)
            return asyncio.run(measure(options, name, stack, peers))
    finally:
        for peer in peers.values():
            peer.close()


def main() -> None:
    """Measures everything and prints or writes what was asked for."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = arguments()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        for name in options.model or ["llama-32m", "demo"]:
            folder = {"demo": DEMO, "llama-32m": Path(made) / name}.get(name, Path(name))
            if name == "llama-32m":
                make_llama_32m(folder)
            rows += measure_model(options, name, folder)
    publish("Quire against transformers", rows, goals_of(rows), as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
