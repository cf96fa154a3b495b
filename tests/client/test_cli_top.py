"""Tests `quire top` on a scripted worker and a real allocator."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from quire import Allocator, Client, PoolSpec
from quire.cli import output
from quire.cli.app import app
from quire.cli.readings import Reader
from quire.cli.top import picture
from quire.hashing import block_digests
from quire.protocol.steps import StepBuilder
from quire.v1 import worker_pb2 as pb
from rich.console import Console
from typer.testing import CliRunner

from tests.client.servers import ScriptedServer, allocator_process, scripted_server

SPEC = PoolSpec.full_attention(block_count=64, block_size=4, cache_layout="test", model_fingerprint=b"m")
DIGESTS = block_digests(bytes(32), list(range(8)), 4)
WAITING = pb.RequestInfo(
    request_id="\x1b[2J-waits",
    namespace="acme",
    state=pb.REQUEST_STATE_WAITING,
    wait_reason=pb.WAIT_REASON_PLACES,
    age_s=3.5,
)
RUNNING = [
    pb.RequestInfo(request_id=f"runs-{each}", namespace="other", state=pb.REQUEST_STATE_RUNNING, age_s=9.0)
    for each in range(30)
]


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Runs an allocator with a pool where the namespace acme holds three blocks."""
    with (
        allocator_process(tmp_path_factory.mktemp("allocator"), "--lease", "600") as process,
        Allocator(process.address) as client,
        client.session("chat", SPEC, transport="calls") as opened,
    ):
        opened.step(StepBuilder().allocate(1, 9, DIGESTS, "acme"))
        yield process.address


@pytest.fixture
def worker() -> Iterator[ScriptedServer]:
    """Runs a scripted worker. Each status reports more generated tokens, and more prompts with half of their tokens
    cached."""
    with scripted_server() as running:
        asked = iter(range(1, 1_000))

        def status(*_: object) -> pb.GetStatusResponse:
            times = next(asked)
            return pb.GetStatusResponse(
                model="tiny", pool="chat", allocator_connected=True, running_count=30, waiting_count=1,
                output_token_count=100 * times, prompt_token_count=40 * times, cached_token_count=20 * times,
            )  # fmt: skip

        running.answers["GetStatus"] = status
        running.answers["ListRequests"] = lambda *_: pb.ListRequestsResponse(requests=[*RUNNING, WAITING])
        yield running


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["top", "--interval", "0.1", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_picture_has_workers_pools_namespaces_and_requests(worker: ScriptedServer, allocator: str) -> None:
    text = printed("--worker", worker.address, "--allocator", allocator)
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines[worker.address][1:5] == ["tiny", "chat", "30", "1"]
    assert lines[worker.address][7] == "50%"
    assert lines["chat"][2:7] == ["64", "3", "0", "61", "1"]
    assert lines["acme"] == ["acme", "0", "1", "3", "0"]
    assert lines["other"] == ["other", "30", "0", "0", "0"]
    assert "a running sample to end: --max-running is reached" in text
    assert text.index("-waits") < text.index("runs-0"), "what waits comes first"
    assert "\x1b" not in text


def test_json_has_numbers_and_names(worker: ScriptedServer, allocator: str) -> None:
    found = json.loads(printed("--json", "--worker", worker.address, "--allocator", allocator))
    (of_worker,) = found["workers"]
    assert of_worker["rates"]["cached"] == 0.5
    assert of_worker["requests"][-1]["wait_reason"] == "PLACES"
    assert found["pools"][0]["held_block_count"] == 3
    assert {each["namespace"] for each in found["namespaces"]} == {"acme", "other"}


def test_a_server_that_does_not_answer_is_said_and_the_others_are_shown(worker: ScriptedServer, allocator: str) -> None:
    text = printed("--worker", worker.address, "--worker", "127.0.0.1:1", "--allocator", allocator, "--timeout", "1")
    assert "127.0.0.1:1: UNAVAILABLE" in text
    assert "tiny" in text
    text = printed("--worker", worker.address, "--allocator", "127.0.0.1:1", "--timeout", "1")
    assert "allocator: UNAVAILABLE" in text
    assert "tiny" in text


def test_a_worker_that_was_started_again_has_no_rates_until_the_next_reading(
    worker: ScriptedServer, allocator: str
) -> None:
    with Allocator(allocator) as pools, Client(worker.address) as client:
        reader = Reader(pools, [("w", client)])
        before = reader.read()
        worker.answers["GetStatus"] = lambda *_: pb.GetStatusResponse(output_token_count=1)
        assert reader.read(before).workers[0].rates is None
        reader.close()


def test_a_terminal_shows_what_fits_until_ctrl_c(worker: ScriptedServer, allocator: str) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"}
    command = ["top", "--interval", "0.1", "--worker", worker.address, "--allocator", allocator]
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.cli", *command], stdin=follower, stdout=follower, stderr=follower,
        env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    shown, end_s = b"", time.monotonic() + 60
    try:
        while shown.count(b"more requests") < 2 and time.monotonic() < end_s:
            if select.select([leader], [], [], 1)[0]:
                shown += os.read(leader, 65_536)
        process.send_signal(2)
        while True:
            try:
                shown += os.read(leader, 65_536)
            except OSError:
                break
    finally:
        process.kill()
        code = process.wait()
        os.close(leader)
    text = shown.decode()
    assert text.count("more requests") >= 2, text[-2_000:]
    assert code == 130
    assert "\N{REPLACEMENT CHARACTER}[2J" in text
    assert "\x1b[?1049l" in text, "the screen from before is back"


@pytest.mark.parametrize("width", [40, 80])
def test_no_number_is_cut_where_there_is_little_room(worker: ScriptedServer, allocator: str, width: int) -> None:
    with Allocator(allocator) as pools, Client(worker.address) as client:
        reader = Reader(pools, [("a-worker-with-a-long-name.internal:7071", client)])
        shown = Console(width=width, record=True, file=io.StringIO())
        shown.print(output.Printable(picture(reader.read(reader.read()), width, 24)))
        reader.close()
    text = shown.export_text()
    assert not [line for line in text.splitlines() if len(line) > width]
    rates = re.search(r"tokens/s.*\n.*?30 +1 +[\d,]+\.\d( |$)", text, re.MULTILINE)
    assert rates, "names are cut, numbers are not"
    assert ("evicted/s" in text) == (width == 80)
