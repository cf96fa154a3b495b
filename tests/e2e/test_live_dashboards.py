"""Every query of every dashboard, asked of a real Prometheus that scraped real processes under load."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.observed import Scene, is_there, observed
from tests.e2e.stack import eventually
from tests.test_dashboards import PATHS, board_at, panels_of

VARIABLES = {"$pool": ".*", "$worker": ".*", "$__rate_interval": "15s"}
RED = "red"
# Queries that may find nothing here, by their panels' titles.
EMPTY: dict[str, str] = {}
pytestmark = [
    pytest.mark.dashboards,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_there(), reason="needs Prometheus (Debian, Ubuntu: prometheus)"),
]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with observed(tmp_path_factory.mktemp("observed")) as running:
        yield running


def filled(query: str) -> str:
    """Returns a query with the dashboards' variables replaced, as Grafana does when all are chosen."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def queries() -> Iterator[tuple[str, str, bool]]:
    """Dashboard and panel, query, and whether it is a tile's."""
    for path in PATHS:
        board = board_at(path)
        for panel in panels_of(board):
            for target in panel.get("targets", []):
                yield f"{board['title']}: {panel['title']}", filled(target["expr"]), target["instant"]
        for annotation in board["annotations"]["list"]:
            yield f"{board['title']}: {annotation['name']}", annotation["expr"], False


def test_no_query_of_a_dashboard_is_empty_or_wrong(scene: Scene) -> None:
    empty: dict[str, str] = {}

    def nothing_is_empty() -> bool:
        scene.load()
        empty.clear()
        for title, query, is_tile in queries():
            found = [value for value in scene.now(query) if not math.isnan(value)] if is_tile else scene.ever(query)
            if not found:
                empty[title] = query
        return empty.keys() <= EMPTY.keys()

    try:
        eventually(nothing_is_empty, "every query finds a series", within_s=200)
    except AssertionError:
        raise AssertionError("\n".join(f"{title}: {query}" for title, query in empty.items())) from None
    assert empty.keys() == EMPTY.keys(), "what is not empty any more needs no reason"


def test_variables_list_the_pools_and_the_workers(scene: Scene) -> None:
    found = {}
    for variable in board_at(PATHS[0])["templating"]["list"]:
        if variable["type"] == "query":
            call = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert call is not None
            times = {"start": scene.started_s, "end": time.time()}
            series = scene.ask_prometheus("series", **{"match[]": call[1]}, **times)
            found[variable["name"]] = {each[call[2]] for each in series}
    assert found == {
        "pool": {"default", "hybrid"},
        "worker": {scene.worker.metrics_address, scene.hybrid.metrics_address},
    }


def color(panel: dict[str, Any], values: list[float]) -> str:
    """Returns a tile's color as Grafana chooses it: of a mapped value its own, else of the last step below."""
    defaults = panel["fieldConfig"]["defaults"]
    first, *steps = defaults["thresholds"]["steps"]
    chosen = str(first["color"])
    if values:
        for mapping in defaults["mappings"]:
            if (word := mapping["options"].get(f"{values[-1]:g}")) is not None:
                return str(word["color"])
        for step in steps:
            chosen = step["color"] if values[-1] >= step["value"] else chosen
    return chosen


def test_the_dead_gateway_fires_its_alert(scene: Scene) -> None:
    firing = 'ALERTS{alertname="QuireProcessDown", alertstate="firing", job="quire-gateway"}'
    eventually(lambda: len(scene.now(firing)) == 1, "it is told of", within_s=60)


def test_no_tile_is_green_when_nobody_reports(scene: Scene) -> None:
    tiles = [(board_at(path)["title"], panel) for path in PATHS for panel in panels_of(board_at(path), "stat")]
    assert len(tiles) > 20

    def not_red() -> list[str]:
        return [
            f"{title}: {panel['title']}"
            for title, panel in tiles
            if color(panel, scene.now(filled(panel["targets"][0]["expr"]))) != RED
        ]

    eventually(lambda: len(not_red()) > 15, "most of a deployment is well", within_s=60)
    for process in (scene.gateway, scene.worker, scene.hybrid, scene.allocator):
        process.process.kill()
        process.process.wait()
    eventually(lambda: not_red() == [], "no tile claims anything", within_s=60)
