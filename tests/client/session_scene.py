"""A session, and an allocator in this process with streams that break on request."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from grpc import aio
from quire import AsyncAllocator, PoolSpec, QuireError
from quire.protocol.limits import SILENCE_S
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession
from quire.v1 import _packed_pb2 as packed
from quire.v1 import server_pb2
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.core.pool import Pool
from quire_allocator.metrics.counters import Counters
from quire_allocator.service import AllocatorService, add_to_server
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.stream import SessionStream
from quire_allocator.wire import translate

SPEC = PoolSpec.full_attention(block_count=16, block_size=4)


class BrokenError(Exception):
    """The error that breaks a stream in the test's server."""


class LossyStream(SessionStream):
    """Applies steps, but breaks the stream instead of answering, as often as its service says."""

    service: LossyService

    async def _write(self, answer: bytes) -> None:
        service = self.service
        if packed.SessionReply.FromString(answer).HasField("step_reply") and service.replies_to_lose:
            service.replies_to_lose -= 1
            raise BrokenError
        await super()._write(answer)


class LossyService(AllocatorService):
    """Serves lossy streams, and counts attaches."""

    replies_to_lose = 0
    attach_count = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.attached_at: list[float] = []

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.attach_count += 1
        self.attached_at.append(time.monotonic())
        stream = LossyStream(self.streams, context, self.authorize(context))
        stream.service = self
        await stream.run()


@dataclass
class Setting:
    """A session and the allocator behind it."""

    session: AsyncSession
    client: AsyncAllocator
    port: int = 0
    lease_s: float = 10.0
    waits: list[QuireError] = field(default_factory=list)
    service: LossyService | None = None
    server: aio.Server | None = None

    async def start_allocator(self, *options: tuple[str, int]) -> None:
        self.service = LossyService(Directory(lease_s=self.lease_s, pools_max=4), Counters(), check_invariants=True)
        self.server = aio.server(options=[("grpc.so_reuseport", 0), *options])
        add_to_server(self.service, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def stop_allocator(self) -> None:
        assert self.server is not None
        await self.server.stop(grace=None)

    @property
    def pool(self) -> Pool:
        assert self.service is not None
        return self.service.directory.pool("test").pool

    def break_stream(self) -> None:
        assert self.service is not None
        stream = self.service.directory.pool("test").stream
        assert isinstance(stream, SessionMachine)
        stream.end("IDLE", "broken on purpose")


@asynccontextmanager
async def setting(*, lease_s: float = 10.0) -> AsyncIterator[Setting]:
    scene = Setting.__new__(Setting)
    scene.port, scene.waits, scene.lease_s = 0, [], lease_s
    await scene.start_allocator()
    async with AsyncAllocator(f"127.0.0.1:{scene.port}") as scene.client:
        scene.session = scene.client.session("test", SPEC, on_wait=scene.waits.append)
        await scene.session.open()
        yield scene
        await scene.session.close()
    await scene.stop_allocator()


def set_periods(monkeypatch: pytest.MonkeyPatch, heartbeat_s: float, silence_s: float = SILENCE_S) -> None:
    """Makes allocators of this process announce these periods to their owners."""
    told = server_pb2.Limits()
    told.CopyFrom(translate.LIMITS)
    told.heartbeat_ms, told.silence_ms = int(heartbeat_s * 1000), int(silence_s * 1000)
    monkeypatch.setattr(translate, "LIMITS", told)


def allocate(sequence_id: int, token_count: int = 6) -> StepBuilder:
    step = StepBuilder()
    step.allocate(sequence_id, token_count, [])
    return step
