"""The gRPC server that both services run, with a service that does nothing but wait."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from quire import AsyncClient, ResourceExhaustedError, UnavailableError
from quire._serving.server import Server, add_arguments
from quire.v1 import worker_pb2 as worker_pb
from quire.v1 import worker_pb2_grpc as worker_pb_grpc

WORKER_CALLS = 1_024 + 64  # what a worker queues and computes at a time, as it is set up by default


class WaitingService(worker_pb_grpc.WorkerServiceServicer):
    """Streams that wait until they are released."""

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
        """Returns once that many streams wait."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.waiting_count >= count)


@asynccontextmanager
async def serving(service: WaitingService, *, drain_s: float = 5.0, **options: Any) -> AsyncIterator[str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser, listen="127.0.0.1:0", metrics="127.0.0.1:0")
    server = Server(
        parser.parse_args(["--drain-timeout", str(drain_s)]), service_name="quire.v1.WorkerService", **options
    )
    worker_pb_grpc.add_WorkerServiceServicer_to_server(service, server.grpc)
    await server.start(CollectorRegistry())
    await server.announce()
    try:
        yield server._address
    finally:
        service.released.set()
        await server.stop()


async def test_a_server_with_every_call_that_its_service_allows_still_answers_for_its_health() -> None:
    service = WaitingService()
    async with serving(service) as address, AsyncClient(address) as client:
        streams = [client.stream("p") for _ in range(WORKER_CALLS)]
        await service.wait_for(WORKER_CALLS)
        assert await client.health()
        service.released.set()
        assert [(await anext(stream)).text for stream in streams] == ["a"] * WORKER_CALLS


async def test_beyond_its_limit_the_transport_refuses_without_a_reason() -> None:
    service = WaitingService()
    async with serving(service, calls_max=2) as address, AsyncClient(address) as client:
        streams = [client.stream("p") for _ in range(2)]
        await service.wait_for(2)
        with pytest.raises(ResourceExhaustedError) as raised:
            await client.status()
        assert raised.value.reason is None
        service.released.set()
        assert [(await anext(stream)).text for stream in streams] == ["a", "a"]


async def test_a_server_stops_as_soon_as_its_calls_have_ended() -> None:
    service = WaitingService()
    async with serving(service, drain_s=3_600.0) as address, AsyncClient(address) as client:
        stream = client.stream("p")
        await service.wait_for(1)
        await client.close()
        with pytest.raises(UnavailableError, match="closed"):
            await anext(stream)
