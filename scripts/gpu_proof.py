"""Checks and measures Quire on a GPU in one run: `make gpu-proof OUT=FOLDER`. Without a venv, run this file itself.

Each part is its own process. When its time is over, the process and its children are ended. A part that fails or runs
out of time keeps the rows that it has written, and the next part runs. The parts, in order:

    machine      versions, memory, and the chip's speed in a copy and a matrix product
    correctness  the kernels for Hopper chips against float64
    text         greedy text of several model families: from CUDA graphs, launched by the host, and from transformers
    tests        as many tests of `make test-gpu` as the time allows, the newest first
    kernels      attention beside the speed of a copy and of a matrix product, for the cases with goals
    serving      tokens a second of a model with the shape of Llama 8B, its memory, and where its GPU time goes

`--dry` needs no GPU: kernels run in Triton's interpreter on tiny shapes, and the demo model is served on the CPU.

If the servers lack packages, the run ends before the first part with status 2, because nothing could be measured.

OUT gets `proof.json` (commit, machine, rows and goals), `log.txt` (the output of the parts) and the ends of the
servers' logs. The exit code is 0 if every part ran to its end, whether goals are met or not. A dry run also fails if a
check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("client", "allocator_service", "gateway_service", "worker_service", "benchmarks", "")
PARTS = {"machine": 40, "correctness": 60, "text": 60, "tests": 100, "kernels": 60, "serving": 240}
TOGETHER = {"correctness", "text"}  # parts that may run at the same time, because they measure no times
DRY_SECONDS = 170  # seconds for each part of a dry run
ENDS_S = 5.0  # seconds after which a part that was asked to end is killed
LOG_BYTES = 200_000  # bytes kept from the end of each server's log
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-proof", help="folder of the results")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=list(PARTS),
        metavar="PART[=SECONDS]",
        help="parts to run, in this order (default: all)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=540.0,
        help="time limit of all parts together, in seconds (default: %(default)s)",
    )
    parser.add_argument("--dry", action="store_true", help="run only the parts that need no GPU, on tiny shapes")
    parser.add_argument("--commit", help="measured commit, for a copy without git")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=ROOT / "build" / "gpu-wheels",
        help="folder of wheels to install first, if it exists",
    )
    options = parser.parse_args()
    options.seconds = {}
    for part in options.parts:
        name, _, seconds = part.partition("=")
        if name not in PARTS:
            parser.error(f"--parts: {name!r} is not a part: use {', '.join(PARTS)}")
        options.seconds[name] = float(seconds or (DRY_SECONDS if options.dry else PARTS[name]))
    return options


def commit_of(given: str | None) -> str:
    """Returns the given commit, else git's, else the commit in the file COMMIT, else "unknown"."""
    if given:
        return given
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    noted = ROOT / "COMMIT"
    return git.stdout.strip() or (noted.read_text().strip() if noted.is_file() else "unknown")


def install(wheels: Path, site: Path) -> None:
    """Installs wheels to a folder. Also marks this package as installed there, because servers read its version."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if found and importlib.util.find_spec("quire") is None:  # If quire is installed, so are the packages.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        done = subprocess.run([*pip, "--target", str(site), *found], check=False)
        print(f"{len(found)} wheels installed" if done.returncode == 0 else "wheels could not be installed", flush=True)
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None, "pyproject.toml has no version"
    about = site / f"quire_kv-{version[1]}.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: quire-kv\nVersion: {version[1]}\n")


def environment(site: Path, out: Path, commit: str, *, dry: bool) -> dict[str, str]:
    """Returns the environment variables of the parts."""
    paths = [str(site), *(str(ROOT / source) for source in SOURCES)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "QUIRE_COMMIT": commit,
        "QUIRE_PROOF_OUT": str(out),
        "QUIRE_PROOF_DRY": "1" if dry else "",
    }


def lacking(env: dict[str, str]) -> str:
    """Returns which package the servers lack in this environment; "" if they lack none."""
    servers = ("allocator", "worker")
    code = f"from quire._extras import require_extra; [*map(require_extra, {servers})]; import cryptography.x509"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


@dataclass
class Ran:
    """The result of a part."""

    name: str
    seconds: float
    ended: str  # "done", "failed" or "out of time"
    rows: list[Row]


def run_part(name: str, seconds: float, env: dict[str, str], folder: Path, log: TextIO) -> Ran:
    """Runs a part in its own session, for at most `seconds`."""
    rows = folder / f"{name}.jsonl"
    rows.unlink(missing_ok=True)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", f"proof_sides.{name}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
        env={**env, "QUIRE_PROOF_ROWS": str(rows), "QUIRE_PROOF_SECONDS": str(seconds)},
    )  # fmt: skip
    assert process.stdout is not None
    reader = threading.Thread(target=_forward, args=(process.stdout, log), daemon=True)
    reader.start()
    try:
        ended = "done" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        ended = "out of time"
    finally:
        _end(process)
    reader.join(ENDS_S)
    lines = rows.read_text().splitlines() if rows.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]  # The last line may be cut off.
    return Ran(name, round(time.monotonic() - started, 1), ended, found)


def groups_of(names: list[str]) -> list[list[str]]:
    """Returns the parts in order, in groups that may run at the same time."""
    groups: list[list[str]] = []
    for name in names:
        if groups and name in TOGETHER and groups[-1][-1] in TOGETHER:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def say(log: TextIO, line: str) -> None:
    """Prints a line, and adds it to the log."""
    print(line, flush=True)
    log.write(line + "\n")


def _forward(lines: TextIO, log: TextIO) -> None:
    for line in lines:
        print(line, end="", flush=True)
        log.write(line)
        log.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a part and its whole session. Servers have their own sessions, and end when their parent does."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)


def keep_ends(folder: Path, out: Path) -> None:
    """Writes the end of each server's log to one file."""
    kept = []
    for path in sorted(folder.glob("**/*.log")):
        kept.append(f"==== {path.relative_to(folder)}\n{path.read_bytes()[-LOG_BYTES:].decode(errors='replace')}\n")
    if kept:
        (out / "servers.txt").write_text("".join(kept))


def main() -> None:
    """Runs the parts, and writes their results."""
    options = arguments()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    commit, started = commit_of(options.commit), time.monotonic()
    ran: list[Ran] = []
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="quire-proof-")))
        log, site = ending.enter_context((out / "log.txt").open("w")), folder / "site"
        install(options.wheels, site)
        env = environment(site, folder, commit, dry=options.dry)
        if why := lacking(env):
            print(f"gpu-proof: {why}", file=sys.stderr)
            sys.exit(2)
        for names in groups_of(list(options.seconds)):
            over_s = time.monotonic() - started
            seconds = {name: min(options.seconds[name], options.budget - over_s) for name in names}
            if max(seconds.values()) < 1:
                ran += [Ran(name, 0.0, "no time left", []) for name in names]
                continue
            say(log, f"==== {', '.join(names)}: at most {max(seconds.values()):.0f} s, {over_s:.0f} s are over")
            with ThreadPoolExecutor(len(names)) as threads:
                begun = [threads.submit(run_part, name, seconds[name], env, folder, log) for name in names]
                for part in (each.result() for each in begun):
                    ran.append(part)
                    say(log, f"==== {part.name}: {part.ended} after {part.seconds:.0f} s")
            write(out, ran, commit)
        keep_ends(folder, out)
    goals = write(out, ran, commit)
    print_summary(ran, goals)
    failed = [part.name for part in ran if part.ended != "done"]
    broken = [row for part in ran for row in part.rows if row.get("passed") is False] if options.dry else []
    for row in broken:
        print(f"failed: {row}")
    sys.exit(1 if failed or broken else 0)


def write(out: Path, ran: list[Ran], commit: str) -> list[Row]:
    """Writes `proof.json`, and returns its goals."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from proof_sides.goals import goals_of

    machine = next((row["machine"] for part in ran for row in part.rows if row.get("machine")), "unknown")
    goals = goals_of([row for part in ran for row in part.rows])
    parts = [{"part": part.name, "seconds": part.seconds, "ended": part.ended} for part in ran]
    rows = [{"part": part.name, **row} for part in ran for row in part.rows]
    proof = {"commit": commit, "machine": machine, "parts": parts, "rows": rows, "goals": goals}
    (out / "proof.json").write_text(json.dumps(proof, indent=1) + "\n")
    return goals


def print_summary(ran: list[Ran], goals: list[Row]) -> None:
    """Prints how each part ended, and every goal."""
    for part in ran:
        print(f"{part.name:12} {part.ended:12} {part.seconds:6.1f} s  {len(part.rows)} rows")
    for goal in goals:
        value = "no value" if goal["value"] is None else f"{goal['value']:.3g}"
        met = "met" if goal["is_met"] else "NOT met"
        print(f"{met:8} {goal['name']}: {value} ({goal['better']} than {goal['goal']:g} is better)")


if __name__ == "__main__":
    main()
