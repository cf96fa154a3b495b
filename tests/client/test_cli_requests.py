"""`quire request`, on a worker that plays back a script."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from quire import Client
from quire.cli.app import app
from quire.cli.requests import why
from quire.errors import NotFoundError
from quire.v1 import worker_pb2 as pb
from quire.views import WaitReason
from typer.testing import CliRunner

from tests.client.servers import ScriptedServer, scripted_server

WAITING = pb.RequestInfo(
    request_id="chat-1",
    namespace="acme",
    state=pb.REQUEST_STATE_WAITING,
    wait_reason=pb.WAIT_REASON_BLOCKS,
    missing_block_count=12,
    age_s=3.5,
    prompt_token_count=1_000,
    sequence_ids=[191, 192],
    stages=[pb.RequestStage(name="received", at_s=0.0), pb.RequestStage(name="preempted", at_s=1.25)],
)
ENDED = pb.RequestInfo(request_id="chat-0", state=pb.REQUEST_STATE_ENDED, finish_reasons=[2, 2], age_s=9.0)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        running.answers["ListRequests"] = lambda request, _: pb.ListRequestsResponse(
            requests=[each for each in (ENDED, WAITING) if request.request_id in ("", each.request_id)]
        )
        running.answers["CancelRequest"] = lambda request, _: pb.CancelRequestResponse(
            cancelled_count=int(request.request_id == "chat-1")
        )
        yield running


def run(server: ScriptedServer, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["request", *arguments, "--worker", server.address], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_list_says_what_each_request_waits_for_and_its_sequences(server: ScriptedServer) -> None:
    lines = run(server, "list", "--ended").splitlines()
    assert lines[0].split()[:3] == ["request", "namespace", "state"]
    assert "length" in lines[1]
    assert all(part in lines[2] for part in ("acme", "waiting", "3.5 s", "191, 192", "12 more blocks of each group"))
    assert server.requests[-1].with_ended
    found = json.loads(run(server, "list", "--json"))
    assert [each["wait_reason"] for each in found] == [None, "BLOCKS"]


def test_one_request_is_shown_with_times(server: ScriptedServer) -> None:
    text = run(server, "show", "chat-1")
    assert "1.250 s" in text
    assert "preempted" in text
    (found,) = json.loads(run(server, "show", "chat-1", "--json"))
    assert found["stages"] == [{"name": "received", "at_s": 0.0}, {"name": "preempted", "at_s": 1.25}]
    with pytest.raises(NotFoundError, match="quire request list --ended"):
        run(server, "show", "nobody")


def test_a_request_is_cancelled_by_its_id(server: ScriptedServer) -> None:
    assert run(server, "cancel", "chat-1") == "chat-1: 1 canceled\n"
    with pytest.raises(NotFoundError, match="'nobody'"):
        run(server, "cancel", "nobody")


def test_a_dry_run_cancels_nothing(server: ScriptedServer) -> None:
    assert run(server, "cancel", "chat-1", "--dry-run") == "chat-1: 1 would be canceled\n"
    found = json.loads(run(server, "cancel", "chat-1", "--dry-run", "--json"))
    assert found == {"request_id": "chat-1", "cancelled_count": 1, "dry_run": True}
    with pytest.raises(NotFoundError, match="'nobody'"):
        run(server, "cancel", "nobody", "--dry-run")
    assert not server.attempts["CancelRequest"]


@pytest.mark.parametrize("reason", WaitReason)
def test_every_reason_has_words(server: ScriptedServer, reason: WaitReason) -> None:
    server.answers["ListRequests"] = lambda *_: pb.ListRequestsResponse(
        requests=[pb.RequestInfo(state=1, wait_reason=int(reason), behind_request_id="id-7")]
    )
    with Client(server.address) as client:
        (found,) = client.requests()
    assert why(found)
    assert ("id-7" in why(found)) == (reason in (WaitReason.ORDER, WaitReason.FAIRNESS))
