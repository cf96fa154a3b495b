"""Checks session.pml with Spin: exhaustively within each configuration's bounds, then with each mistake planted.

Fails if a configuration has an error, a mistake is not noticed, or a search could not be finished. Needs `spin` and a
C compiler; everything that is made goes to build/model/.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
MODEL = HERE / "session.pml"
BUILD = HERE.parents[1] / "build" / "model"
MEMORY_MB = 4_000  # of one search; two of them run at a time on two cores
CPU_S_MAX = 900  # of one search

LOSS, CRASH, EXPIRY, RESTART, RIVAL, DEFECT, DEVICE = (1 << bit for bit in range(7))
Bounds = dict[str, int]

CONFIGURATIONS: dict[str, Bounds] = {
    "no fault, six operations": {"OPS": 6, "FAULTS": 0, "ALLOCATORS": 1},
    "one fault of any kind": {"OPS": 3, "FAULTS": 1},
    "two faults of any kind": {"OPS": 2, "FAULTS": 2},
    "two faults of any kind, one allocator": {"OPS": 3, "FAULTS": 2, "ALLOCATORS": 1},
    "streams lost, allocators crash": {"OPS": 3, "FAULTS": 2, "KINDS": LOSS + CRASH},
    "the same, three times": {"OPS": 2, "FAULTS": 3, "KINDS": LOSS + CRASH},
    "leases end, owners die, rivals": {"OPS": 2, "FAULTS": 2, "KINDS": LOSS + EXPIRY + RESTART + RIVAL},
    "defects and failed passes": {"OPS": 4, "FAULTS": 2, "KINDS": LOSS + DEFECT + DEVICE, "ALLOCATORS": 1},
    "heartbeats": {"OPS": 3, "FAULTS": 1, "BEATS": 1, "KINDS": LOSS + CRASH},
    "one step at a time": {"OPS": 4, "FAULTS": 2, "WINDOW": 1, "KINDS": LOSS + CRASH, "CONTENTS": 1},
}
# Every run comes to an end, whatever is done in which order: a search for cycles, which costs twice the states.
ENDLESS: dict[str, Bounds] = {"no run goes on for ever": {"OPS": 2, "FAULTS": 1}}
LONG: dict[str, Bounds] = {
    "three faults of any kind, one allocator": {"OPS": 2, "FAULTS": 3, "ALLOCATORS": 1},
    "streams lost, allocators crash, four operations": {"OPS": 4, "FAULTS": 2, "KINDS": LOSS + CRASH},
}
# Under which a mistake is looked for; those that other faults bring to light have their own.
MISTAKE_BOUNDS: Bounds = {"OPS": 3, "FAULTS": 2, "KINDS": LOSS + CRASH}
BOUNDS_OF_MISTAKES: dict[str, Bounds] = {
    "RIVAL_DISPLACES": {"OPS": 2, "FAULTS": 1, "KINDS": RIVAL},
    "INCARNATION_SURVIVES": {"OPS": 2, "FAULTS": 1, "KINDS": RESTART},
    "LEDGER_SURVIVES": {"OPS": 4, "FAULTS": 1, "KINDS": RESTART},
    "LEASE_NEVER_ENDS": {"OPS": 2, "FAULTS": 1, "KINDS": RESTART, "ALLOCATORS": 1},
    "EXPIRED_STREAM_SERVED": {"OPS": 2, "FAULTS": 1, "KINDS": EXPIRY},
    "DEFECT_KEEPS_SESSION": {"OPS": 2, "FAULTS": 1, "KINDS": DEFECT},
    "COMMIT_BEFORE_COMPUTED": {"FAULTS": 1, "KINDS": DEVICE},
    "CUT_REPORT_GOES_ON": {"OPS": 2, "FAULTS": 3, "KINDS": LOSS},
}


class Run(NamedTuple):
    """One search: its name, the model's bounds, and whether to look for cycles instead of wrong states."""

    name: str
    bounds: Bounds
    for_cycles: bool = False


class Result(NamedTuple):
    """The result of a search: `said` is empty if nothing is wrong; `finished` means it saw all states, or an error."""

    states: int
    seconds: float
    said: str
    finished: bool


def limit() -> None:
    """Limits memory and CPU of every process that is started. The system ends a search that needs more."""
    resource.setrlimit(resource.RLIMIT_AS, (2 * MEMORY_MB << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX,) * 2)


def call(command: list[str], folder: Path) -> tuple[str, float]:
    """Runs a command. Returns the output of both streams, and the CPU time in seconds."""
    log = folder / "out.txt"
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return log.read_text(encoding="utf-8"), usage.ru_utime + usage.ru_stime


def search(run: Run) -> Result:
    """Generates the checker, compiles and runs it."""
    folder = BUILD / re.sub(r"\W+", "_", run.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    defines = [f"-D{name}={value}" for name, value in run.bounds.items()]
    mode = "-DNP" if run.for_cycles else "-DSAFETY"
    flags = ["-O1", "-w", "-DCOLLAPSE", "-DNOBOUNDCHECK", "-DNOFAIR", f"-DMEMLIM={MEMORY_MB}", mode]
    said = call(["spin", "-a", *defines, str(MODEL)], folder)[0]
    said += call([compiler(), *flags, "-o", "pan", "pan.c"], folder)[0]
    if not (folder / "pan").exists():
        return Result(0, 0.0, f"no checker could be made: {said.strip()[-300:]}", False)
    output, seconds = call(["./pan", "-m20000", "-w23", "-n", *(["-l"] if run.for_cycles else [])], folder)
    errors, states = re.search(r"errors: (\d+)", output), re.search(r"(\d+) states, stored", output)
    if errors is None or states is None:
        return Result(0, seconds, f"the checker did not finish: {output.strip()[-300:]}", False)
    count = int(states[1])
    if errors[1] != "0":
        return Result(count, seconds, explain(output, defines, folder), True)
    finished = "Search not completed" not in output and "max search depth too small" not in output
    return Result(count, seconds, "" if finished else "bounds of the search were too small", finished)


def explain(output: str, defines: list[str], folder: Path) -> str:
    """Replays the trail, and returns the comment beside the assertion that failed."""
    if "pan:1: invalid end state" in output:
        return "progress: it ends with an operation unanswered"
    if "pan:1: non-progress cycle" in output:
        return "progress: a run goes on for ever"
    replay = call(["spin", "-t", *defines, "-k", "session.pml.trail", str(MODEL)], folder)[0]
    line = re.search(r"session\.pml:(\d+), Error: assertion violated", replay)
    if line is None:
        return output.strip().splitlines()[0]
    source = MODEL.read_text(encoding="utf-8").splitlines()[int(line[1]) - 1]
    comment = re.search(r"/\* (.*) \*/\s*$", source)
    return comment[1] if comment else source.strip()


def compiler() -> str:
    """Returns the command of the C compiler."""
    return os.environ.get("CC", "cc")


def mistakes() -> Iterator[tuple[int, str, str]]:
    """Yields number, name and description of each mistake that the model can plant."""
    for name, number, text in re.findall(
        r"^#define (\w+) +(\d+) +/\* (.*) \*/$", MODEL.read_text("utf-8"), re.MULTILINE
    ):
        if text.startswith("rule"):
            yield int(number), name, text


def show(name: str, result: Result, verdict: str) -> None:
    """Prints the row of one search."""
    print(f"{name:<52} {result.states:>11,} {result.seconds:>7.1f}  {verdict}", flush=True)


def main() -> int:
    """Returns 1 if anything is not as it must be, 2 if a tool is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="larger configurations too")
    parser.add_argument("--jobs", type=int, default=2, help=f"searches at a time, of {MEMORY_MB} MB each (default: 2)")
    parser.add_argument("--only", metavar="WORD", default="", help="what has this word in its name")
    options = parser.parse_args()
    missing = [tool for tool in ("spin", compiler()) if shutil.which(tool) is None]
    if missing:
        print(f"the model needs {' and '.join(missing)} (Debian: apt-get install spin gcc)", file=sys.stderr)
        return 2
    safe = [Run(name, bounds) for name, bounds in {**CONFIGURATIONS, **(LONG if options.long else {})}.items()]
    safe += [Run(name, bounds, for_cycles=True) for name, bounds in ENDLESS.items()]
    planted = [
        Run(name, {**MISTAKE_BOUNDS, **BOUNDS_OF_MISTAKES.get(name, {}), "MISTAKE": number})
        for number, name, _ in mistakes()
    ]
    safe, planted = ([run for run in runs if options.only in run.name] for runs in (safe, planted))
    limit()
    bad, states, started = 0, 0, time.perf_counter()
    print(f"{'configuration':<52} {'states':>11} {'seconds':>7}  result")
    with ThreadPoolExecutor(options.jobs) as pool:
        for run, result in zip(safe, pool.map(search, safe), strict=True):
            states += result.states
            bad += bool(result.said)
            show(run.name, result, f"ERROR: {result.said}" if result.said else "no error")
        print(f"{'planted mistake':<52} {'states':>11} {'seconds':>7}  what broke")
        for run, result in zip(planted, pool.map(search, planted), strict=True):
            caught = bool(result.said) and result.finished
            bad += not caught
            show(run.name, result, result.said if caught else f"NOT NOTICED {result.said}")
    print(f"{states:,} states without a mistake, {len(planted)} mistakes, {time.perf_counter() - started:.0f} s")
    print(f"{len(safe) + len(planted) - bad} passed, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
