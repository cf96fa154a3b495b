"""A figure in the README is a committed row's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import figures


def test_the_table_of_the_readme_is_made_of_the_rows() -> None:
    text = figures.README.read_text(encoding="utf-8")
    assert text.count(figures.BEGIN) == text.count(figures.END) == 1
    assert text.split(figures.BEGIN)[1].split(figures.END)[0] == figures.table(), "benchmarks/figures.py --write"


def test_the_chart_of_the_readme_is_made_of_the_rows() -> None:
    assert figures.CHART.read_text(encoding="utf-8") == figures.chart(), "benchmarks/figures.py --write"
