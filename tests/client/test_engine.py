"""gRPC's engine reads sockets on the thread that completes calls, unless the application chose another engine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from quire._transport import grpc_io

MESSAGES = 200
# The script prints how often the threads of gRPC's EventEngine ran during `MESSAGES` messages.
SCRIPT = f"""
import asyncio, os, pathlib, sys
{{imports}}
import grpc
from grpc import aio

async def echo(requests, context):
    while (request := await context.read()) is not aio.EOF:
        await context.write(request)

def wakes():
    threads = [thread.read_text() for thread in pathlib.Path("/proc/self/task").glob("*/status")]
    lines = [line for text in threads if "event_engine" in text for line in text.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

async def main():
    server = aio.server()
    handlers = {{{{"Echo": grpc.stream_stream_rpc_method_handler(echo)}}}}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{{{{port}}}}") as channel:
        call = channel.stream_stream("/test/Echo")()
        before = None
        for number in range({MESSAGES} + 1):
            await call.write(b"x")
            assert await call.read() == b"x"
            before = wakes() if before is None else before
        print(wakes() - before, os.environ.get("GRPC_EXPERIMENTS"))
        call.cancel()
    await server.stop(None)

asyncio.run(main())
"""


def _wakes(imports: str, **environment: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    script = SCRIPT.format(imports=imports)
    done = subprocess.run(
        [sys.executable, "-c", script], env=kept | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "experiment" not in done.stderr, done.stderr
    count, variable = done.stdout.split()
    return int(count), variable


def test_the_engine_of_grpc_itself_hands_every_message_from_thread_to_thread() -> None:
    count, _ = _wakes("import grpc, quire")  # The application imported gRPC first, so Quire keeps its engine.
    assert count > MESSAGES


def test_with_quire_messages_pass_no_other_thread() -> None:
    count, variable = _wakes("import quire")
    assert count < MESSAGES / 4
    assert variable == "None"  # Child processes must not inherit the variable.


WITH_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="a worker needs torch")


@pytest.mark.parametrize(
    "module",
    ["quire_allocator.server", pytest.param("quire_worker.process.server", marks=WITH_TORCH), "quire.cli.app"],
)
def test_so_they_do_in_every_process_of_quire(module: str) -> None:
    count, _ = _wakes(f"import {module}")
    assert count < MESSAGES / 4


def test_the_environment_decides() -> None:
    count, variable = _wakes("import quire", GRPC_EXPERIMENTS="event_engine_client")
    assert count > MESSAGES
    assert variable == "event_engine_client"


def test_the_installed_grpc_is_one_that_was_looked_at() -> None:
    """A newer gRPC release runs on its default engine until a developer has checked that it still has both engines."""
    major, minor, *_ = version("grpcio").split(".")
    assert (int(major), int(minor)) == grpc_io.LAST_WITH_BOTH
