"""The errors in the documentation are the measured ones, within the tests' tolerance."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from quire_kernels.shared.reference import CPU_TOLERANCE, LSE_TOLERANCE, MERGE_TOLERANCE, TOLERANCE

ROOT = Path(__file__).resolve().parents[3]
DTYPES = ("float32", "float16", "bfloat16")


def measured() -> dict[tuple[str, str, str], dict[str, str]]:
    with (ROOT / "benchmarks" / "results" / "kernel_errors.csv").open(newline="", encoding="utf-8") as file:
        return {(row["operation"], row["dtype"], row["against"]): row for row in csv.DictReader(file)}


def lines() -> list[str]:
    """Returns the lines of the table in `docs/attention.md`."""
    rows, found = measured(), []
    for operation, cache, against in dict.fromkeys(
        (operation, dtype.removeprefix(dtype.partition(",")[0]), against) for operation, dtype, against in rows
    ):
        cells = [rows[operation, dtype + cache, against] for dtype in DTYPES]
        title = operation + cache  # such as "decode" and ", e4m3 cache"
        found.append(f"| {title} | {against} | {' | '.join(cell['max_abs'] for cell in cells)} |")
    return found


def test_the_documentation_states_what_was_measured() -> None:
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    assert len(lines()) >= 10
    assert [line for line in lines() if line not in text] == []


def test_the_documentation_states_what_tests_allow() -> None:
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    stated = {"attention": TOLERANCE, "`merge_states`": MERGE_TOLERANCE, "on the CPU": CPU_TOLERANCE}
    for title, allowed in stated.items():
        numbers = " | ".join(f"{allowed[getattr(torch, dtype)]:.2g}" for dtype in DTYPES)
        assert f"| tests allow, {title} | 1 + the result | {numbers} |" in text
    assert f"of lse {LSE_TOLERANCE:g}" in text


def test_what_was_measured_is_within_what_tests_allow() -> None:
    shares = [float(row["of_tolerance"]) for row in measured().values() if row["of_tolerance"]]
    assert len(shares) >= 20
    assert max(shares) <= 1
    lses = [float(row["lse_max_abs"]) for row in measured().values() if row["tolerance"] and row["lse_max_abs"]]
    assert len(lses) >= 20
    assert max(lses) <= LSE_TOLERANCE


if __name__ == "__main__":
    print("\n".join(lines()))
