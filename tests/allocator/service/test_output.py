"""An allocator with unread output continues to serve, counts the lost lines, and ends on request."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire import Allocator, PoolSpec, _certs

from tests.allocator.service.one_by_one import calls

SPEC = PoolSpec.full_attention(block_count=64, block_size=16)
WAIT_S = 30.0


class Unread:
    """A pipe without a reader; small, so that a few lines fill it."""

    def __enter__(self) -> int:
        self._reader, writer = os.pipe()
        self._writer = writer
        return writer

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Left(Unread):
    """A pipe whose reader has gone."""

    def __enter__(self) -> int:
        writer = super().__enter__()
        os.close(self._reader)
        self._reader = os.open(os.devnull, os.O_RDONLY)
        return writer


def full_disk() -> Any:
    return Path("/dev/full").open("wb")


OUTPUTS = {"unread": Unread, "left": Left, "full disk": full_disk}


@contextlib.contextmanager
def serving(folder: Path, *options: str, **streams: Any) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "quire_allocator", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--ready-file", str(ready), *options], **streams)
    try:
        deadline = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, f"ended with {process.returncode}"
            assert time.monotonic() < deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        yield process, json.loads(ready.read_text())
    finally:
        process.kill()
        process.wait()


def dropped(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=WAIT_S) as page:
        found = re.search(r"^quire_allocator_log_lines_dropped_total (\S+)", page.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_allocator_whose_output_nobody_takes_serves_on_and_ends_when_told(name: str, tmp_path: Path) -> None:
    with OUTPUTS[name]() as output, serving(tmp_path, stdout=output, stderr=output) as (process, ready):
        with Allocator(ready["address"]) as client:
            # Each session logs two lines of some 150 bytes. All sessions together log more than a pipe holds.
            for number in range(300):
                with calls(client, f"pool-{number}", SPEC, keep_alive=False) as session:
                    assert session.allocate(1, 10, timeout_s=WAIT_S).ok
        if name != "unread":
            assert dropped(ready["metrics_address"]) >= 600
        process.terminate()
        assert process.wait(WAIT_S) == 0


def test_an_allocator_without_standard_streams_serves_and_none_of_its_sockets_gets_their_numbers(
    tmp_path: Path,
) -> None:
    closing = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
    ready = tmp_path / "ready.json"
    command = [*closing, sys.executable, "-m", "quire_allocator", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--metrics", "127.0.0.1:0", "--ready-file", str(ready)])
    try:
        deadline = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, f"ended with {process.returncode}"
            assert time.monotonic() < deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        for number in (0, 1, 2):
            assert os.readlink(f"/proc/{process.pid}/fd/{number}") == os.devnull
        with Allocator(json.loads(ready.read_text())["address"]) as client:
            assert client.health()
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_strangers_cannot_make_an_allocator_write_lines_past_its_log(tmp_path: Path) -> None:
    """gRPC writes its complaints directly to the file descriptor, from any thread that serves the socket."""
    authority = _certs.make_authority(tmp_path, days=1)
    _certs.make_server(tmp_path, authority, "server", [], days=1)
    tls = ["--tls-cert", str(tmp_path / "server.pem"), "--tls-key", str(tmp_path / "server.key")]
    # a header `:status` with the value "bad 200", which is no number
    frame = bytes([0, 0, 9, 1, 4, 0, 0, 0, 1]) + bytes([0x08, 7]) + b"bad 200"
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    for options, sent in ((tls, b"GET / HTTP/1.1\r\n\r\n"), ([], preface + frame)):
        folder = tmp_path / str(len(options))
        folder.mkdir()
        log = folder / "log"
        with log.open("wb") as output, serving(folder, *options, stderr=output) as (process, ready):
            host, port = ready["address"].split(":")
            for _ in range(3):
                with socket.create_connection((host, int(port)), WAIT_S) as connection:
                    connection.sendall(sent)
                    connection.recv(100)
            process.terminate()
            assert process.wait(WAIT_S) == 0
        assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == [
            "serving",
            "draining",
            "stopped",
        ]
