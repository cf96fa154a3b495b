"""The dashboards equal the output of scripts/boards/, show every series, and claim nothing without data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.boards.parts import IDLE
from scripts.dashboards import FOLDER, runbooks, written
from tests.e2e.test_metrics_reference import documented
from tests.test_deploy import HISTOGRAM_SUFFIX, alert_rules, exported_names

NAMES = ("cache", "fleet", "now", "recovery", "requests", "runbooks", "tenants")
PATHS = sorted(FOLDER.glob("*.json"))
SHOWN_ALWAYS = {"datasource", "pool", "worker"}


def board_at(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def panels_of(board: dict[str, Any], *kinds: str) -> Iterator[dict[str, Any]]:
    """Yields the panels of these types; all panels if no type is given."""
    yield from (panel for panel in board["panels"] if not kinds or panel["type"] in kinds)


def queries_of(board: dict[str, Any]) -> Iterator[str]:
    for panel in panels_of(board):
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query")
    yield from (annotation["expr"] for annotation in board["annotations"]["list"])


def series_in(queries: Iterator[str]) -> set[str]:
    return {name for query in queries for name in re.findall(r"\bquire_\w+", query)}


def test_the_files_are_what_the_description_says() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in PATHS} == written()
    assert tuple(path.stem for path in PATHS) == NAMES


def test_every_documented_series_is_on_a_panel() -> None:
    drawn: set[str] = set()
    for path in PATHS:
        drawn |= series_in(target["expr"] for panel in panels_of(board_at(path)) for target in panel.get("targets", []))
    families = {HISTOGRAM_SUFFIX.sub("", name) for name in drawn} | drawn
    names = {name for table in documented().values() for name in table}
    # Metrics with vLLM's names serve dashboards made for vLLM, so Quire's dashboards need not show them.
    documented_names = {name for name in names if not name.startswith("vllm:")}
    assert len(documented_names) > 70
    assert documented_names - families == set()


def test_the_runbooks_are_the_alerts_and_every_panel_that_names_one_names_an_alert() -> None:
    (row,) = runbooks().rows
    text = "\n".join(note.content for note in row.panels)  # type: ignore[union-attr]
    alerts = {rule["alert"] for rule in alert_rules()}
    assert set(re.findall(r"^### (\w+)$", text, re.M)) == alerts
    assert "](" not in text, "no link of a document leads anywhere from Grafana"
    links = [link for path in PATHS for panel in panels_of(board_at(path)) for link in panel.get("links", [])]
    named = {link["title"].removeprefix("What to do: ") for link in links}
    assert named <= alerts
    assert len(named) > 12
    assert {link["url"] for link in links} == {"/d/quire-runbooks"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
class TestDashboard:
    def test_every_series_it_names_is_one_that_a_service_exports(self, path: Path) -> None:
        exported = exported_names()
        named = series_in(queries_of(board_at(path)))
        assert named
        assert {name for name in named if not {name, HISTOGRAM_SUFFIX.sub("", name)} & exported} == set()

    def test_every_panel_says_what_it_shows_and_in_which_unit(self, path: Path) -> None:
        titles = [panel["title"] for panel in panels_of(board_at(path))]
        assert len(set(titles)) == len(titles)
        assert all(titles)
        for panel in panels_of(board_at(path), "stat", "timeseries"):
            assert re.fullmatch(r".{20,}[.]", panel["description"]), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["targets"], panel["title"]
        for panel in panels_of(board_at(path), "text"):
            assert panel["options"]["content"]

    def test_a_tile_is_of_this_moment_and_red_where_nobody_reports(self, path: Path) -> None:
        for panel in panels_of(board_at(path), "stat"):
            defaults = panel["fieldConfig"]["defaults"]
            assert all(target["instant"] and not target["range"] for target in panel["targets"]), panel["title"]
            assert panel["options"]["reduceOptions"]["calcs"] == ["last"], "no last value is kept"
            assert defaults["thresholds"]["steps"][0] == {"value": None, "color": "red"}
            assert defaults["noValue"], panel["title"]
            outlives = [t["expr"] for t in panel["targets"] if re.search(r"\[\d+[mh]\]", t["expr"])]
            assert all(" and on () " in query for query in outlives), "a rate outlives its process"
            says_idle = any(f"{IDLE:g} *" in target["expr"] for target in panel["targets"])
            words = [word for mapping in defaults["mappings"] for word in mapping["options"]]
            assert says_idle == (f"{IDLE:g}" in words), panel["title"]

    def test_a_plot_draws_no_line_through_a_gap_and_names_each_series(self, path: Path) -> None:
        for panel in panels_of(board_at(path), "timeseries"):
            assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False
            assert panel["options"]["legend"]["displayMode"] == "table"
            for target in panel["targets"]:
                assert target["legendFormat"], panel["title"]
                of_one = "{{" in target["legendFormat"]
                grouped = re.findall(r"by \(([\w, ]+)\)", target["expr"])
                assert of_one or not grouped, panel["title"]
                labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                if grouped:
                    assert labels <= set(grouped[0].split(", ")), panel["title"]
                    assert set(grouped[0].split(", ")) - {"le"} <= labels, panel["title"]

    def test_panels_have_their_own_id_and_do_not_overlap(self, path: Path) -> None:
        panels = list(panels_of(board_at(path)))
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: dict[tuple[int, int], str] = {}
        for panel in panels:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24, panel["title"]
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    assert taken.setdefault((x, y), panel["title"]) == panel["title"]

    def test_every_query_asks_the_chosen_data_source_with_variables_that_there_are(self, path: Path) -> None:
        board = board_at(path)
        variables = {variable["name"]: variable for variable in board["templating"]["list"]}
        assert set(variables) == SHOWN_ALWAYS
        assert variables["datasource"]["query"] == "prometheus"
        source = {"type": "prometheus", "uid": "${datasource}"}
        assert all(annotation["datasource"] == source for annotation in board["annotations"]["list"])
        assert [annotation["name"] for annotation in board["annotations"]["list"]] == ["Starts", "Silences"]
        for panel in panels_of(board):
            for target in panel.get("targets", []):
                assert target["datasource"] == source
                assert set(re.findall(r"\$(\w+)", target["expr"])) <= SHOWN_ALWAYS | {"__rate_interval"}

    def test_it_is_linked_to_the_others(self, path: Path) -> None:
        board = board_at(path)
        assert (board["uid"], board["tags"]) == (f"quire-{path.stem}", ["quire"])
        (link,) = board["links"]
        assert (link["type"], link["tags"], link["keepTime"]) == ("dashboards", ["quire"], True)
