"""A token, a key, a certificate or a template that is no file is refused at once: no start waits for a writer."""

from __future__ import annotations

import importlib.util
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from quire._secret_files import read_file

from tests.client.servers import quire, secret_file
from tests.gateway.scene import DEMO
from tests.security.certificates import quire_certs

KINDS: dict[str, Callable[[Path], object]] = {
    "named pipe": lambda path: os.mkfifo(path, 0o600),
    "folder": lambda path: path.mkdir(mode=0o700),
    "device": lambda path: path.symlink_to("/dev/full"),
}
TLS = ["--tls-cert", "certs/server.pem", "--tls-key", "certs/server.key", "--tls-client-ca", "certs/ca.pem"]
STARTS = {
    "allocator --token-file": [],
    "allocator --tls-cert": TLS,
    "allocator --tls-key": TLS,
    "allocator --tls-client-ca": TLS,
    "gateway --api-keys": ["--worker", "127.0.0.1:1"],
    "worker --chat-template": ["--model", str(DEMO), "--allocator", "127.0.0.1:1"],
}
WITH_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="a worker needs torch")


@pytest.mark.parametrize(
    "start", [pytest.param(each, marks=WITH_TORCH) if each.startswith("worker") else each for each in STARTS]
)
def test_no_start_waits_for_the_writer_of_a_named_pipe(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quire_certs(tmp_path / "certs")
    os.mkfifo("odd", 0o600)
    server, option = start.split()
    where = ["--listen", "127.0.0.1:0", *([] if server == "gateway" else ["--metrics", "127.0.0.1:0"])]
    done = quire(server, *where, *STARTS[start], option, "odd")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "odd: " in done.stderr
    assert done.stderr.endswith("it is not a regular file\n")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_read(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "odd")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        read_file(tmp_path / "odd")


def test_a_socket_is_not_read(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "odd"))
        with pytest.raises(OSError, match="odd"):
            read_file(tmp_path / "odd")


def test_what_a_command_of_the_shell_writes_is_read(tmp_path: Path) -> None:
    """Bash puts the number of a pipe in place of `<(command)`. The command may take its time."""
    secret_file(tmp_path / "token", "a-token-of-a-vault")
    reader = "import sys; from quire._secret_files import read_token; print(read_token(sys.argv[1]))"
    go, token = shlex.quote(str(tmp_path / "go")), shlex.quote(str(tmp_path / "token"))
    script = f"{shlex.quote(sys.executable)} -c {shlex.quote(reader)} <(read -r go < {go}; cat {token})"
    os.mkfifo(tmp_path / "go")
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as reading:
        (tmp_path / "go").write_text("now\n")
        said, _ = reading.communicate(timeout=60)
    assert (reading.returncode, said) == (0, "a-token-of-a-vault\n")
