"""Servers for the client's tests: one that plays back a script, and the allocator as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from quire.errors import QuireError, Reason, to_metadata
from quire.local import ServerProcess
from quire.v1 import allocator_pb2_grpc, worker_pb2_grpc
from quire.v1 import worker_pb2 as worker_pb

USAGE = worker_pb.Usage(
    prompt_token_count=3,
    cached_token_count=2,
    output_token_count=4,
    granted_block_count=5,
    unshared_block_count=9,
    preemption_count=1,
)


class ScriptedServer:
    """Answers every method of both services and of health from `answers`; counts and keeps the requests.

    An answer is a function of request and context. The function returns a message, or for a stream an iterator of
    messages.
    """

    def __init__(self, *, threads: int = 8) -> None:
        self.answers: dict[str, Callable[[Any, grpc.ServicerContext], Any]] = {}
        self.attempts: Counter[str] = Counter()
        self.requests: list[Any] = []
        self.metadata: dict[str, Any] = {}
        self.time_remaining_s = 0.0
        self.asked = threading.Event()
        self.cancelled = threading.Event()
        self.released = threading.Event()
        self.server = grpc.server(ThreadPoolExecutor(threads))
        servicer: Any = self  # `__getattr__` answers for every method
        allocator_pb2_grpc.add_AllocatorServiceServicer_to_server(servicer, self.server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def __getattr__(self, name: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            self.attempts[name] += 1
            self.metadata = dict(context.invocation_metadata())
            self.time_remaining_s = context.time_remaining()
            self.requests.append(request)
            self.asked.set()
            return self.answers[name](request, context)

        return handle


@contextmanager
def scripted_server(*, threads: int = 8) -> Iterator[ScriptedServer]:
    server = ScriptedServer(threads=threads)
    try:
        yield server
    finally:
        server.released.set()
        server.server.stop(None).wait()


def failing(code: grpc.StatusCode, *, times: int, then: Any = None) -> Callable[[Any, grpc.ServicerContext], Any]:
    """Returns an answer that fails `times` times before it succeeds."""
    left = times

    def answer(_request: Any, context: grpc.ServicerContext) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            context.abort(code, "as the script says")
        return then

    return answer


def refusing(reason: Reason) -> Callable[[Any, grpc.ServicerContext], Any]:
    """Returns an answer that refuses with a reason, as Quire's servers do."""
    error = QuireError.of(reason, "as the script says")

    def answer(_request: Any, context: grpc.ServicerContext) -> Any:
        context.set_trailing_metadata(to_metadata(error))
        context.abort(error.code, error.message)

    return answer


def two_samples(_request: Any, _context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
    """Answers a request with n = 2; the chunks of both samples are interleaved."""
    yield worker_pb.GenerateResponse(sample=0, token_ids=[1], text="a")
    yield worker_pb.GenerateResponse(sample=1, token_ids=[3], text="x")
    yield worker_pb.GenerateResponse(sample=1, token_ids=[4], text="y", finish_reason=worker_pb.FINISH_REASON_LENGTH)
    yield worker_pb.GenerateResponse(
        sample=0, token_ids=[2], text="b", finish_reason=worker_pb.FINISH_REASON_STOP, usage=USAGE
    )


def endless(server: ScriptedServer) -> Callable[[Any, grpc.ServicerContext], Iterator[worker_pb.GenerateResponse]]:
    """Returns an answer that sends one token, then nothing until the caller cancels. The server records the
    cancellation."""

    def answer(_request: Any, context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        context.add_callback(server.cancelled.set)
        yield worker_pb.GenerateResponse(sample=0, token_ids=[1], text="a")
        server.released.wait(30)

    return answer


def silent(server: ScriptedServer) -> Callable[[Any, grpc.ServicerContext], Iterator[worker_pb.GenerateResponse]]:
    """Returns an answer that sends nothing until the caller cancels. The server records the cancellation."""

    def answer(_request: Any, context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        context.add_callback(server.cancelled.set)
        server.released.wait(30)
        return iter(())

    return answer


LOST_WORKER = """
import os, signal
from concurrent.futures import ThreadPoolExecutor

import grpc
from quire.v1 import worker_pb2_grpc


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    def Generate(self, request, context):
        os.kill(os.getpid(), signal.SIGKILL)


server = grpc.server(ThreadPoolExecutor(1))
worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(f"127.0.0.1:{port}", flush=True)
server.wait_for_termination()
"""


@contextmanager
def lost_worker() -> Iterator[str]:
    """Yields the address of a process that kills itself at its first request to generate."""
    process = subprocess.Popen([sys.executable, "-c", LOST_WORKER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as lines:
        try:
            yield lines.readline().strip()
        finally:
            process.kill()


@contextmanager
def allocator_process(folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """Runs the real allocator on free ports of this machine."""
    command = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", *arguments]
    process = ServerProcess("quire_allocator", command, folder=folder, log=folder / "allocator.log", drain_timeout_s=5)
    try:
        process.wait_ready(deadline=time.monotonic() + 30)
        yield process
    finally:
        process.stop()


def secret_file(path: Path, text: str) -> Path:
    """Writes a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def quire(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the `quire` command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "quire.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=110,  # seconds; a busy machine may need a minute to start the process
        check=False,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment},
    )


def parsed(result: subprocess.CompletedProcess[str]) -> Any:
    """Returns the JSON that a command printed."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def link_local() -> str | None:
    """Returns a link-local address of this machine with its interface; None if there is none."""
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, scope, flags, name = line.split()
            # Scope 20 is link-local. Flag 80 is permanent: the address is ready for use. Container engines may remove a
            # veth at any time.
            if scope == "20" and flags == "80" and not name.startswith("veth"):
                return f"{':'.join(digits[at : at + 4] for at in range(0, 32, 4))}%{name}"
    return None
