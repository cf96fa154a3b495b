"""`quire fleet`, on scripted servers and an address without one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from quire.cli.app import app
from quire.errors import Reason
from quire.v1 import allocator_pb2, server_pb2
from quire.v1 import worker_pb2 as pb
from typer.testing import CliRunner

from tests.client.servers import ScriptedServer, refusing, scripted_server

STATUS = pb.GetStatusResponse(
    version="0.1.0", model="tiny", pool="chat", allocator_connected=True, running_count=30, waiting_count=1_000,
    prompt_token_count=400, cached_token_count=100,
)  # fmt: skip


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Runs a server that is allocator and worker."""
    with scripted_server() as running:
        running.answers["GetServerInfo"] = lambda *_: server_pb2.GetServerInfoResponse(version="0.2.0")
        running.answers["ListPools"] = lambda *_: allocator_pb2.ListPoolsResponse(
            pools=[allocator_pb2.PoolSummary(pool=name) for name in ("chat", "other")]
        )
        running.answers["GetStatus"] = lambda *_: STATUS
        yield running


def run(server: ScriptedServer, *arguments: str) -> str:
    command = ["fleet", "list", "--allocator", server.address, "--worker", server.address, *arguments]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_list_has_version_state_and_load_of_each_server(server: ScriptedServer) -> None:
    rows = [line.split() for line in run(server).splitlines()]
    assert rows[1:] == [
        ["allocator", server.address, "0.2.0", "ready", "2", "pools"],
        ["worker", server.address, "0.1.0", "ready", "tiny", "chat", "30", "1,000", "25%"],
    ]
    found = json.loads(run(server, "--json"))
    assert found[0] == {
        "server": "allocator", "address": server.address, "error": None, "version": "0.2.0", "pools": ["chat", "other"]
    }  # fmt: skip
    assert (found[1]["running_count"], found[1]["cached_token_count"]) == (30, 100)


def test_a_server_that_refuses_is_listed_with_the_error_beside_the_others(server: ScriptedServer) -> None:
    with scripted_server() as broken:
        broken.answers["GetStatus"] = refusing(Reason.POOL_FORBIDDEN)
        of = json.loads(run(server, "--worker", broken.address, "--json"))
        assert [each["error"] is None for each in of] == [True, True, False]
        assert "POOL_FORBIDDEN" in of[2]["error"]
        assert "no session" not in run(server)
        server.answers["GetStatus"] = lambda *_: pb.GetStatusResponse(version="0.1.0", pool="chat")
        assert "no session" in run(server)
