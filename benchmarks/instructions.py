"""Instruction counts of the compiled core's operations, by callgrind: the same on every run.

Times on a noisy machine hide changes of a few per cent; this count shows them. `--check` compares with the committed
rows and fails where an operation takes 3 % more or less. `--write` commits a gain, too. Rows hold for one Python and
one C compiler. Under another Python or compiler, the script says that it cannot compare.

The script needs valgrind and a C compiler. `make instructions` first compiles the core, and then runs this script.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from report import Goal, add_output_arguments, core_build, publish

SIDES: Final = Path(__file__).parent / "instructions_sides"
COMMITTED: Final = Path(__file__).parent / "results" / "instructions.csv"
SHARE_MAX: Final = 0.03
COLUMNS: Final = ("operation", "unit", "instructions", "python", "compiler")


class Count(NamedTuple):
    """The number of instructions of one unit of an operation."""

    operation: str
    unit: str
    instructions: float


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="fail if a count differs from the committed one by more than 3 %%"
    )
    parser.add_argument("--write", action="store_true", help="write the counts to the committed rows")
    add_output_arguments(parser)
    return parser.parse_args()


def compiler() -> str:
    """Returns the C compiler and its major version."""
    said = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    version = subprocess.run(["cc", "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{'clang' if 'clang' in said else 'gcc'} {version.split('.')[0]}"


def python() -> str:
    """Returns the running Python's version without its patch number."""
    return ".".join(platform.python_version_tuple()[:2])


def count() -> list[Count]:
    """Runs all operations once under callgrind."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        library = f"{folder}/counter.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, str(SIDES / "counter.c")], check=True)
        out = Path(folder) / "counts"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        command += [sys.executable, "-m", "instructions_sides.counted", library]
        paths = [str(SIDES.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            sys.exit(done.stderr[-4000:])
        totals = {}
        for file in Path(folder).glob("counts.*"):
            text = file.read_text(encoding="utf-8")
            name = re.search(r"^desc: Trigger: Client Request: (\d+)$", text, re.MULTILINE)
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            if name and total:
                totals[name[1]] = int(total[1])
    counts = []
    for line in done.stdout.splitlines():
        number, operation, unit, units = line.split("\t")
        counts.append(Count(operation, unit, round(totals[number] / int(units), 1)))
    return counts


def committed() -> dict[str, float]:
    """Returns the committed counts for this Python and this compiler, by operation."""
    with COMMITTED.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["python"], row["compiler"]) == (python(), compiler())]
    return {row["operation"]: float(row["instructions"]) for row in rows}


def write(counts: list[Count]) -> None:
    """Replaces the committed rows."""
    with COMMITTED.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([*each, python(), compiler()] for each in counts)


def main() -> None:
    """Counts the instructions, and prints, writes or checks them."""
    options = arguments()
    if shutil.which("valgrind") is None or shutil.which("cc") is None:
        sys.exit("not run: valgrind or a C compiler is not installed")
    if core_build() != "compiled":
        sys.exit("the core is not compiled: run `make instructions`")
    counts = count()
    if options.write:
        write(counts)
    before = committed()
    rows: list[dict[str, object]] = []
    goals = []
    for each in counts:
        known = before.get(each.operation)
        over = each.instructions / known if known else None
        rows.append({**each._asdict(), "over_committed": "" if over is None else round(over, 4)})
        goals.append(Goal(f"{each.operation}: away from the committed count",
                          None if over is None else abs(over - 1), SHARE_MAX, "lower"))  # fmt: skip
    publish("Instructions of the compiled core", rows, goals, as_json=options.json, csv_file=options.csv)
    if options.check and not before:
        print(f"not compared: no rows of Python {python()} and {compiler()} are committed")
    elif options.check and (wrong := [goal.name for goal in goals if not goal.is_met]):
        sys.exit(
            f"{len(wrong)} counts are not within 3 % of the committed ones; if that is meant: make instructions WRITE=1"
        )


if __name__ == "__main__":
    main()
