"""Hit ratios of prompts in vLLM's scheduler with its own block manager and with Quire's, on a trace of requests.
Quire's manager is measured twice: with its core in process, and with an allocator in another process.

    python benchmarks/vllm_cache.py --trace FILE [--sizes 1000 3000 10000] [--requests 3000]
                                    [--layers full windows chunks] [--json]

A trace has a line of JSON per request, with `hash_ids` (one id per prompt block, equal at the start of two requests
that share a prefix) and `output_length`. The trace is scaled down: four tokens represent the 512 tokens of a block.
There is no model; vLLM's scheduler admits requests as earlier ones end. `scripts/vllm_cpu.sh` makes the environment.
"""

from __future__ import annotations

import argparse
import json
import os
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


def measure(options: argparse.Namespace) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Runs all managers on the layers of each model at each size, in one process, with an allocator in another one."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        command = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
        allocator = ServerProcess("quire_allocator", command, folder=Path(folder), log=Path(folder) / "log")
        try:
            allocator.wait_ready(deadline=time.monotonic() + 30)
            return measure_beside(allocator.address, options)
        finally:
            allocator.stop()


def measure_beside(allocator: str, options: argparse.Namespace) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Measures with the allocator at this address."""
    job = {
        "allocator": allocator,
        "model": str(options.model.resolve()),
        "trace": str(options.trace.resolve()),
        "requests": options.requests,
        "sizes": options.sizes,
        "at_once": options.at_once,
        "layers": options.layers,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in SOURCES),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(options.vllm), str(Path(__file__).parent / "vllm_sides" / "cache.py"), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    told: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(line.removeprefix("RESULT "))
    return told


def main() -> None:
    """Measures, and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="file of requests, one line of JSON per request")
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "models" / "demo",
        help="folder of the model; only its configuration is read",
    )
    parser.add_argument("--vllm", type=Path, default=PYTHON, metavar="PYTHON", help="default: build/peers/vllm-cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 3000, 10_000], help="blocks of the cache")
    parser.add_argument(
        "--requests", type=int, default=3000, help="number of requests, from the beginning of the trace"
    )
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument(
        "--layers",
        choices=["full", "windows", "chunks"],
        nargs="+",
        default=["full", "windows", "chunks"],
        help="full attention, alone or with two groups of windows or of chunks of 32 tokens (default: all)",
    )
    add_output_arguments(parser)
    options = parser.parse_args()
    if not options.vllm.exists():
        sys.exit("not run: vLLM's CPU engine is not there; scripts/vllm_cpu.sh makes it")
    rows, goals = [], []
    told = measure(options)
    for layers, size, sides in [(layers, size, sides) for layers, own in told.items() for size, sides in own.items()]:
        ratios = {side: own["hits"] / own["asked"] for side, own in sides.items()}
        for side, own in sides.items():
            row = {"layers": layers, "blocks": int(size), "side": side}
            row |= {"prompt_tokens": own["asked"], "hit_tokens": own["hits"]}
            rows.append({**row, "hit_ratio": round(ratios[side], 4)})
        goals += [
            Goal(f"hit ratio, {layers}, {size} blocks, {side}", ratios[side], ratios["stock"], "higher")
            for side in ("embedded", "remote")
        ]
    publish("vLLM's scheduler on a trace", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
