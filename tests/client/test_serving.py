"""The gRPC server of both services, with a service that only waits."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from quire import AsyncClient, Reason, ResourceExhaustedError, UnavailableError
from quire._serving.process import allow_open_files, write_ready_file
from quire._serving.server import Server, add_arguments
from quire._serving.unix_socket import hold_socket
from quire.errors import UsageError
from quire.v1 import worker_pb2 as worker_pb
from quire.v1 import worker_pb2_grpc as worker_pb_grpc

from tests.client.servers import quire, secret_file

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"

WORKER_CALLS = 1_024 + 64  # by default a worker queues 1,024 calls and computes 64


class WaitingService(worker_pb_grpc.WorkerServiceServicer):
    """Serves streams that wait until the test releases them."""

    def __init__(self) -> None:
        self.waiting_count = 0
        self.changed = asyncio.Condition()
        self.released = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[worker_pb.GenerateResponse]:
        async with self.changed:
            self.waiting_count += 1
            self.changed.notify_all()
        await self.released.wait()
        yield worker_pb.GenerateResponse(text="a")

    async def GetStatus(self, request: Any, context: Any) -> worker_pb.GetStatusResponse:
        return worker_pb.GetStatusResponse()

    async def wait_for(self, count: int) -> None:
        """Returns once this many streams wait."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.waiting_count >= count)


@asynccontextmanager
async def running(
    service: WaitingService, *, drain_s: float = 5.0, token_file: str | None = None, **options: Any
) -> AsyncIterator[Server]:
    parser = argparse.ArgumentParser()
    add_arguments(parser, listen="127.0.0.1:0", metrics="127.0.0.1:0")
    arguments = ["--drain-timeout", str(drain_s), *(["--token-file", token_file] if token_file else [])]
    server = Server(parser.parse_args(arguments), service_name="quire.v1.WorkerService", **options)
    worker_pb_grpc.add_WorkerServiceServicer_to_server(service, server.grpc)
    await server.start(CollectorRegistry())
    await server.announce()
    try:
        yield server
    finally:
        service.released.set()
        await server.stop()


@asynccontextmanager
async def serving(service: WaitingService, **options: Any) -> AsyncIterator[str]:
    async with running(service, **options) as server:
        yield server._address


async def test_a_server_with_every_call_that_its_service_allows_still_answers_for_its_health() -> None:
    service = WaitingService()
    async with serving(service) as address, AsyncClient(address) as client:
        streams = [client.stream("p") for _ in range(WORKER_CALLS)]
        await service.wait_for(WORKER_CALLS)
        assert await client.health()
        service.released.set()
        assert [(await anext(stream)).text for stream in streams] == ["a"] * WORKER_CALLS


async def test_one_caller_has_half_of_the_places_and_the_next_one_still_finds_some() -> None:
    service = WaitingService()
    async with serving(service, calls_max=4) as address, AsyncClient(address) as client, AsyncClient(address) as other:
        streams = [client.stream("p") for _ in range(2)]
        await service.wait_for(2)
        with pytest.raises(ResourceExhaustedError) as raised:
            await client.status()
        assert raised.value.reason is Reason.LIMIT
        assert await other.status()
        assert await client.health()
        service.released.set()
        assert [(await anext(stream)).text for stream in streams] == ["a", "a"]


def test_a_server_has_as_many_open_files_as_it_may() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1_024, before[1]), before[1]))
        assert allow_open_files() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_drain_may_take_half_a_minute_unless_another_time_is_given() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, listen="127.0.0.1:0", metrics="127.0.0.1:0")
    assert parser.parse_args([]).drain_timeout == 30.0
    assert parser.parse_args(["--drain-timeout", "0.5"]).drain_timeout == 0.5
    with pytest.raises(SystemExit):
        parser.parse_args(["--drain-timeout", "-1"])


async def test_a_server_stops_as_soon_as_its_calls_have_ended() -> None:
    service = WaitingService()
    async with serving(service, drain_s=3_600.0) as address, AsyncClient(address) as client:
        stream = client.stream("p")
        await service.wait_for(1)
        await client.close()
        with pytest.raises(UnavailableError, match="closed"):
            await anext(stream)


def probe(server: Server, path: str) -> int:
    assert server._metrics is not None
    try:
        with urllib.request.urlopen(f"http://{server._metrics.bound_address}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_a_server_that_is_not_ready_is_alive_all_the_same_over_grpc_and_http() -> None:
    async with running(WaitingService()) as server, AsyncClient(server._address) as client:
        stub = health_pb2_grpc.HealthStub(client._link.channel)
        live = health_pb2.HealthCheckRequest(service="liveness")

        async def states() -> tuple[bool, bool, int, int]:
            alive = (await stub.Check(live)).status == health_pb2.HealthCheckResponse.SERVING
            return (
                alive,
                await client.health(),
                await asyncio.to_thread(probe, server, "/healthz"),
                await asyncio.to_thread(probe, server, "/readyz"),
            )

        assert await states() == (True, True, 200, 200)
        await server.set_serving(False)
        assert await states() == (True, False, 200, 503)
        await server.set_serving(True)
        assert await states() == (True, True, 200, 200)
        await server.withdraw()
        await server.set_serving(True)  # as if the session came back while the server shuts down
        assert await states() == (True, False, 200, 503)


async def test_a_server_whose_event_loop_stands_still_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire._serving.probes.ALIVE_WITHIN_S", 0.2)
    async with running(WaitingService()) as server:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(probe, server, "/healthz")
            assert asked.result(timeout=30) == 503  # Waiting here blocks the event loop.
        assert await asyncio.to_thread(probe, server, "/healthz") == 200


async def test_probes_show_no_token_and_metrics_ask_for_it(tmp_path: Path) -> None:
    token = secret_file(tmp_path / "token", "a-token-for-metrics")
    async with running(WaitingService(), token_file=str(token)) as server:
        assert [await asyncio.to_thread(probe, server, path) for path in ("/healthz", "/readyz", "/metrics")] == [
            200,
            200,
            401,
        ]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
async def test_the_word_bearer_has_any_case_at_every_door(scheme: str, tmp_path: Path) -> None:
    token = "a-token-for-metrics"

    def scraped(address: str, authorization: str) -> int:
        request = urllib.request.Request(f"http://{address}/metrics", headers={"Authorization": authorization})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    async def asked(address: str, authorization: str) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(address) as channel:
            call = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), metadata=(("authorization", authorization),)
            )
            return await call.code()

    path = secret_file(tmp_path / "token", token)
    async with running(WaitingService(), token_file=str(path)) as server:
        metrics = server._metrics
        assert metrics is not None
        for given, status, code in (
            (f"{scheme} {token}", 200, grpc.StatusCode.OK),
            (f"{scheme} {token}x", 401, grpc.StatusCode.UNAUTHENTICATED),
            (token, 401, grpc.StatusCode.UNAUTHENTICATED),
            (f"Basic {token}", 401, grpc.StatusCode.UNAUTHENTICATED),
        ):
            assert await asyncio.to_thread(scraped, metrics.bound_address, given) == status
            assert await asked(server._address, given) is code


@pytest.mark.parametrize("kind", ["device", "link", "folder"])
@pytest.mark.parametrize("server", ["allocator", "worker", "gateway"])
def test_a_ready_file_takes_the_place_of_no_device_and_no_link(server: str, kind: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    {"device": lambda: os.mkfifo(ready), "link": lambda: ready.symlink_to("ready.json"), "folder": ready.mkdir}[kind]()
    before = ready.lstat()
    given = {"worker": ["--model", str(DEMO)], "gateway": ["--worker", "127.0.0.1:1"], "allocator": []}[server]
    where = ["--listen", "127.0.0.1:0", *([] if server == "gateway" else ["--metrics", "127.0.0.1:0"])]
    done = quire(server, *given, *where, "--ready-file", str(ready))  # The server ends by itself.
    said = f": cannot write the ready file {ready}: it exists and is not a regular file\n"
    assert (done.returncode, done.stderr.count("\n"), done.stderr.endswith(said)) == (2, 1, True), done.stderr
    assert (ready.lstat().st_ino, ready.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_a_link_in_the_place_of_a_lock_or_a_ready_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / "socket.lock").symlink_to(victim)
    with pytest.raises(UsageError, match=r"socket\.lock"):
        hold_socket(f"unix:{tmp_path}/socket")
    monkeypatch.setattr("secrets.token_hex", lambda _count: "guessed")
    (tmp_path / "ready.guessed").symlink_to(victim)
    with pytest.raises(UsageError, match="ready file"):
        write_ready_file(str(tmp_path / "ready"), address="a")
    assert victim.read_text() == "as it was"
