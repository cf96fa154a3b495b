"""An owner of many pools leaves half-sent steps, and replies that are kept for replay, at an allocator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc import aio
from quire.protocol.limits import MESSAGE_BYTES_MAX
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits

from tests.allocator.service.harness import EMPTY_REPORT, spec
from tests.security.certificates import Certificates
from tests.security.deployment import deployed
from tests.security.raw_http2 import framed
from tests.security.test_hostile_calls import Scene, attacker, others_are_served
from tests.security.test_hostile_doors import channel, metadata

POOLS = limits.POOLS_MAX
SESSION = "/quire.v1.AllocatorService/Session"
UNKNOWN_FIELD = b"\xfa\x7f"  # the tag of an unknown field of bytes


@pytest.fixture(scope="module")
def scene(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    for name in ("attacker", "honest"):
        if not (certificates.folder / f"{name}.pem").exists():
            certificates.add(name, "--pool", f"{name}*", "--observe", "*", "--namespace", name)
    with deployed(certificates, tmp_path_factory.mktemp("owners")) as running:
        yield Scene(running)


def attach(number: int, block_count: int = 8) -> pb.SessionRequest:
    shape = pb.Attach(
        version=3, pool=f"attacker-{number}", incarnation=b"1" * 16, epoch=1, window=8, spec=spec(block_count)
    )
    return pb.SessionRequest(attach=shape)


async def opened(connection: aio.Channel, block_count: int = 8) -> list[tuple[Any, bytes]]:
    """Opens streams of as many pools as the attacker may have. Returns the streams that got a session, with ids."""

    async def open_one(number: int) -> tuple[Any, bytes] | None:
        call = connection.stream_stream(SESSION, response_deserializer=pb.SessionReply.FromString)(metadata=metadata())
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.write(attach(number, block_count).SerializeToString())
            await call.read()
            await call.write(EMPTY_REPORT.SerializeToString())
            ready = await call.read()
            return None if ready is aio.EOF else (call, ready.ready.session_id)
        return None

    found = await asyncio.gather(*(open_one(number) for number in range(POOLS)))
    return [each for each in found if each is not None]


async def detached(streams: list[tuple[Any, bytes]]) -> None:
    for call, _ in streams:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.write(pb.SessionRequest(detach=pb.Detach()).SerializeToString())
            while await call.read() is not aio.EOF:
                pass


def with_unknown_bytes(step: pb.Step) -> bytes:
    """Returns a message with a step that has as many bytes as a message may have, most of them in an ignored field."""
    message = pb.SessionRequest(step=step)
    size = MESSAGE_BYTES_MAX - step.ByteSize() - 100
    message.step.MergeFromString(UNKNOWN_FIELD + varint(size) + b"j" * size)
    return message.SerializeToString()


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


@pytest.mark.timeout(300)
async def test_half_sent_steps_of_many_pools_take_a_bounded_memory(scene: Scene) -> None:
    async with others_are_served(scene), attacker(scene, "allocator") as caller:
        half = framed(b"\x12" * (MESSAGE_BYTES_MAX - 200), MESSAGE_BYTES_MAX - 100)
        parts = {}
        for number in range(POOLS):
            begun = framed(attach(number).SerializeToString()) + framed(EMPTY_REPORT.SerializeToString())
            parts[caller.begin(SESSION, metadata())] = begun + half
        await caller.send(parts)


@pytest.mark.timeout(300)
async def test_steps_that_are_kept_for_replay_take_a_bounded_memory(scene: Scene) -> None:
    async with others_are_served(scene), channel(scene.deployment, "attacker", "allocator") as connection:
        streams = await opened(connection)
        for number in range(1, limits.WINDOW_MAX + 1):
            for call, session_id in streams:
                await call.write(with_unknown_bytes(pb.Step(session_id=session_id, number=number)))
            for call, _ in streams:
                assert (await call.read()).step_reply.number == number
        await detached(streams)
