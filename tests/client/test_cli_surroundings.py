"""In bad surroundings the command prints one sentence and returns an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire._descriptors import OPEN_FILES_MIN
from quire.cli.app import app
from quire.errors import UsageError
from quire.v1 import worker_pb2 as worker_pb
from typer.testing import CliRunner

from tests.client.servers import USAGE, quire, scripted_server

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CONFIG = Path(__file__).parent / "configs" / "llama-3-70b.json"
SERVERS = ("allocator", "worker", "gateway")
COMMANDS = {
    "version": ["quire.cli", "--version"],
    "help": ["quire.cli", "--help"],
    "plan": ["quire.cli", "plan", str(CONFIG), "--memory", "80GiB"],
    "plan as json": ["quire.cli", "plan", str(CONFIG), "--memory", "80GiB", "--json"],
    "allocator": ["quire_allocator", "--help"],
    "worker": ["quire_worker", "--version"],
    "gateway": ["quire_gateway", "--help"],
    "quire worker": ["quire.cli", "worker", "--help"],
}
WRONG_USES = {  # arguments and their exit codes
    "quire": (2, ["quire.cli", "plan", "--nonsense"]),
    "no allocator": (3, ["quire.cli", "pool", "list", "--allocator", "unix:///none", "--timeout", "9", "--json"]),
    "allocator": (2, ["quire_allocator", "--listen", "0.0.0.0:1"]),
    "gateway": (2, ["quire_gateway", "--nonsense"]),
    "worker": (2, ["quire_worker", "--model", "/none"]),
}
BUFFERED = {"buffered": "", "unbuffered": "1"}


def run(arguments: list[str], stdout: Any, stderr: Any = subprocess.PIPE, unbuffered: str = "") -> Any:
    environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=stderr, text=True, timeout=110, check=False, env=environment)


@pytest.mark.parametrize("buffered", BUFFERED)
@pytest.mark.parametrize("name", COMMANDS)
def test_output_to_a_full_disk_is_one_sentence(name: str, buffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = run(COMMANDS[name], full, unbuffered=BUFFERED[buffered])
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    said = json.loads(done.stderr)["error"]["message"] if "json" in name else done.stderr
    assert "No space left on device" in said


@pytest.mark.parametrize("buffered", BUFFERED)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_without_a_reader_ends_a_command_with_1_and_no_word(name: str, buffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(COMMANDS[name], writer, unbuffered=BUFFERED[buffered])
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("name", ["plan", "allocator"])
def test_a_command_whose_output_is_closed_does_its_work(name: str) -> None:
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", *COMMANDS[name]]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("buffered", BUFFERED)
@pytest.mark.parametrize("name", WRONG_USES)
def test_an_error_that_nobody_can_be_told_ends_with_the_same_code(name: str, buffered: str) -> None:
    code, arguments = WRONG_USES[name]
    with open("/dev/full", "wb") as full:
        assert run(arguments, full, full, BUFFERED[buffered]).returncode == code


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        (["quire_allocator"], 16),
        (["quire_gateway"], 20),
        (["quire_worker", "--model", str(DEMO)], 20),
        (["quire.cli", "gateway"], 20),
        (["quire.cli", "up", "--model", str(DEMO)], OPEN_FILES_MIN - 1),
    ],
)
def test_a_server_that_may_open_too_few_files_is_one_sentence(command: list[str], limit: int) -> None:
    shell = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", sys.executable, "-m", *command]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    said = f": this process may open {limit} files, but a server needs at least {OPEN_FILES_MIN}: raise the limit"
    assert done.stderr.endswith(f"{said} (ulimit -n)\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("limits", [f"-n {OPEN_FILES_MIN}", "-Sn 20"])
def test_servers_start_with_as_few_files_as_they_may_have(limits: str, tmp_path: Path) -> None:
    """Starts three servers and sends a request, at the least allowed limit of files, and with only the soft limit
    lower."""
    script = """
import sys
from quire import Client
from quire.local import LocalStack
with LocalStack(sys.argv[1], gateway_listen="127.0.0.1:0") as stack, Client(stack.worker_address) as client:
    print(bool(client.generate("The for", max_tokens=4).text))
"""
    shell = ["bash", "-c", f'ulimit {limits}; exec "$@"', "sh", sys.executable, "-c", script, str(DEMO)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize(("command", "code"), [("up", 1), ("worker", 2)])
def test_no_folder_for_temporary_files_is_one_sentence(command: str, code: int, tmp_path: Path) -> None:
    script = """
import tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc/none"]
from quire.cli import main
main()
"""
    names = {
        "up": ("listen-allocator", "metrics-allocator", "listen-worker", "metrics-worker"),
        "worker": ("listen", "metrics"),
    }
    arguments = [command, "--model", str(DEMO), *(f"--{name}=127.0.0.1:0" for name in names[command])]
    arguments += ["--listen-gateway", "none"] if command == "up" else []
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "No usable temporary directory" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--json"], ["-n", "2"]])
def test_a_text_that_the_terminals_encoding_lacks_is_shown_all_the_same(arguments: list[str]) -> None:
    with scripted_server() as server:
        server.answers["Generate"] = snowmen
        asked = ["generate", "p", "--worker", server.address, *arguments]
        done = quire(*asked, PYTHONIOENCODING="ascii")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "\\u2603" in done.stdout


def snowmen(request: worker_pb.GenerateRequest, _context: object) -> Iterator[worker_pb.GenerateResponse]:
    for sample in range(request.sampling.n or 1):
        ends = worker_pb.FINISH_REASON_LENGTH
        yield worker_pb.GenerateResponse(
            sample=sample, token_ids=[1], text="\N{SNOWMAN}", finish_reason=ends, usage=USAGE
        )


NO_NUMBERS = {
    "--timeout": ["nan", "inf", "-1", "0", "1e300", "five"],
    "--temperature": ["inf", "nan", "-0.5", "101"],
    "--top-p": ["0", "nan", "1.1"],
    "--min-p": ["-1", "nan"],
    "--repetition-penalty": ["0", "inf"],
    "--presence-penalty": ["2.1", "nan"],
    "--frequency-penalty": ["-inf"],
    "--length-penalty": ["6", "nan"],
    "--max-tokens": ["1e3", "0", "1.5", "2147483648"],
    "--logprobs": ["21", "true"],
    "--seed": ["18446744073709551616", "-1"],
    "-n": ["65", "0"],
    "--best-of": ["65"],
    "--num-beams": ["65"],
    "--logit-bias": ["5=nan", "5=101", "5=inf"],
}


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, them in NO_NUMBERS.items() for value in them])
def test_a_number_that_an_option_does_not_take_ends_with_2_and_its_name(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["generate", "p", "--worker", "127.0.0.1:1", option, value])
    if isinstance(done.exception, UsageError):
        assert done.exception.message.startswith(f"{option} must be ")
    else:
        assert done.exit_code == 2, done.output
        assert option in done.output


@pytest.mark.parametrize("option", ["--drain-timeout", "--start-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300"])
def test_a_time_of_up_that_is_none_ends_with_2_and_its_name(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["up", option, value])
    assert done.exit_code == 2, done.output
    assert option in done.output
