"""Each figure in the README comes from a committed row, and its pictures are the ones that the scripts draw."""

from __future__ import annotations

import csv
import shlex
import sys
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import draw_idea
import draw_pages
import figures
import pytest

RESULTS = figures.ROOT / "benchmarks" / "results"


def test_the_table_of_the_readme_is_made_of_the_rows() -> None:
    text = figures.README.read_text(encoding="utf-8")
    assert text.count(figures.BEGIN) == text.count(figures.END) == 1
    assert text.split(figures.BEGIN)[1].split(figures.END)[0] == figures.table(), "benchmarks/figures.py --write"


def test_the_chart_of_the_readme_is_made_of_the_rows() -> None:
    assert figures.CHART.read_text(encoding="utf-8") == figures.chart(), "benchmarks/figures.py --write"


def test_the_page_of_all_figures_is_made_of_the_rows() -> None:
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(), "benchmarks/figures.py --write"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.csv")), ids=lambda file: file.stem)
def test_rows_of_one_command_are_of_one_commit_and_a_script_of_today(file: Path) -> None:
    commits = defaultdict[str, set[str]](set)
    with file.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if "command" in row:
                commits[row["command"]].add(row["commit"])
    assert [command for command, found in commits.items() if len(found) != 1] == []
    scripts = {shlex.split(command)[1] for command in commits if command.startswith("python ")}
    assert [script for script in scripts if not (RESULTS.parents[1] / script).exists()] == []


def test_the_picture_of_the_idea_shows_the_tables_of_the_core() -> None:
    assert draw_idea.PICTURE.read_text(encoding="utf-8") == draw_idea.picture(), "scripts/draw_idea.py"


@pytest.mark.parametrize("name", draw_pages.PICTURES)
def test_the_pictures_of_how_it_works_show_what_the_core_does(name: str) -> None:
    drawn = draw_pages.PICTURES[name]()
    assert (draw_pages.DOCS / name).read_text(encoding="utf-8") == drawn, "scripts/draw_pages.py"
