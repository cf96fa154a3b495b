"""Sends every query of every dashboard to a real Prometheus that scraped real processes under load."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from quire import Client
from quire.views import WaitReason

from tests.e2e.composed import ROOT
from tests.e2e.observed import WEB, Scene, is_there, observed
from tests.e2e.stack import eventually
from tests.test_dashboards import PATHS, board_at, panels_of

VARIABLES = {"$pool": ".*", "$worker": ".*", "$__rate_interval": "15s"}
RED = "red"
AWAY: set[WaitReason | None] = {WaitReason.ALLOCATOR, WaitReason.NO_SESSION}
# Title of a panel whose query may be empty in this test -> the reason.
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
    """Returns a query with the dashboards' variables replaced, as Grafana does when the user selects all values."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def queries() -> Iterator[tuple[str, str, bool]]:
    """Yields "dashboard: panel", the query, and whether the panel is a tile, for each query."""
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
    """Returns a tile's color as Grafana chooses it: the color of a mapped value, or else of the last threshold below
    the value."""
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


def rows_of_the_night() -> list[list[str]]:
    lines = (ROOT / "docs" / "night.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return rows[2:]


@contextlib.contextmanager
def held_up(scene: Scene) -> Iterator[str]:
    """Stops the allocator while one request runs and another one waits; yields the id of the second."""

    def second(client: openai.OpenAI) -> None:
        headers = {"X-Request-Id": "second"}
        client.completions.create(model="demo", prompt="if", max_tokens=4, extra_headers=headers)

    def first(client: openai.OpenAI) -> Iterator[Any]:
        options = {"extra_body": {"ignore_eos": True}, "extra_headers": {"X-Request-Id": "first"}}
        return iter(client.completions.create(model="demo", prompt="if", max_tokens=600, stream=True, **options))

    allocator = scene.allocator.process.pid
    with scene.client(WEB) as client, Client(scene.worker.address) as worker, ThreadPoolExecutor(1) as threads:

        def is_held_up() -> bool:
            """Returns whether the first request was still running when the allocator stopped."""
            next(pieces := first(client))
            os.kill(allocator, signal.SIGSTOP)
            if any(found.sequence_ids for found in worker.requests("first")):
                streams.append(pieces)
                return True
            os.kill(allocator, signal.SIGCONT)
            list(pieces)
            return False

        streams: list[Iterator[Any]] = []
        eventually(is_held_up, "one runs", within_s=60)
        try:
            waiting = threads.submit(second, client)

            def reasons() -> set[WaitReason | None]:
                return {found.wait_reason for found in worker.requests("second")}

            eventually(lambda: bool(reasons() & AWAY), "the second one waits for the allocator", within_s=60)
            yield "second"
        finally:
            os.kill(allocator, signal.SIGCONT)
        waiting.result()
        assert len(list(streams[0])) > 1, "the first one goes on"


def test_every_panel_of_the_night_has_something_to_show(scene: Scene) -> None:
    boards = {board["title"].removeprefix("Quire: "): board for board in map(board_at, PATHS)}
    named = [
        found for row in rows_of_the_night() for cell in row[1:] for found in re.findall(r"\*(\w+): ([^*]+)\*", cell)
    ]
    assert len(named) > 10
    for title, name in named:
        (panel,) = [panel for panel in panels_of(boards[title]) if panel["title"] == name]

        def is_drawn(targets: list[dict[str, Any]] = panel["targets"]) -> bool:
            if all(scene.ever(filled(target["expr"])) for target in targets):
                return True
            scene.load()
            return False

        eventually(is_drawn, name, within_s=200)


def test_every_command_of_the_night_answers_its_question(scene: Scene) -> None:
    answers = {
        "quire request show ID": "waits for .*allocator",
        'curl -H "Authorization: Bearer $(cat TOKEN)" http://GATEWAY/requests': r'"key":"web".*"sequences":\[\d+',
        "quire pool show POOL": "acme(?s:.*)beta|beta(?s:.*)acme",
        "quire request list --ended": r"preempted(?s:.*)acme(?s:.*)length",
        "quire health http://GATEWAY": "SERVING",
        "quire version": r"quire +\d|version",
        "quire doctor": "worker",
        "quire doctor --prometheus URL": r"5 targets of Quire(?s:.*)scrape quire-gateway(?s:.*)refused",
    }
    commands = {
        found for row in rows_of_the_night() for found in re.findall(r"`((?:quire|curl) [^`]+)`", "|".join(row))
    }
    assert commands == answers.keys()
    places = {"GATEWAY": scene.gateway.address, "TOKEN": str(scene.folder / "token"), "POOL": "default"}
    places["URL"] = f"http://{scene.prometheus}"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "QUIRE_WORKER": scene.worker.address,
        "QUIRE_ALLOCATOR": scene.allocator.address,
        "COLUMNS": "200",
    }

    def answer(command: str, **more: str) -> str:
        for name, value in {**places, **more}.items():
            command = re.sub(rf"\b{name}\b", value, command)
        done = subprocess.run(
            command, shell=True, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or command.startswith("quire doctor"), done.stderr
        return done.stdout

    of_the_held = [command for command in commands if "ID" in command or "curl" in command]
    with held_up(scene) as request_id:
        for command in of_the_held:
            assert re.search(answers[command], answer(command, ID=request_id)), command
    for command in sorted(commands - set(of_the_held)):
        assert re.search(answers[command], answer(command)), command
    assert re.search(r"first token|ended", answer("quire request show ID", ID="second")), (
        "its way, now that it has ended"
    )


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
