"""Speed of vLLM's CPU engine with its own block manager, with Quire's core in process, and with a separate allocator.

    python benchmarks/vllm_engine.py [--rounds 5] [--chat-blocks 60 120 240] [--json]

All three engines are in one process and take turns with the same prompts. Each round begins with another engine. The
texts are compared. Ratios are medians of the rounds' ratios. `scripts/vllm_cpu.sh` makes the environment. (The file is
not named vllm.py, because benchmarks that import vLLM search this folder first.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.local import ServerProcess
from report import Goal, add_output_arguments, publish

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build" / "peers" / "vllm-cpu" / "bin" / "python"
SOURCES = ("integrations/vllm", "allocator_service", "client")
SPEED_GOAL = 0.99


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the engines, with an allocator in another process."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        command = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
        allocator = ServerProcess("quire_allocator", command, folder=Path(folder), log=Path(folder) / "log")
        try:
            allocator.wait_ready(deadline=time.monotonic() + 30)
            job = {
                "model": str(options.model.resolve()),
                "allocator": allocator.address,
                "rounds": options.rounds,
                "prompts": options.prompts,
                "prompt_tokens": 128,
                "new_tokens": options.new_tokens,
                "chats": 24,
                "chat_turns": options.chat_turns,
                "chat_blocks": options.chat_blocks,
                "seed": 1,
            }
            done = subprocess.run(
                [str(options.vllm), str(Path(__file__).parent / "vllm_sides" / "engines.py"), json.dumps(job)],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in SOURCES)},
            )
        finally:
            allocator.stop()
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def rows_of(measured: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Returns one row for each side, and its goals."""
    rounds, chats = measured["speed"], measured["chats"]
    rows, goals = [], []
    for side, own in rounds.items():
        row: dict[str, Any] = {"side": side, "rounds": len(own)}
        for figure in ("tokens_per_s", "scheduler_ms", "first_token_p99_ms"):
            row[figure] = round(statistics.median(each[figure] for each in own), 3)
            ratios = [each[figure] / other[figure] for each, other in zip(own, rounds["stock"], strict=True)]
            row[f"{figure}_over_stock"] = round(statistics.median(ratios), 3)
        for blocks, told in chats.items():
            row["chat_prompt_tokens"] = told["prompt_tokens"]
            row[f"chat_hits_{blocks}_blocks"] = told["hits"][side]
        rows.append(row)
        if side != "stock":
            goals += [
                Goal(f"tokens/s over stock, {side}", row["tokens_per_s_over_stock"], SPEED_GOAL, "higher"),
                Goal(f"scheduler ms a turn over stock, {side}", row["scheduler_ms_over_stock"], 1.0, "lower"),
            ]
            goals += [
                Goal(
                    f"hit ratio of chats in turn, {blocks} blocks, {side}",
                    told["hits"][side] / told["prompt_tokens"],
                    told["hits"]["stock"] / told["prompt_tokens"],
                    "higher",
                )
                for blocks, told in chats.items()
            ]
    return rows, goals


def main() -> None:
    """Measures, and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--vllm", type=Path, default=PYTHON, metavar="PYTHON", help="default: build/peers/vllm-cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--chat-turns", type=int, default=6)
    parser.add_argument(
        "--chat-blocks", type=int, nargs="+", default=[60, 120, 240], help="blocks of the cache for the chats"
    )
    add_output_arguments(parser)
    options = parser.parse_args()
    if not options.vllm.exists():
        sys.exit("not run: vLLM's CPU engine is not there; scripts/vllm_cpu.sh makes it")
    rows, goals = rows_of(measure(options))
    publish("vLLM's CPU engine with three managers", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
