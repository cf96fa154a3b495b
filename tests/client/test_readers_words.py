"""Messages use their reader's terms: no command-line options for Python callers, no Python arguments on a terminal."""

from __future__ import annotations

import ast
import inspect
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import quire as library
from quire import Allocator, AsyncAllocator, AsyncClient, Client, QuireError, Tls
from quire._transport import diagnosis
from quire.cli.app import app
from typer.testing import CliRunner

from tests.client.servers import ScriptedServer, quire, scripted_server, secret_file

LIBRARY = Path(inspect.getfile(library)).parent
# Modules that are programs or start programs. These have options.
PROGRAMS = ("_certs.py", "_child.py", "_serving", "cli", "local.py")
OPTION = re.compile(r"(?<![\w-])--[a-z]")
NAMES = {
    name
    for kind in (Allocator, Client, AsyncClient, AsyncAllocator, Tls)
    for _, method in inspect.getmembers(kind, inspect.isfunction)
    for name in inspect.signature(method).parameters
    if "_" in name.strip("_")
}
ARGUMENT = re.compile(rf"\b(?:{'|'.join(sorted(NAMES))})\b|\b[a-z]\w*=(?!\S*\.pem)|quire\.Tls|Tls\(")


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields every string of a file except docstrings, for example the text of an error, with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(LIBRARY.rglob("*.py")) if path.relative_to(LIBRARY).parts[0] not in PROGRAMS],
    ids=lambda path: str(path.relative_to(LIBRARY)),
)
def test_no_text_of_the_library_names_an_option(path: Path) -> None:
    assert [(line, text) for line, text in texts_of(path) if OPTION.search(text)] == []


SERVICES = Path(__file__).parents[2]
# Calls with texts that only an operator reads: errors at start, and help of the command line.
OF_A_START = {
    "add_argument",
    "UsageError",
    "UnsupportedModelError",
    "CheckpointError",
    "check_budget",
    "require_free",
    "tls_of",
    "error",
}
TABLES = ("process/options.py", "options.py", "execution/sizing.py", "quire_gateway/server.py", "model/checkpoint.py")


def named_outside_of_a_start(path: Path) -> Iterator[tuple[int, str]]:
    """Yields texts that name an option and that are not part of an error at start."""

    def look(node: ast.AST, calls: frozenset[str]) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Call):
            calls |= {getattr(node.func, "attr", getattr(node.func, "id", ""))}
        text = node.value if isinstance(node, ast.Constant) and not calls & OF_A_START else None
        if isinstance(text, str) and OPTION.search(text):
            yield node.lineno, text
        for child in ast.iter_child_nodes(node):
            yield from look(child, calls)

    return look(ast.parse(path.read_text(encoding="utf-8")), frozenset())


@pytest.mark.parametrize("service", ["allocator_service", "gateway_service", "worker_service"])
def test_no_text_that_reaches_a_servers_callers_names_an_option(service: str) -> None:
    paths = [path for path in (SERVICES / service).rglob("*.py") if not str(path).endswith(TABLES)]
    assert len(paths) > 20
    assert {str(path): found for path in paths if (found := [*named_outside_of_a_start(path)])} == {}


# -- the same errors in Python and on a terminal -----------------------------------------------------------------------


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Yields the address of a server that sends each caller the same answer and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5)
                    try:
                        connection.recv(1 << 16)
                        connection.sendall(answer)
                    except OSError:
                        continue

        serving = threading.Thread(target=serve)
        serving.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    serving.join()


AT = {
    "a server with TLS": b"\x15\x03\x03\x00\x02\x02\x28",
    "a server that is stopped": b"",
    "a server of HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a server of gRPC": b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
}


@pytest.mark.parametrize("server", ["allocator", "worker", diagnosis.ANY_SERVER])
@pytest.mark.parametrize("is_encrypted", [True, False])
@pytest.mark.parametrize("there", AT)
def test_what_is_at_an_address_is_said_to_both(there: str, is_encrypted: bool, server: str) -> None:
    with listener(AT[there]) as address:
        said = diagnosis.what_is_at(address, server, is_encrypted=is_encrypted)
    assert not OPTION.search(said), said
    assert not ARGUMENT.search(said), said


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


Refused = tuple[Callable[[dict[str, Any]], object], list[str], dict[str, str]]
REFUSED: dict[str, Refused] = {
    "a token to another machine": (
        lambda paths: Allocator("10.0.0.1:7070", token="t" * 32).close(),
        ["pool", "list", "--allocator", "10.0.0.1:7070"],
        {"QUIRE_TOKEN_FILE": "token"},
    ),
    "a certificate without an authority": (
        lambda paths: Allocator("127.0.0.1:1").close(),
        ["pool", "list", "--allocator", "127.0.0.1:1"],
        {"QUIRE_TLS_CERT": "token"},
    ),
    "an authority that is none": (
        lambda paths: Allocator("127.0.0.1:1", tls=Tls(paths["token"])).close(),
        ["pool", "list", "--allocator", "127.0.0.1:1"],
        {"QUIRE_TLS_CA": "token"},
    ),
    "a certificate without its key": (
        lambda paths: Allocator("127.0.0.1:1", tls=Tls("ca.pem", cert="cert.pem")).close(),
        ["pool", "list", "--allocator", "127.0.0.1:1"],
        {"QUIRE_TLS_CA": "token", "QUIRE_TLS_CERT": "token"},
    ),
    "a file of a token that is not there": (
        lambda paths: Allocator("127.0.0.1:1").close(),
        ["pool", "list", "--allocator", "127.0.0.1:1"],
        {"QUIRE_TOKEN_FILE": "absent"},
    ),
    "an address that is none": (
        lambda paths: Allocator("http://127.0.0.1:1").close(),
        ["pool", "list", "--allocator", "http://127.0.0.1:1"],
        {},
    ),
    "nobody there": (
        lambda paths: Allocator("127.0.0.1:1").list_pools(timeout_s=5),
        ["pool", "list", "--allocator", "127.0.0.1:1", "--timeout", "5"],
        {},
    ),
    "an adapter without a name": (
        lambda paths: Client(paths["server"]).load_adapter("", ""),
        ["adapter", "load", "", "", "--worker", "server"],
        {},
    ),
    "bad digests of a drop": (
        lambda paths: Allocator(paths["server"]).drop_cache("", digests=b"d"),
        ["cache", "drop", "", "--allocator", "server"],
        {},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_no_option_in_python_and_no_argument_at_a_terminal(
    name: str, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, arguments, variables = REFUSED[name]
    paths = {
        "token": str(secret_file(tmp_path / "token", "t" * 32)), "absent": str(tmp_path / "absent"),
        "server": server.address,
    }  # fmt: skip
    for variable, path in variables.items():
        monkeypatch.setenv(variable, paths[path])
    with pytest.raises((QuireError, ValueError, TypeError, OSError)) as raised:
        call(paths)
    assert not OPTION.search(str(raised.value)), raised.value
    done = CliRunner().invoke(app, [paths["server"] if each == "server" else each for each in arguments])
    assert done.exit_code != 0
    said = done.output if isinstance(done.exception, SystemExit) else str(done.exception)
    assert said
    assert not ARGUMENT.search(said), said


@pytest.mark.parametrize(
    ("program", "ca"), [("gateway", "--worker-ca"), ("worker", "--allocator-ca"), ("pool list", "--tls-ca")]
)
def test_a_certificate_without_an_authority_is_answered_with_the_programs_own_option(
    program: str, ca: str, tmp_path: Path
) -> None:
    model = Path(__file__).parents[2] / "models" / "demo"
    given = {"worker": ["--model", str(model), "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"],
             "gateway": ["--worker", "127.0.0.1:1", "--listen", "127.0.0.1:0"], "pool list": []}[program]  # fmt: skip
    command = [*program.split(), *given, ca.replace("-ca", "-cert"), str(tmp_path / "cert.pem")]
    done = quire(*command)
    assert done.returncode == 2
    assert f"needs {ca}" in done.stderr
