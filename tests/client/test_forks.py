"""A forked child ends without disturbing its parent's open sessions, streams and servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.servers import allocator_process

HEAD = """
import asyncio, gc, os, sys, threading
from quire import Allocator, AsyncAllocator, PoolSpec, UnavailableError
from quire.local import ServerProcess
from quire.protocol.steps import StepBuilder
SPEC = PoolSpec.full_attention(block_count=64, block_size=16)
address = sys.argv[1]
pid = os.getpid()

def fork(leave=sys.exit):
    child = os.fork()
    if not child:
        gc.collect()
        leave(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
"""
SCENES = {
    "a unary session": """
with Allocator(address) as client, client.session("p", SPEC, transport="calls") as session:
    session.step(StepBuilder().allocate(1, 5))
    fork()
    assert session.step(StepBuilder().grow(1, 40), timeout_s=10).grows[0].result
""",
    "a session that a child tries to use": """
def use(code):
    try:
        session.step(StepBuilder().grow(1, 20))
    except UnavailableError as error:
        assert "forked" in str(error)
        os._exit(0)
    os._exit(1)

with Allocator(address) as client, client.session("p", SPEC, transport="calls") as session:
    session.step(StepBuilder().allocate(1, 5))
    fork(use)
    assert session.step(StepBuilder().grow(1, 40), timeout_s=10).grows[0].result
""",
    "a session and an engine for threads that a child tries to use": """
def use(code):
    for call in (lambda: session.submit(StepBuilder()).result(10), engine.turn, lambda: engine.admit([1])):
        try:
            call()
        except UnavailableError as error:
            assert "was made before this process was forked, and gRPC does not work" in str(error), error
        else:
            os._exit(1)
    os._exit(0)

with Allocator(address) as client, client.engine("p", SPEC) as engine, client.session("q", SPEC) as session:
    fork(use)
    assert engine.admit(range(20)).tokens
    assert session.connected
for call in (lambda: session.submit(StepBuilder()).result(10), engine.turn):
    try:
        call()
    except UnavailableError as error:
        assert str(error).endswith("is closed"), error
    else:
        raise AssertionError
""",
    "a watch": """
with Allocator(address) as client, client.session("p", SPEC, transport="calls") as session:
    with client.watch_events("p") as events:
        next(events), next(events)
        fork()
        session.step(StepBuilder().allocate(1, 16, [bytes(32)]))
        session.step(StepBuilder().commit(1, 16, [bytes(32)]))
        assert next(events).digests == (bytes(32),)
""",
    "an engine and a session for threads": """
with Allocator(address) as client:
    with client.engine("p", SPEC) as engine, client.session("q", SPEC) as session:
        engine.admit(range(20))
        fork()
        assert engine.admit(range(20)).tokens
        assert session.connected
        assert {pool.pool for pool in client.list_pools()} == {"p", "q"}
""",
    "clients of asyncio": """
async def main():
    async with AsyncAllocator(address) as client:
        async with client.session("p", SPEC, transport="calls") as session, client.session("q", SPEC) as stream:
            await session.step(StepBuilder().allocate(1, 5))
            events = client.watch_events("p")
            await anext(events), await anext(events)
            waiting = [asyncio.create_task(anext(events))]
            waiting += [asyncio.create_task(client.list_pools()) for _ in range(20)]
            await asyncio.sleep(0)
            for _ in range(8):  # what ends a child's tasks does so in any order
                fork()
            await asyncio.gather(*waiting[1:])
            assert (await session.step(StepBuilder().grow(1, 40), timeout_s=10)).grows[0].result
            assert stream.connected
            await session.step(StepBuilder().allocate(2, 16, [bytes(32)]))
            await session.step(StepBuilder().commit(2, 16, [bytes(32)]))
            assert (await waiting[0]).digests == (bytes(32),)
            assert {pool.pool for pool in await client.list_pools()} == {"p", "q"}

asyncio.run(main())
""",
    "a server": """
from pathlib import Path
from contextlib import ExitStack
import tempfile, time
with ExitStack() as undo:
    folder = Path(tempfile.mkdtemp())
    arguments = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    server = ServerProcess("quire_allocator", arguments, folder=folder, log=folder / "log")
    undo.callback(server.stop)
    server.wait_ready(deadline=time.monotonic() + 30)
    fork()
    assert server.process.poll() is None
    with Allocator(server.address) as client:
        assert client.health()
""",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with allocator_process(tmp_path_factory.mktemp("allocator")) as server:
        yield server.address


@pytest.mark.parametrize("scene", SCENES)
def test_a_forked_child_that_ends_leaves_its_parents_things_alone(scene: str, address: str, tmp_path: Path) -> None:
    script = tmp_path / "scene.py"
    script.write_text(HEAD + SCENES[scene])
    done = subprocess.run(
        [sys.executable, str(script), address], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
