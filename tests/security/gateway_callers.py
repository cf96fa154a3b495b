"""Common parts of the tests with hostile callers of a gateway: two keys, sockets, and a process's memory."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
from quire.local import ServerProcess

from tests.client.servers import two_samples

HONEST, HOSTILE = "sk-honest-0123456789", "sk-hostile-0123456789"
GROWTH_BYTES_MAX = 256 << 20
LIVENESS_S_MAX = 1.0
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user"}]},
    "/v1/responses": {"input": "p"},
    "/v1/responses/input_tokens": {"input": "p"},
    "/v1/branches": {},
    "/v1/branches/branch_00/fork": {},
    "/v1/branches/branch_00/extend": {"continuation": "p"},
    "/v1/branches/branch_00/score": {"candidates": ["p"]},
    "/v1/branches/branch_00/generate": {},
    "/v1/cache/match": {"prompt": "p"},
    "/v1/cache/warm": {"prompt": "p"},
    "/v1/cache/drop": {"prompt": "p"},
    "/tokenize": {"prompt": "p"},
    "/detokenize": {"tokens": [1]},
}  # path -> the smallest body that the path takes


def as_many(asked: Any, context: Any) -> Iterator[Any]:
    """Returns the scripted answer with as many samples as the request asks for, one or two."""
    answers = two_samples(asked, context)
    return answers if asked.sampling.n == 2 else (each for each in answers if each.sample == 0)


def warm_up(served: ServerProcess) -> None:
    for _ in range(3):
        assert first_token_s(served, HONEST) < 60


def connect(served: ServerProcess) -> socket.socket:
    host, _, port = served.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def request(key: str, path: str, body: bytes, method: str = "POST", framing: bytes | None = None) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json"
    )
    framing = b"Content-Length: %d" % len(body) if framing is None else framing
    return head.encode() + b"\r\n" + framing + b"\r\n\r\n" + body


def first_token_s(served: ServerProcess, key: str) -> float:
    body = json.dumps({"prompt": "p", "n": 2, "stream": True}).encode()
    started_s = time.monotonic()
    with closing(connect(served)) as connection:
        connection.sendall(request(key, "/v1/completions", body))
        found = b""
        while b'"text":"a"' not in found:
            data = connection.recv(65_536)
            assert data, found
            found += data
    return time.monotonic() - started_s


def rss(served: ServerProcess) -> int:
    found: int = psutil.Process(served.process.pid).memory_info().rss
    return found


def liveness_s(served: ServerProcess) -> float:
    started_s = time.monotonic()
    with closing(connect(served)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
    return time.monotonic() - started_s


@contextmanager
def liveness_bounded(served: ServerProcess) -> Iterator[None]:
    """Asks for the gateway's liveness again and again during the block, and once after it."""
    ended = threading.Event()

    def asked() -> Iterator[float]:
        while not ended.wait(0.02):
            yield liveness_s(served)
        yield liveness_s(served)

    with ThreadPoolExecutor(1) as beside:
        longest = beside.submit(lambda: max(asked()))
        try:
            yield
        finally:
            ended.set()
    assert longest.result() < LIVENESS_S_MAX


@contextmanager
def memory_bounded(served: ServerProcess) -> Iterator[None]:
    """Sends another caller's request after the block, and checks the process's peak memory."""
    before = rss(served)
    folder = Path(f"/proc/{served.process.pid}")
    (folder / "clear_refs").write_text("5")  # Resets the process's peak memory.
    yield
    first_token_s(served, HONEST)
    peak = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM:"))
    assert (int(peak.split()[1]) << 10) - before < GROWTH_BYTES_MAX
