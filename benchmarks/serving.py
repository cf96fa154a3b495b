"""Tokens a second through client, worker and allocator, against vLLM and transformers on the same prompts.

All sides serve the same checkpoint greedily, with one thread of torch each. They take turns, for `--repeat` rounds
after a warm-up. The script prints medians, and the peak resident memory of the process that has the model. Quire gets
the prompts as concurrent requests over gRPC, streams text, and asks its allocator for blocks. vLLM's engine is stepped
in process, without network and detokenizer. transformers gets the prompts as one left-padded batch (`generate`), and
through its own continuous batching (`generate_batch`). Each side has a cache of 16,384 tokens, except `generate`, whose
cache grows.

`--pin` binds all processes of all sides, client and allocator included, to one core. With `--device cuda` it measures
the shape of Llama 8B with random weights instead, compared with the GPU's limits (`serving_sides/gpu_run.py`), for
`--seconds`. There, the only other option with an effect is `--sides`.

vLLM needs its own environment: `scripts/vllm_cpu.sh` makes it, and `--vllm PYTHON` names another one. A side that is
missing or fails is named and left out. `--models`, `--dtypes`, `--kinds` and `--requests` choose parts. Each
combination of model and dtype takes one to three minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from report import Goal, Part, add_output_arguments, publish, publish_parts
from serving_sides import gpu_goals, gpu_run
from serving_sides.models import MADE, make_model
from serving_sides.process import Answer, Request, Side
from serving_sides.quire_side import QuireSide
from serving_sides.workload import KINDS, Workload

SIDES = ("quire", "vllm", "generate", "generate_batch")
TRANSFORMERS = ("generate", "generate_batch")
VLLM = Path(__file__).resolve().parents[1] / "build" / "peers" / "vllm-cpu" / "bin" / "python"
VLLM_GOAL, TRANSFORMERS_GOAL = 1.1, 1.2
WARM_UP_ROUNDS = 1
# Least rounds of workloads with a single request. With 9 rounds, the ratio of Quire's time to first token to vLLM's was
# 0.95 in one run and 1.11 in another.
LONE_ROUNDS = 27
Row = dict[str, Any]


class Generator(Protocol):
    """A side that answers rounds."""

    def generate(self, requests: list[Request]) -> Answer:
        """Runs one round of requests, all at once."""
        ...

    def close(self) -> None:
        """Ends the side's processes."""
        ...


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(["demo", *MADE])
    parser.add_argument("--models", nargs="+", help=f"some of {known}, or folders (default: all but llama-8b)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what varies between requests (default: all)"
    )
    parser.add_argument("--requests", nargs="+", type=int, help="requests at once (default: 32 and 1)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all")
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="tokens of the longest prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=64, help="tokens of the longest output (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=int, default=5, help="rounds; at least 27 for one request (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="on a GPU, time limit of the whole run (default: %(default)s)"
    )
    parser.add_argument("--pin", action="store_true", help="bind all processes to one core")
    parser.add_argument("--vllm", type=Path, default=VLLM, metavar="PYTHON", help="default: build/peers/vllm-cpu")
    add_output_arguments(parser)
    options = parser.parse_args()
    options.models = options.models or ["demo", *(name for name in MADE if name != gpu_run.MODEL)]
    options.dtypes = options.dtypes or ["float32", "bfloat16"]
    options.requests = options.requests or [32, 1]
    if min(*options.requests, options.prompt_tokens, options.output_tokens, options.repeat) < 1:
        parser.error("--requests, --prompt-tokens, --output-tokens and --repeat must be at least 1")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: there is no CUDA GPU here, or this build of torch cannot use one")
    return options


@dataclass
class Measured:
    """The times of one side, round by round."""

    seconds: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0

    def add(self, answer: Answer) -> None:
        """Adds the times of one round."""
        self.seconds.append(answer.seconds)
        if answer.first_token_s is not None:
            self.first_token_s.append(answer.first_token_s)
        self.peak_bytes = max(self.peak_bytes, answer.peak_bytes)


def start(options: argparse.Namespace, name: str, folder: Path, dtype: str, log: Path) -> Generator:
    """Starts one side.

    Raises:
        RuntimeError: the side is missing, or its process ended.
        OSError: its Python cannot be run.
    """
    if name == "quire":
        return QuireSide(folder, dtype, options.device)
    module, python, kind = (
        ("vllm_side", options.vllm, []) if name == "vllm" else ("transformers_side", sys.executable, [name])
    )
    command = [str(python), "-m", f"serving_sides.{module}", str(folder), dtype, options.device, *kind]
    return Side(command, log=log)


def workloads(options: argparse.Namespace) -> Iterator[Workload]:
    """Yields every kind of workload for several requests at once, but only the first kind for a single request."""
    for request_count in options.requests:
        for kind in options.kinds if request_count > 1 else [KINDS[0]]:
            yield Workload(kind, request_count, options.prompt_tokens, options.output_tokens)


def measure(
    options: argparse.Namespace, workload: Workload, sides: dict[str, Generator], vocabulary: int
) -> tuple[dict[str, Measured], list[int]]:
    """Runs all rounds of a workload on all sides. Returns their times, and the number of requested tokens of each
    round. A side that fails is named, and left out from then on."""
    found = {name: Measured() for name in sides}
    counts = []
    repeat = options.repeat if workload.request_count > 1 else max(options.repeat, LONE_ROUNDS)
    for number in range(-WARM_UP_ROUNDS, repeat):
        requests = workload.draw(number, vocabulary)
        for name, side in list(sides.items()):
            try:
                answer = side.generate(requests)
            except (RuntimeError, OSError) as error:
                print(f"{name} failed in {workload}: {error}", file=sys.stderr)
                del sides[name], found[name]
                continue
            if number >= 0:
                found[name].add(answer)
        if number >= 0:
            counts.append(sum(request["output_tokens"] for request in requests))
    return found, counts


def rows_of(
    options: argparse.Namespace, workload: Workload, about: Row, found: dict[str, Measured], counts: list[int]
) -> list[Row]:
    """Returns the medians of every side. `quire_over_it` is the median of the rounds' ratios."""
    quire = found["quire"]
    rows: list[Row] = []
    for name, mine in found.items():
        ratios = [theirs / ours for theirs, ours in zip(mine.seconds, quire.seconds, strict=True)]
        rates = [count / seconds for count, seconds in zip(counts, mine.seconds, strict=True)]
        first = statistics.median(mine.first_token_s) if mine.first_token_s else None
        rows.append(
            {
                **about,
                "requests": workload.request_count,
                "lengths": workload.kind,
                "prompt_tokens": workload.prompt_tokens,
                "output_tokens": workload.output_tokens,
                "cores": "one" if options.pin else "all",
                "side": name,
                "tokens_per_s": round(statistics.median(rates), 1),
                "first_token_ms": "" if first is None or workload.request_count > 1 else round(1e3 * first, 2),
                "peak_mib": round(mine.peak_bytes / 2**20),
                "quire_over_it": round(statistics.median(ratios), 3),
            }
        )
    return rows


def measure_model(options: argparse.Namespace, name: str, folder: Path, dtype: str, logs: Path) -> list[Row]:
    """Starts all sides of a model and measures them alternately."""
    sides: dict[str, Generator] = {}
    rows: list[Row] = []
    try:
        for side in ("quire", *(side for side in options.sides if side != "quire")):
            try:
                sides[side] = start(options, side, folder, dtype, logs / f"{side}.log")
            except (RuntimeError, OSError) as error:
                print(f"{side} does not serve {name} in {dtype}: {error}", file=sys.stderr)
        quire = sides["quire"]
        assert isinstance(quire, QuireSide)
        for workload in workloads(options):
            found, counts = measure(options, workload, sides, quire.vocabulary)
            rows += rows_of(options, workload, {"model": name, "dtype": dtype}, found, counts)
            print(f"{name}, {dtype}, {workload.request_count} x {workload.kind}: measured", file=sys.stderr)
    finally:
        for generator in sides.values():
            generator.close()
    return rows


def goals_of(rows: list[Row]) -> list[Goal]:
    """Returns the goals: Quire's rate divided by vLLM's and by transformers' better side, and the ratio of a single
    request's first token to vLLM's."""
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        title = f"{row['model']}, {row['dtype']}, {row['requests']} x {row['lengths']}"
        groups.setdefault(title, {})[row["side"]] = row
    goals: list[Goal] = []
    for title, sides in groups.items():
        if "vllm" in sides:
            goals.append(Goal(f"tokens/s over vLLM, {title}", sides["vllm"]["quire_over_it"], VLLM_GOAL, "higher"))
        ratios = [sides[side]["quire_over_it"] for side in TRANSFORMERS if side in sides]
        if ratios:
            goals.append(Goal(f"tokens/s over transformers, {title}", min(ratios), TRANSFORMERS_GOAL, "higher"))
        if "vllm" in sides and sides["vllm"]["requests"] == 1:
            ratio = sides["quire"]["first_token_ms"] / sides["vllm"]["first_token_ms"]
            goals.append(Goal(f"first token over vLLM's, {title}", round(ratio, 3), 1.0, "lower"))
    return goals


def measure_on_gpu(options: argparse.Namespace) -> None:
    """Measures Llama 8B's shape on a GPU, and publishes a table for each kind of row."""
    ends_s = time.monotonic() + options.seconds
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as logs:
        for row in gpu_run.rows(
            has_gpu=True, sides=options.sides, left_s=lambda: ends_s - time.monotonic(), logs=Path(logs)
        ):
            print(row, file=sys.stderr, flush=True)
            found.setdefault(" ".join(row), []).append(row)  # one table for each set of columns
    goals = gpu_goals.goals_of([row for rows in found.values() for row in rows])
    parts = [Part(str(rows[0]["measured"]), rows, [], None) for rows in found.values()]
    parts[-1] = replace(parts[-1], goals=goals)
    publish_parts(parts, as_json=options.json)


def main() -> None:
    """Measures everything, and prints or writes the report."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = arguments()
    if options.device == "cuda":
        measure_on_gpu(options)
        return
    if options.pin:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        for name in options.models:
            folder = make_model(name, Path(made) / name)
            for dtype in options.dtypes:
                rows += measure_model(options, name, folder, dtype, Path(made))
    publish("Quire beside vLLM and transformers", rows, goals_of(rows), as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
