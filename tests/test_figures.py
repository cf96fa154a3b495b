"""Each figure in the README comes from a committed row, and its pictures are the ones that the scripts draw."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import draw_idea
import draw_pages
import figures
import pytest


def test_the_table_of_the_readme_is_made_of_the_rows() -> None:
    text = figures.README.read_text(encoding="utf-8")
    assert text.count(figures.BEGIN) == text.count(figures.END) == 1
    assert text.split(figures.BEGIN)[1].split(figures.END)[0] == figures.table(), "benchmarks/figures.py --write"


def test_the_chart_of_the_readme_is_made_of_the_rows() -> None:
    assert figures.CHART.read_text(encoding="utf-8") == figures.chart(), "benchmarks/figures.py --write"


def test_the_page_of_all_figures_is_made_of_the_rows() -> None:
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(), "benchmarks/figures.py --write"


def test_the_picture_of_the_idea_shows_the_tables_of_the_core() -> None:
    assert draw_idea.PICTURE.read_text(encoding="utf-8") == draw_idea.picture(), "scripts/draw_idea.py"


@pytest.mark.parametrize("name", draw_pages.PICTURES)
def test_the_pictures_of_how_it_works_show_what_the_core_does(name: str) -> None:
    drawn = draw_pages.PICTURES[name]()
    assert (draw_pages.DOCS / name).read_text(encoding="utf-8") == drawn, "scripts/draw_pages.py"
