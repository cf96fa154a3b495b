"""`quire bench`, on a worker that plays back a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from quire.cli import bench
from quire.cli.app import app
from quire.cli.load import LoadShape, Outcome, drawn
from quire.errors import NotFoundError, Reason, UsageError
from quire.v1 import worker_pb2 as pb
from typer.testing import CliRunner

from tests.client.servers import ScriptedServer, refusing, scripted_server

SALTS: set[str] = set()


def answer(request: pb.GenerateRequest, _context: object) -> Iterator[pb.GenerateResponse]:
    """Sends two pieces of two tokens, and reports half of the prompt as cached."""
    SALTS.add(request.cache_salt)
    count = len(request.tokens.ids)
    yield pb.GenerateResponse(token_ids=[7, 7])
    usage = pb.Usage(prompt_token_count=count, cached_token_count=count // 2, output_token_count=4)
    yield pb.GenerateResponse(token_ids=[8, 8], finish_reason=pb.FINISH_REASON_LENGTH, usage=usage)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    SALTS.clear()
    with scripted_server() as running:
        running.answers["GetStatus"] = lambda *_: pb.GetStatusResponse(sequence_tokens_max=512, vocabulary_size=100)
        running.answers["Generate"] = answer
        yield running


def run(server: ScriptedServer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments, "--worker", server.address], catch_exceptions=False)


def reported(server: ScriptedServer, *arguments: str) -> dict[str, Any]:
    return json.loads(run(server, *arguments, "--json").stdout)


def prompts(server: ScriptedServer) -> list[list[int]]:
    """Returns the prompts of the run, without the warm-up request."""
    asked = [each for each in server.requests if isinstance(each, pb.GenerateRequest)]
    return [list(each.tokens.ids) for each in asked][1:]


def test_prompts_have_in_common_what_the_workload_says(server: ScriptedServer) -> None:
    report = reported(server, "--requests", "5", "--prompt-tokens", "20", "--concurrency", "2")
    assert (report["request_count"], report["prompt_token_count"], report["cached_token_count"]) == (5, 100, 50)
    assert report["output_token_count"] == 20
    sent = prompts(server)
    assert len({tuple(each[:15]) for each in sent}) == 1
    assert len({tuple(each) for each in sent}) == 5
    reported(server, "--requests", "5", "--workload", "distinct", "--prompt-tokens", "20")
    assert len({tuple(each[:15]) for each in prompts(server)[-5:]}) == 5
    assert len(SALTS) == 2, "a run must not hit what another one left"


def test_a_turn_of_a_chat_goes_on_behind_all_that_was_said(server: ScriptedServer) -> None:
    reported(
        server, "--workload", "chats", "--turns", "3", "--requests", "4", "--prompt-tokens", "5", "--concurrency", "1"
    )
    first, second, third, other = prompts(server)
    assert second[:9] == [*first, 7, 7, 8, 8]
    assert third[:18] == [*second, 7, 7, 8, 8]
    assert (len(third), len(other)) == (23, 5)


def test_the_same_seed_sends_the_same_prompts(server: ScriptedServer) -> None:
    for seed in ("1", "1", "2"):
        reported(server, "--requests", "2", "--concurrency", "1", "--seed", seed, "--rate", "1000")
    sent = prompts(server)
    assert sent[:2] == sent[3:5] != sent[6:8]


def test_failures_are_counted_by_reason_and_exit_with_1(server: ScriptedServer) -> None:
    server.answers["Generate"] = refusing(Reason.TOO_LARGE)
    done = run(server, "--requests", "3")
    assert done.exit_code == 1
    assert "3 failed: TOO_LARGE" in done.stdout
    assert "0 requests in" in done.stdout


def test_no_more_are_under_way_than_have_a_place(server: ScriptedServer) -> None:
    under_way, most, both = 0, 0, threading.Condition()

    def counted(request: pb.GenerateRequest, context: object) -> Iterator[pb.GenerateResponse]:
        nonlocal under_way, most
        with both:
            under_way += 1
            most = max(most, under_way)
            both.notify_all()
            if len(server.requests) > 2:  # The first two are `status` and the warm-up request.
                both.wait_for(lambda: most == 3, 30)
            under_way -= 1
        return answer(request, context)

    server.answers["Generate"] = counted
    assert reported(server, "--requests", "9", "--concurrency", "3")["request_count"] == 9
    assert most == 3


def test_prompts_of_a_file_go_round(server: ScriptedServer, tmp_path: Path) -> None:
    server.answers["Tokenize"] = lambda request, _: pb.TokenizeResponse(
        token_ids=(request.text or request.conversation.messages_json).encode()
    )
    file = tmp_path / "prompts.jsonl"
    file.write_text('one\n\n{"prompt": "two"}\n{"messages": [{"role": "user", "content": "three"}]}\n')
    assert reported(server, "--file", str(file), "--requests", "4", "--concurrency", "1")["workload"] == str(file)
    texts = [bytes(each).decode() for each in prompts(server)]
    assert (texts[0], texts[1], texts[3]) == ("one", "two", "one")
    assert json.loads(texts[2])[0]["content"] == "three"
    assert reported(server, "--file", str(file))["request_count"] == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no prompts"),
        (b"\xff", "byte 0 is not UTF-8 text"),
        (b"one\n{", "line 2 of .* is not JSON"),
        (b'{"prompt": 1}', "line 1 of .* needs a text as `prompt`"),
        (b'{"messages": ["hi"]}', "or a list as `messages`"),
    ],
)
def test_a_file_without_usable_prompts_is_refused(
    server: ScriptedServer, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        run(server, "--file", str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        run(server, "--file", str(tmp_path / "nobody"))


def test_what_cannot_fit_is_refused_before_anything_is_sent(server: ScriptedServer) -> None:
    with pytest.raises(UsageError, match="532 tokens of prompt and answer do not fit the worker's 512"):
        run(server, "--prompt-tokens", "500")
    with pytest.raises(UsageError, match="--shared-tokens 20 must be fewer than --prompt-tokens 20"):
        run(server, "--prompt-tokens", "20", "--shared-tokens", "20")
    assert not prompts(server)


def test_a_worker_that_refuses_ends_the_command(server: ScriptedServer) -> None:
    server.answers["GetStatus"] = refusing(Reason.POOL_UNKNOWN)
    with pytest.raises(NotFoundError):
        run(server)


def test_percentiles_are_values_that_were_measured() -> None:
    outcomes = [Outcome(first_s=float(each), total_s=each + 3.0, token_ids=[1, 2, 3, 4]) for each in range(1, 101)]
    outcomes.append(Outcome(error="TOO_LARGE"))
    report = bench.reported(outcomes, 10.0)
    assert report["first_token_s"] == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert report["token_s"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    assert report["pause_s"] is None
    assert (report["requests_per_s"], report["output_tokens_per_s"], report["failed"]) == (10.0, 40.0, {"TOO_LARGE": 1})


def test_conversations_have_as_many_turns_as_requests_were_asked_for() -> None:
    assert [len(each) for each in drawn(LoadShape(4, turns=3), 7, 50, 1)] == [3, 3, 1]
