"""`quire branch`, on a worker that plays back a script."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from quire.cli.app import app
from quire.errors import NotFoundError
from quire.v1 import worker_pb2 as pb
from typer.testing import CliRunner

from tests.client.servers import ScriptedServer, scripted_server

HELD = pb.BranchInfo(
    id_prefix=bytes(range(8)), namespace="acme", token_count=1_234, sequence_id=191, block_count=78,
    age_s=3.5, time_left_s=56.5, ttl_ms=60_000,
)  # fmt: skip
DROPPED = pb.BranchInfo(id_prefix=b"\xff" * 8, token_count=9, age_s=1.0, ttl_ms=60_000, is_in_use=True)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers["ListBranches"] = lambda *_: pb.ListBranchesResponse(branches=[HELD, DROPPED])
        running.answers["ReleaseBranches"] = lambda request, _: pb.ReleaseBranchesResponse(
            released_count=sum(each[:8] in (HELD.id_prefix, DROPPED.id_prefix) for each in request.branch_ids)
        )
        yield running


def run(server: ScriptedServer, *arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["branch", *arguments, "--worker", server.address], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def test_a_list_has_age_tokens_blocks_and_time_to_live(server: ScriptedServer) -> None:
    lines = run(server, "list").splitlines()
    assert lines[0].split() == ["branch", "namespace", "age", "ends", "in", "tokens", "blocks", "sequence"]
    assert lines[1].split() == ["0001020304050607", "acme", "3.5", "s", "56.5", "s", "1,234", "78", "191"]
    assert lines[2].split() == ["ffffffffffffffff", "1.0", "s", "in", "use", "9", "0"]
    found = json.loads(run(server, "list", "--json"))
    assert set(found[0]) == {field.name for field in pb.BranchInfo.DESCRIPTOR.fields}
    assert (found[0]["id_prefix"], found[0]["ttl_ms"], found[1]["is_in_use"]) == ("0001020304050607", 60_000, True)


def test_a_worker_without_branches_says_so(server: ScriptedServer) -> None:
    server.answers["ListBranches"] = lambda *_: pb.ListBranchesResponse()
    assert run(server, "list") == f"{server.address} has no branches\n"
    assert json.loads(run(server, "list", "--json")) == []


def test_branches_are_released_by_the_ids_of_the_list_or_by_whole_ones(server: ScriptedServer) -> None:
    whole = bytes(range(16)).hex()
    assert run(server, "release", whole, "ff" * 8, "12" * 8) == "2 of 3 released\n"
    assert list(server.requests[-1].branch_ids) == [bytes(range(16)), b"\xff" * 8, b"\x12" * 8]
    assert json.loads(run(server, "release", "ff" * 8, "--json")) == {"released_count": 1, "dry_run": False}
    with pytest.raises(NotFoundError, match="quire branch list") as unknown:
        run(server, "release", "12" * 8)
    assert unknown.value.reason == "BRANCH_UNKNOWN"


def test_a_dry_run_releases_nothing(server: ScriptedServer) -> None:
    assert run(server, "release", "ff" * 8, "12" * 8, "--dry-run") == "1 of 2 would be released\n"
    assert not server.attempts["ReleaseBranches"]


@pytest.mark.parametrize("given", ["7", "0001", "no-number", "00" * 9, ""])
def test_what_is_no_id_is_refused_before_any_call(server: ScriptedServer, given: str) -> None:
    assert "quire branch list" in " ".join(run(server, "release", given, code=2).replace("│", " ").split())
    assert not server.attempts
