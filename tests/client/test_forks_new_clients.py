"""A forked child that makes a client gets a working one or one sentence of error, and the parent keeps serving.

gRPC would abort in the child, and its sockets in the shared epoll set would crash the parent.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire.v1 import worker_pb2 as worker_pb

from tests.client.servers import ScriptedServer, allocator_process

HEAD = """
import asyncio, multiprocessing, os, sys, threading, time, traceback
from concurrent.futures import ProcessPoolExecutor
from quire import Allocator, AsyncAllocator, AsyncClient, Client, PoolSpec
from quire.errors import UsageError
from quire.protocol.steps import StepBuilder
SPEC = PoolSpec.full_attention(block_count=64, block_size=16)
address, worker, kind = sys.argv[1:]
POOL = f"of-{os.getpid()}"

def make_client():
    if kind == "blocking":
        with Allocator(address) as client, client.session(POOL, SPEC, transport="calls") as session:
            return session.step(StepBuilder().allocate(1, 5)).grows[0].result.name

    async def main():
        async with AsyncAllocator(address) as client, client.session(POOL, SPEC) as session:
            return (await session.step(StepBuilder().allocate(1, 5))).grows[0].result.name
    answers = []
    # The parent's loop seems to run in this thread.
    thread = threading.Thread(target=lambda: answers.append(answer(asyncio.run, main())))
    thread.start()
    thread.join()
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]

def answer(call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:
        return error

def begin(expected):
    # Returns a living child's end, which the parent calls after it has used its own things.
    told, tell = os.pipe()
    go, let_go = os.pipe()
    child = os.fork()
    if not child:
        got = answer(make_client)
        os.write(tell, b"x")
        os.read(go, 1)
        if expected not in str(got):
            traceback.print_exception(got) if isinstance(got, Exception) else print(got, file=sys.stderr)
            sys.exit(1)
        sys.exit(0)
    os.close(tell)
    os.read(told, 1)

    def end():
        os.write(let_go, b"x")
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
    return end

def refused():
    return begin("start processes with multiprocessing's 'spawn' or 'forkserver'")

def served():
    return begin("OK")
"""
REFUSED = {
    "an open client": """
with Allocator(address) as client:
    client.health()
    for _ in range(3):
        end = refused()
        for _ in range(20):
            assert client.health()
        end()
""",
    "a session of calls": """
with Allocator(address) as client, client.session("p", SPEC, transport="calls") as session:
    session.step(StepBuilder().allocate(1, 5))
    end = refused()
    assert session.step(StepBuilder().grow(1, 40), timeout_s=10).grows[0].result
    end()
    assert session.step(StepBuilder().grow(1, 60), timeout_s=10).grows[0].result
""",
    "a watch": """
with Allocator(address) as client, client.session("p", SPEC, transport="calls") as session:
    with client.watch_events("p") as events:
        next(events), next(events)
        end = refused()
        session.step(StepBuilder().allocate(1, 16, [bytes(32)]))
        session.step(StepBuilder().commit(1, 16, [bytes(32)]))
        assert next(events).digests == (bytes(32),)
        end()
        session.step(StepBuilder().allocate(2, 16, [bytes([1]) * 32]))
        session.step(StepBuilder().commit(2, 16, [bytes([1]) * 32]))
        assert next(events).digests == (bytes([1]) * 32,)
""",
    "an engine and a session for threads": """
with Allocator(address) as client, client.engine("p", SPEC) as engine, client.session("q", SPEC) as session:
    engine.admit(range(20))
    for _ in range(3):
        end = refused()
        assert engine.admit(range(20)).tokens
        end()
        assert engine.admit(range(20)).tokens
        assert session.connected
""",
    "a stream of text": """
with Client(worker) as client, client.stream("p", max_tokens=9) as chunks:
    assert next(chunks).text == "a"
    end = refused()
    with Client(worker) as other, other.stream("p", max_tokens=9) as more:
        assert next(more).text == "a"
    end()
    with Client(worker) as other, other.stream("p", max_tokens=9) as more:
        assert next(more).text == "a"
""",
    "a session of asyncio": """
async def main():
    async with AsyncAllocator(address) as client, client.session("p", SPEC) as session:
        await session.step(StepBuilder().allocate(1, 5))
        for tokens in (20, 40, 60):
            end = refused()
            assert (await session.step(StepBuilder().grow(1, tokens))).grows[0].result
            end()
            assert {pool.pool for pool in await client.list_pools()} == {"p"}
        assert session.connected

asyncio.run(main())
""",
    "a watch of asyncio": """
async def main():
    async with AsyncAllocator(address) as client, client.session("p", SPEC, transport="calls") as session:
        await session.step(StepBuilder().allocate(1, 16, [bytes(32)]))
        events = client.watch_events("p")
        await anext(events), await anext(events)
        waiting = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        end = refused()
        await session.step(StepBuilder().commit(1, 16, [bytes(32)]))
        assert (await waiting).digests == (bytes(32),)
        end()

asyncio.run(main())
""",
    "a stream of text of asyncio": """
async def main():
    async with AsyncClient(worker) as client, client.stream("p", max_tokens=9) as chunks:
        assert (await anext(chunks)).text == "a"
        end = refused()
        async with client.stream("p", max_tokens=9) as more:
            assert (await anext(more)).text == "a"
        end()
        async with client.stream("p", max_tokens=9) as more:
            assert (await anext(more)).text == "a"

asyncio.run(main())
""",
    "a child of a child": """
with Allocator(address) as client, client.engine("p", SPEC) as engine:
    child = os.fork()
    if not child:
        refused()()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.admit(range(20)).tokens
""",
    "a pool of processes": """
# The processes of a pool run this file again, except forked ones.
if __name__ == "__main__":
    with Allocator(address) as client, client.engine("p", SPEC) as engine:
        engine.admit(range(20))
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            error = answer(pool.submit(make_client).result)
            assert isinstance(error, UsageError) and "'spawn'" in str(error), error
        assert engine.admit(range(20)).tokens
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(make_client).result() == "OK"
        assert engine.admit(range(20)).tokens
""",
}
SERVED = {
    "nothing": "served()()",
    "a client that was closed": """
for _ in range(3):
    with Allocator(address) as client:
        assert client.health()
    served()()
with Allocator(address) as client:
    assert client.health()
""",
    "a thread whose name ends within a character": """
import ctypes
with Allocator(address) as client:
    assert client.health()
ctypes.CDLL(None).prctl(15, b"x" * 14 + b"\\xc3", 0, 0, 0)  # 15: PR_SET_NAME, of this thread
served()()
""",
    "a session of asyncio that was closed": """
async def main():
    async with AsyncAllocator(address) as client, client.session("p", SPEC) as session:
        await session.step(StepBuilder().allocate(1, 5))

for _ in range(3):
    asyncio.run(main())
    served()()
asyncio.run(main())
""",
}


def one_chunk(_request: Any, context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
    yield worker_pb.GenerateResponse(text="a", token_ids=[1])
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait()


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    worker = ScriptedServer()
    worker.answers["Generate"] = one_chunk
    with allocator_process(tmp_path_factory.mktemp("allocator")) as allocator:
        yield allocator.address, worker.address
    worker.server.stop(None)


def run(scene: str, addresses: tuple[str, str], kind: str, folder: Path) -> None:
    script = folder / "scene.py"
    script.write_text(HEAD + scene)
    done = subprocess.run(
        [sys.executable, str(script), *addresses, kind], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("scene", REFUSED)
def test_a_child_beside_its_parents_clients_is_refused_one_and_hurts_nobody(
    scene: str, kind: str, addresses: tuple[str, str], tmp_path: Path
) -> None:
    run(REFUSED[scene], addresses, kind, tmp_path)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("scene", SERVED)
def test_a_child_forked_while_no_client_is_open_has_its_own(
    scene: str, kind: str, addresses: tuple[str, str], tmp_path: Path
) -> None:
    run(SERVED[scene], addresses, kind, tmp_path)
