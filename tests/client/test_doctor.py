"""`quire doctor` recognizes Quire's servers on their ports, compares versions, and says which scrapes fail."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from quire import __version__
from quire.cli import checkup, scrapes
from quire.cli.scrapes import Caller
from quire.types import ServerInfo

from tests.client.servers import allocator_process, quire, secret_file

CALLER = Caller(None, None, 10.0)


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


def found(caller: Caller = CALLER) -> dict[str, checkup.Finding]:
    return {each.check.removeprefix("port "): each for each in scrapes.of_ports(caller)}


def test_ports_are_free_or_of_quires_servers_or_of_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with allocator_process(tmp_path) as allocator, socket.create_server(("127.0.0.1", 0)) as other:
        grpc, metrics = port_of(allocator.address), port_of(allocator.metrics_address)
        taken = str(other.getsockname()[1])
        free = "0"  # a socket can always bind port 0
        ports = {grpc: "--listen-allocator", metrics: "--metrics-allocator", free: "--listen-gateway"}
        monkeypatch.setattr(scrapes, "PORTS", ports)
        states = found()
        assert states[free] == checkup.Finding(f"port {free}", checkup.OK, "free")
        assert states[grpc][1:] == (checkup.OK, f"Quire's allocator, version {__version__}", "")
        assert states[metrics].state == checkup.OK
        assert f"Quire's allocator, version {__version__}, " in states[metrics].found
        assert "series at /metrics" in states[metrics].found
        for option in ("--metrics-worker", "--listen-worker"):
            monkeypatch.setattr(scrapes, "PORTS", {taken: option})
            (state,) = found(Caller(None, None, 1.0)).values()
            assert state.state == checkup.WARNING
            assert option in state.advice


def test_a_scrape_that_is_refused_names_the_token_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "a-token-of-the-metrics"
    secret_file(tmp_path / "token", token)
    with allocator_process(tmp_path, "--token-file", str(tmp_path / "token")) as allocator:
        monkeypatch.setattr(scrapes, "PORTS", {port_of(allocator.metrics_address): "--metrics-allocator"})
        (state,) = found().values()
        assert (state.state, "401" in state.found, "--token-file" in state.advice) == (checkup.WARNING, True, True)
        (state,) = found(Caller(token, None, 10.0)).values()
        assert state.state == checkup.OK


def test_without_the_workers_packages_only_their_lack_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "quire_cpu.library", raising=False)
    states = {each.check: each for each in checkup.of_machine()}
    assert states["worker packages"].state == checkup.WARNING
    assert "torch" in states["worker packages"].found
    assert not {"compiler", "cache", "torch"} & states.keys()


def test_an_allocator_of_another_version_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with allocator_process(tmp_path) as allocator:
        servers = (allocator.address, "127.0.0.1:1", None, None, 10.0)
        states = {each.check: each for each in checkup.of_servers(*servers)}
        assert states["allocator's version"] == checkup.Finding("allocator's version", checkup.OK, __version__)
        info = ServerInfo("0.0.1", 3, (), None, "python")  # type: ignore[arg-type]  # only its version is read
        monkeypatch.setattr(checkup.Allocator, "server_info", lambda _: info)
        states = {each.check: each for each in checkup.of_servers(*servers)}
        assert states["allocator's version"].state == checkup.WARNING
        assert __version__ in states["allocator's version"].advice


# The fields that doctor reads of Prometheus 2.42's answer.
UP = {"labels": {"job": "quire-worker"}, "scrapeUrl": "http://w:9471/metrics", "lastError": "", "health": "up"}
REFUSED = {
    "labels": {"job": "quire-gateway"},
    "scrapeUrl": "http://g:8000/metrics",
    "lastError": "server returned HTTP status 401 Unauthorized",
    "health": "down",
}
GONE = {
    "labels": {"job": "quire-allocator"},
    "scrapeUrl": "http://a:9470/metrics",
    "lastError": 'Get "http://a:9470/metrics": dial tcp 127.0.0.1:9470: connect: connection refused',
    "health": "down",
}
OTHER = {"labels": {"job": "node"}, "scrapeUrl": "http://n:1/metrics", "lastError": "it is gone", "health": "down"}


@contextmanager
def prometheus(*targets: dict[str, Any]) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"status": "success", "data": {"activeTargets": targets}}).encode()
            self.send_response(200 if self.path == "/api/v1/targets?state=active" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_each_failing_scrape_of_a_prometheus_is_named_with_what_to_do() -> None:
    with prometheus(UP, REFUSED, GONE, OTHER) as address:
        summary, *failing = scrapes.of_prometheus(address, CALLER)
    assert (summary.state, "3 targets" in summary.found, "2 of them" in summary.found) == (checkup.OK, True, True)
    assert [(each.check, each.state) for each in failing] == [
        ("scrape quire-gateway", checkup.FAILURE),
        ("scrape quire-allocator", checkup.FAILURE),
    ]
    assert "--token-file" in failing[0].advice
    assert "connection refused" in failing[1].found
    assert "start" in failing[1].advice


def test_a_prometheus_without_quires_jobs_or_none_at_all_is_a_warning() -> None:
    with prometheus(OTHER) as ended:
        (state,) = scrapes.of_prometheus(ended, CALLER)
        assert (state.state, "prometheus.yml" in state.advice) == (checkup.WARNING, True)
    for address in (ended, "127.0.0.1:9090", "http://"):
        (state,) = scrapes.of_prometheus(address, CALLER)
        assert (state.state, "--prometheus" in state.advice) == (checkup.WARNING, True), address


def test_the_command_asks_the_prometheus_that_it_is_given() -> None:
    with prometheus(REFUSED) as address:
        result = quire("doctor", "--json", "--prometheus", address)
    assert result.returncode == 1
    checks = [each["check"] for each in json.loads(result.stdout)]
    assert checks[-2:] == ["Prometheus", "scrape quire-gateway"]
    assert "port 7070" in checks
