"""In a new user's first hour, wrong addresses, wrong services and closed pipes all give helpful messages."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from wsgiref.simple_server import make_server

import pytest
from quire import (
    Allocator,
    AsyncAllocator,
    Client,
    DeadlineExceededError,
    InvalidArgumentError,
    PoolSpec,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from quire.errors import UnimplementedError, UsageError
from quire.session import Result
from quire.v1 import worker_pb2 as worker_pb

from tests.allocator.service.one_by_one import calls
from tests.client.servers import allocator_process, parsed, quire, scripted_server, two_samples
from tests.client.session_scene import SPEC, setting


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with allocator_process(tmp_path_factory.mktemp("allocator")) as process:
        yield process.address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:7071", "is a URL: write '127.0.0.1:7071', without http://"),
        ("grpc://host:7071/", "is a URL: write 'host:7071', without grpc://"),
        ("localhost", "is not an address; write host:port"),
        ("127.0.0.1:65536", "is not an address; write host:port (port 0 to 65535)"),
        ("::1:7071", "is not an address; write IPv6 in brackets, such as [::1]:7070"),
        ("[::1:7071", "is not an address; write IPv6 in brackets"),
        ("[localhost]:7071", "is not an address; write IPv6 in brackets"),
        ("x" * 100_000, f"'{'x' * 199} is not an address"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_tried(address: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Client(address)
    result = quire("status", "--worker", address)
    assert (result.returncode, message in result.stderr, result.stderr.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    "address", ["unix:///tmp/quire", "dns:///host:7071", "ipv6:[::1]:7071", "[::1]:7071", "h:65535"]
)
def test_forms_of_addresses_that_grpc_knows_are_taken(address: str) -> None:
    with Client(address) as client:
        assert repr(client) == f"<Client of {address}>"


def test_another_service_at_the_address_is_said(allocator: str) -> None:
    with (
        Client(allocator) as client,
        pytest.raises(UnimplementedError, match="is it the address of a worker instead of an allocator"),
    ):
        client.status()
    result = quire("status", "--worker", allocator)
    assert (result.returncode, f"{allocator} does not know this call" in result.stderr) == (9, True)
    result = quire("generate", "x", "--worker", allocator)
    assert (result.returncode, "is it the address of a worker" in result.stderr) == (9, True)


def test_a_call_that_is_out_of_time_says_what_to_do() -> None:
    with scripted_server() as server, Client(server.address) as client:
        server.answers["GetStatus"] = lambda *_: server.released.wait(30)
        said = f"{server.address} did not answer the call within its timeout of 0.1 s: raise the timeout"
        with pytest.raises(DeadlineExceededError, match=said):
            client.status(timeout_s=0.1)


def test_a_prompt_that_no_server_would_take_is_not_sent() -> None:
    with scripted_server() as server, Client(server.address) as client:
        with pytest.raises(
            ResourceExhaustedError, match=r"3,500,\d+ bytes, and a server accepts at most 2,097,152"
        ) as raised:
            client.generate("word " * 700_000, request_id="large")
        assert (raised.value.reason, raised.value.request_id) == (Reason.TOO_LARGE, "large")
        assert not server.requests


@pytest.mark.parametrize("request_id", ["a b", "a\n", "\x1b", "é", "x" * 65])
def test_request_ids_that_logs_could_not_carry_are_refused(request_id: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError, match="printable ASCII") as raised:
        client.generate("p", request_id=request_id)
    assert raised.value.reason is Reason.MALFORMED


def test_what_is_piped_in_and_is_no_text_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", "generate", "-", "--worker", "127.0.0.1:1"],
        input=b"abc\xff",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, b"quire: standard input is not UTF-8 text: byte 3 is 0xff\n")
    arguments = [sys.executable, "-m", "quire.cli", "generate", b"abc\xff", "--worker", "127.0.0.1:1"]
    done = subprocess.run(arguments, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, b"quire: the prompt is not UTF-8 text: byte 3 is 0xff\n")
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError) as raised:
        client.generate(b"abc\xff".decode(errors="surrogateescape"))  # Python decodes command-line arguments like this.
    assert raised.value.message == "text is not valid text: it contains half of a surrogate pair"


def test_samples_in_a_pipe_come_line_by_line_with_their_number() -> None:
    def answer(*_: object) -> Iterator[worker_pb.GenerateResponse]:
        yield worker_pb.GenerateResponse(sample=0, token_ids=[1], text="first\nhal")
        yield worker_pb.GenerateResponse(sample=1, token_ids=[2], text="other\n")
        assert server.shown.wait(30), "the whole lines are there before the samples are finished"
        yield from two_samples(None, None)  # type: ignore[arg-type]

    with scripted_server() as server:
        server.answers["Generate"] = answer
        server.shown = server.released
        command = [sys.executable, "-m", "quire.cli", "generate", "p", "-n", "2", "--worker", server.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            assert [process.stdout.readline(), process.stdout.readline()] == ["0\tfirst\n", "1\tother\n"]
            server.released.set()
            assert sorted(process.stdout) == ["0\thalab\n", "1\txy\n"]


def test_tables_in_a_pipe_cut_neither_numbers_nor_names(allocator: str) -> None:
    name = "a-pool-with-a-name-that-says-where-it-is/and-what-it-is-for/" + "x" * 60
    spec = PoolSpec.full_attention(block_count=1_234_567, block_size=16)
    with Allocator(allocator) as client, calls(client, name, spec) as session:
        session.allocate(1, 320_016)
        shown = quire("pool", "list", "--allocator", allocator, COLUMNS="40").stdout
        assert all(part in shown for part in (name, "1,234,567", "1,214,566", "20,001", "unwritten")), shown
        assert "…" not in shown + quire("pool", "show", name, "--allocator", allocator, COLUMNS="40").stdout


def test_json_names_what_is_named_elsewhere_and_errors_are_json_too(allocator: str) -> None:
    with scripted_server() as server:
        server.answers["Generate"] = two_samples
        generation = parsed(quire("generate", "p", "-n", "2", "--json", "--worker", server.address))
    assert [sample["finish_reason"] for sample in generation["samples"]] == ["STOP", "LENGTH"]
    result = quire("pool", "show", "nowhere", "--json", "--allocator", allocator)
    error = json.loads(result.stderr)["error"]
    assert (result.returncode, error["code"], error["reason"]) == (6, "NOT_FOUND", "POOL_UNKNOWN")
    result = quire("status", "--json", "--worker", "localhost")
    assert (result.returncode, json.loads(result.stderr)["error"]["code"]) == (2, "USAGE")


def test_the_command_completes_itself() -> None:
    result = quire("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_QUIRE_COMPLETE=complete_bash" in result.stdout


def test_results_say_their_names_and_only_ok_is_true() -> None:
    assert [bool(each) for each in (Result.OK, Result.NO_SPACE)] == [True, False]
    assert f"{Result.NO_SPACE} {Result.OK}" == "NO_SPACE OK"


async def test_a_session_is_opened_by_async_with_and_says_for_whom_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    async with setting() as scene, AsyncAllocator(f"127.0.0.1:{scene.port}") as client:
        rival = client.session("test", SPEC)
        with caplog.at_level(logging.WARNING, "quire"):
            opening = asyncio.create_task(rival.__aenter__())
            while not caplog.messages:
                await asyncio.sleep(0)
            await scene.session.close()
            assert await opening is rival
        assert "pool test is not attached: ALREADY_EXISTS / POOL_OWNED" in caplog.messages[0]
        assert "its lease ends in" in caplog.messages[0]
        assert caplog.messages[1:] == ["pool test is attached again"]
        await rival.__aexit__()


def test_a_second_owner_is_told_when_to_come_back_and_the_log_names_the_pool_once(tmp_path: Path) -> None:
    async def wait_for(address: str) -> list[float | None]:
        told = asyncio.Queue[float | None]()
        async with AsyncAllocator(address) as client, client.session("mine", SPEC):
            rival = client.session("mine", SPEC, on_wait=lambda error: told.put_nowait(error.retry_after_s))
            opening = asyncio.create_task(rival.open())
            waited = [await told.get(), await told.get()]
            opening.cancel()
            await asyncio.wait({opening})
        return waited

    with allocator_process(tmp_path, "--log-format", "json") as process:
        assert asyncio.run(wait_for(process.address)) == [1.0, 1.0]
    lines = [json.loads(line) for line in (tmp_path / "allocator.log").read_text().splitlines() if "POOL_OWNED" in line]
    assert [line["pool"] for line in lines] == ["mine"]


def test_what_is_at_an_address_where_nobody_answers_is_looked_at(allocator: str) -> None:
    async def asked(address: str) -> str:
        async with AsyncAllocator(address) as client:
            with pytest.raises(UnavailableError) as raised:
                await client.list_pools(timeout_s=20)
        assert any(note.startswith("gRPC says: ") for note in raised.value.__notes__), "its words are for developers"
        return raised.value.message

    def served(address: str) -> str:
        with Allocator(address) as client, pytest.raises(UnavailableError) as raised:
            client.list_pools(timeout_s=20)
        return raised.value.message

    with socket.create_server(("127.0.0.1", 0)) as listening:
        nobody = f"127.0.0.1:{listening.getsockname()[1]}"
    none = f"no answer from {nobody}: no allocator is running there; start it with `quire up` [not encrypted]"
    assert served(nobody) == asyncio.run(asked(nobody)) == none
    assert "no allocator is running there" in served("unix:///nowhere/quire.sock")
    with wsgi_server() as http:
        what = "the server there speaks HTTP and is not an allocator (gRPC); give another address"
        assert served(http) == f"no answer from {http}: {what} [not encrypted]"
        health = quire("health", http)
        said = "the server there speaks HTTP, not gRPC: write http:// before the address [not encrypted]"
        assert (health.returncode, health.stderr) == (3, f"quire: UNAVAILABLE: no answer from {http}: {said}\n")


@contextmanager
def wsgi_server() -> Iterator[str]:
    """Yields the address of a plain HTTP server."""
    with make_server("127.0.0.1", 0, lambda _environ, respond: respond("200 OK", []) or [b"hello"]) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_the_log_of_a_waiting_owner_has_our_words_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def wait() -> None:
        async with AsyncAllocator("127.0.0.1:1") as client:
            opening = asyncio.create_task(client.session("mine", SPEC).open())
            while not caplog.messages:
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait({opening})

    with caplog.at_level(logging.WARNING, "quire"):
        asyncio.run(wait())
    why = "no server answers at the allocator's address; waiting until an allocator serves it"
    assert caplog.messages[0] == f"pool mine is not attached: {why}"
