"""Servers keep serving and no caller loses anything with an unread log, a full disk, a forking process, or a clock that
jumps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from quire import Allocator, Client, PoolSpec
from quire._never_blocking import BYTES_MAX
from quire.errors import UnavailableError
from quire.local import LocalStack

from tests.allocator.service.one_by_one import calls
from tests.e2e.stack import DEMO, eventually
from tests.faults.conftest import WallClock
from tests.faults.test_faults import RUNS

SPEC = PoolSpec.full_attention(block_count=64, block_size=16)
LINES_AT_ONCE = 256
START_S = 90.0  # seconds for the start of one server on a busy machine

pytestmark = pytest.mark.timeout(400)


@contextlib.contextmanager
def unread() -> Iterator[int]:
    """Yields a full pipe without a reader, so that a server's first line has to wait."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(select.PIPE_BUF))
        os.set_blocking(writer, True)
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    """Yields a file on a full disk."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Closes the standard streams, as some supervisors do when they start a service."""
    yield None


@contextlib.contextmanager
def server(
    name: str, folder: Path, output: int | None, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """Starts a server with this output; yields its process and the contents of its ready file."""
    ready = folder / f"{name}.json"
    command = [sys.executable, "-m", f"quire_{name}", "--listen", "127.0.0.1:0", "--ready-file", str(ready), *arguments]
    metrics = [] if name == "gateway" else ["--metrics", "127.0.0.1:0"]
    if output is None:
        command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *command]
    process = subprocess.Popen([*command, *metrics, "--log-level", "debug"], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, f"{name} ended with {process.returncode}"
            assert time.monotonic() < deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        # A closed standard stream must become /dev/null. Otherwise a socket would get the number of the stream, and
        # receive printed text.
        if output is None:
            assert {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 1, 2)} == {os.devnull}
        yield process, json.loads(ready.read_text())
        process.terminate()
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()


def dropped_line_count(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as page:
        found = re.findall(r"^quire_\w+_log_lines_dropped_total (\S+)", page.read().decode(), re.MULTILINE)
    return float(found[0])


def log_until_lines_are_dropped(client: Allocator, metrics: str) -> None:
    """Makes an allocator log a line of about 300 bytes per call, until its buffer for the reader is full."""
    name = "p" * 128
    with calls(client, name, SPEC):
        for _ in range(3 * BYTES_MAX // (256 * LINES_AT_ONCE)):
            for _ in range(LINES_AT_ONCE):
                client.drop_cache(name)
            if dropped_line_count(metrics) > 0:
                return
    raise AssertionError("the allocator has dropped no line")


@pytest.mark.parametrize("output", [unread, full_disk, closed])
def test_no_server_needs_somebody_to_take_its_output(output: Callable[[], Any], tmp_path: Path) -> None:
    with output() as there, server("allocator", tmp_path, there) as (_, allocator):
        worker = server("worker", tmp_path, there, "--model", str(DEMO), "--blocks", "64", "--allocator",
                        allocator["address"])  # fmt: skip
        with worker as (_, of_worker):
            behind = ("--worker", of_worker["address"], "--allocator", allocator["address"])
            with server("gateway", tmp_path, there, *behind) as (_, gateway):
                with Allocator(allocator["address"]) as client:
                    if output is not closed:
                        log_until_lines_are_dropped(client, allocator["metrics_address"])
                    for run in range(50 * RUNS):  # Each session logs two lines.
                        session = calls(client, f"pool-{run}", SPEC, keep_alive=False)
                        session.open()
                        assert session.allocate(1, 10).ok
                        session.close()
                with Client(of_worker["address"]) as client:
                    assert client.generate("The for", max_tokens=4).text
                with urllib.request.urlopen(f"http://{gateway['address']}/readyz", timeout=30) as answer:
                    assert answer.status == 200
                if output is full_disk:
                    eventually(
                        lambda: dropped_line_count(allocator["metrics_address"]) >= 100 * RUNS,
                        "a thread has tried to write each line",
                    )


@pytest.mark.parametrize("output", [unread, full_disk])
def test_up_replaces_an_allocator_and_stops_though_nobody_takes_what_it_says(output: Callable[[], Any]) -> None:
    free = [f"--{kind}-{name}=127.0.0.1:0" for kind in ("listen", "metrics") for name in ("allocator", "worker")]
    command = [sys.executable, "-m", "quire.cli", "up", "--model", str(DEMO), *free, "--listen-gateway", "none"]
    with output() as there:
        up = subprocess.Popen([*command, "--json", "--", "--blocks", "64"], stdout=subprocess.PIPE, stderr=there)

        def allocators() -> list[psutil.Process]:
            return [child for child in psutil.Process(up.pid).children() if is_allocator(child)]

        try:
            assert up.stdout is not None
            with up.stdout as addresses:
                served = json.loads(addresses.readline())
            (first,) = allocators()
            first.kill()
            eventually(lambda: any(each.pid != first.pid for each in allocators()), "it has another one", within_s=60)
            with Client(served["worker"]) as client:
                eventually(lambda: is_served(client), "text goes on", within_s=60)
            up.terminate()
            assert up.wait(60) == 0
        finally:
            up.kill()
            up.wait()


def is_allocator(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # The process may have ended meanwhile.
        return "quire_allocator" in process.cmdline()
    return False


def is_served(client: Client) -> bool:
    with contextlib.suppress(UnavailableError):
        return bool(client.generate("The for", max_tokens=4).text)
    return False


FORKING = """
import os, sys
from quire import Allocator, PoolSpec
from quire.errors import UsageError
from quire.protocol.outcomes import Result
from quire.protocol.steps import StepBuilder
address, forks = sys.argv[1], int(sys.argv[2])
SPEC = PoolSpec.full_attention(block_count=64, block_size=16)

def fork():
    child = os.fork()
    if not child:
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status

def fork_that_makes_a_client():
    child = os.fork()
    if not child:
        try:
            Allocator(address)
        except UsageError as error:
            os._exit("'spawn' or 'forkserver'" not in str(error))
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status

def step(verb, *arguments):
    operations = StepBuilder()
    getattr(operations, verb)(*arguments)
    return session.submit(operations)
"""
BESIDE = {
    "calls": """
with Allocator(address) as client, client.session("p", SPEC, transport="calls") as session:
    for number in range(1, forks + 1):
        assert session.step(StepBuilder().allocate(number, 5)).grows[0].result
        fork()
        fork_that_makes_a_client()
        assert session.step(StepBuilder().grow(number, 10), timeout_s=10).grows[0].result
        session.step(StepBuilder().free(number))
""",
    "stream": """
waits = []
with Allocator(address) as client, client.session("p", SPEC, transport="stream", on_wait=waits.append) as session:
    for number in range(1, forks + 1):
        allocated = step("allocate", number, 5)  # its answer may come before the fork, beside it or behind it
        fork()
        fork_that_makes_a_client()
        assert allocated.result(10).grows[0].result is Result.OK
        assert step("grow", number, 10).result(10).grows[0].result is Result.OK
        step("free", number).result(10)
    assert session.connected
    assert not waits, waits
    assert [pool.pool for pool in client.list_pools()] == ["p"]
""",
}


@pytest.mark.parametrize("transport", BESIDE)
def test_children_that_are_forked_leave_a_session_alone_and_get_no_client(transport: str, tmp_path: Path) -> None:
    with full_disk() as there, server("allocator", tmp_path, there) as (_, allocator):
        command = [sys.executable, "-c", FORKING + BESIDE[transport], allocator["address"], str(5 * RUNS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr


def test_nothing_that_is_kept_alive_ends_where_the_wall_clock_jumps(
    wall_clock: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers leases, branches, polls and deadlines of real servers, and sessions and branches that their owners
    renew."""
    wall_clock.require()
    for name, value in wall_clock.environment.items():
        monkeypatch.setenv(name, value)
    lease_s = 3.0
    body = json.dumps({"prompt": "The for", "max_tokens": 2}).encode()
    with (
        LocalStack(DEMO, gateway_listen="127.0.0.1:0", allocator_arguments=["--lease", str(lease_s)]) as stack,
        Allocator(stack.allocator_address) as allocator,
        Client(stack.worker_address) as client,
        calls(allocator, "p", SPEC) as session,
        client.prefill("The for statement", ttl_s=lease_s) as branch,
    ):
        for number, seconds in enumerate((3_600, -3_600, 0), start=1):
            wall_clock.jump(seconds)
            until = time.monotonic() + 1.5 * lease_s
            while time.monotonic() < until:
                request = urllib.request.Request(
                    f"http://{stack.gateway_address}/v1/completions", body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=30) as answer:
                    assert answer.status == 200
            assert session.allocate(number, 5).ok
            assert branch.generate(max_tokens=2).text
        assert client.status().report_count <= 1, "the worker has its first session"
