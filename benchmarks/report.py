"""The report of every benchmark, as a table, JSON or CSV: rows, goals, the commit and the machine."""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal for a figure. Unmet goals are reported like met ones."""

    name: str  # the name in the report; if `value` is None, the name ends with the reason
    value: float | None
    goal: float
    better: str  # "higher" or "lower"

    @property
    def is_met(self) -> bool:
        """Returns whether the value reaches the goal; False without a value."""
        if self.value is None:
            return False
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every benchmark has: where its rows go."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--csv", help="write the rows to this file, and remove rows of other commits from it")


def core_build() -> str:
    """Returns which core of the allocator is measured: "compiled", as shipped, or "interpreted"."""
    from quire_allocator.core import pool  # Imported here, because some benchmarks run without the allocator.

    return "interpreted" if str(pool.__file__).endswith(".py") else "compiled"


def commit() -> str:
    """Returns the measured commit. The commit ends with + if the working tree differs from it in more than results."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
    return (git("rev-parse", "--short", "HEAD") or os.environ.get("QUIRE_COMMIT", "unknown")) + ("+" if changed else "")


def machine() -> str:
    """Returns the processor and the number of usable cores."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows with the same columns, printed as one table and written to one file."""

    title: str
    rows: Sequence[dict[str, object]]
    goals: Sequence[Goal]
    csv_file: str | None


def publish(
    title: str, rows: Sequence[dict[str, object]], goals: Sequence[Goal], *, as_json: bool, csv_file: str | None
) -> None:
    """Prints the rows as a table or as JSON, and writes them to a CSV file if one is named."""
    publish_parts([Part(title, rows, goals, csv_file)], as_json=as_json)


def publish_parts(parts: Sequence[Part], *, as_json: bool, accelerator: str = "") -> None:
    """Prints a table per part, or all parts as one JSON object. Writes each part to its CSV file, if it names one."""
    where = f"{machine()}, {accelerator}" if accelerator else machine()
    origin = {"commit": commit(), "machine": where, "command": " ".join(["python", *sys.argv])}
    for part in parts:
        if part.csv_file is not None:
            _write(Path(part.csv_file), [{**origin, **row} for row in part.rows])
    if as_json:
        rows = [row for part in parts for row in part.rows]
        described = [asdict(goal) for part in parts for goal in part.goals]
        print(json.dumps({"commit": origin["commit"], "machine": where, "rows": rows, "goals": described}))
        return
    for part in parts:
        _print_table(part, f"{where}; commit {origin['commit']}")


def _print_table(part: Part, caption: str) -> None:
    from rich.console import Console  # Imported here: the rest of this file needs only Python.
    from rich.table import Table

    table = Table(title=part.title, caption=caption)
    for column in part.rows[0]:
        table.add_column(column)
    for row in part.rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console(width=max(Console().width, 120))
    console.print(table)
    for goal in part.goals:
        met = "met" if goal.is_met else "NOT met"
        value = "no value" if goal.value is None else f"{goal.value:.3g}"
        console.print(f"{goal.name}: {value} ({goal.better} than {goal.goal:g} is better: {met})")


def _write(file: Path, rows: Sequence[dict[str, object]]) -> None:
    """Adds rows to the rows of the same commit, and drops rows of other commits: a file has the rows of one commit."""
    file.parent.mkdir(parents=True, exist_ok=True)
    before: list[dict[str, str]] = []
    if file.exists():
        with file.open(newline="", encoding="utf-8") as stream:
            before = [row for row in csv.DictReader(stream) if row["commit"] == rows[0]["commit"]]
    kept: list[Mapping[str, object]] = [*before, *rows]
    columns = list(dict.fromkeys(column for row in kept for column in row))
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=columns, restval="")
        writer.writeheader()
        writer.writerows(kept)
