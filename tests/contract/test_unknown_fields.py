"""Receivers ignore unknown fields. A proxy adds an unknown field to every message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc import aio
from quire import AsyncAllocator, Client, PoolSpec
from quire.protocol.features import FEATURES
from quire.protocol.steps import StepBuilder
from quire.v1 import allocator_pb2 as pb
from quire.v1 import worker_pb2 as worker_pb

from tests.allocator.service.harness import RunningAllocator, d, running_allocator, spec
from tests.client.servers import ScriptedServer, scripted_server, two_samples

UNKNOWN_FIELD = b"\xa2\xfa\x01\x03new"  # field 4004 with the text "new"
SPEC = PoolSpec.full_attention(block_count=8, block_size=4)
ALLOCATOR = "quire.v1.AllocatorService"


def with_unknown_fields(message: Message) -> Message:
    """Adds an unknown field to a message, and to each message inside it."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in value if field.is_repeated else [value]:
                with_unknown_fields(each)
    message.MergeFromString(UNKNOWN_FIELD)
    return message


class Meddler(grpc.GenericRpcHandler):
    """Forwards calls to the allocator, and adds an unknown field to every message."""

    def __init__(self, channel: aio.Channel) -> None:
        self._channel = channel
        self.seen: set[str] = set()

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        method = descriptor_pool.Default().FindServiceByName(ALLOCATOR).FindMethodByName(name)
        kinds = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        request_type, reply_type = kinds

        def meddled(kind: Any, data: bytes) -> bytes:
            message = with_unknown_fields(kind.FromString(data))
            self.seen.add(message.DESCRIPTOR.name)
            changed = message.SerializeToString()
            assert changed.endswith(UNKNOWN_FIELD)
            return changed

        async def requests(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for each in messages:
                yield meddled(request_type, each)

        async def one(request: bytes, _context: Any) -> bytes:
            return meddled(reply_type, await self._channel.unary_unary(details.method)(meddled(request_type, request)))

        async def watch(request: bytes, _context: Any) -> AsyncIterator[bytes]:
            async for each in self._channel.unary_stream(details.method)(meddled(request_type, request)):
                yield meddled(reply_type, each)

        async def session(messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            async for each in self._channel.stream_stream(details.method)(requests(messages)):
                yield meddled(reply_type, each)

        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(session)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(watch)
        return grpc.unary_unary_rpc_method_handler(one)


@asynccontextmanager
async def meddled(allocator: RunningAllocator) -> AsyncIterator[tuple[Meddler, str]]:
    async with aio.insecure_channel(allocator.address) as channel:
        meddler = Meddler(channel)
        server = aio.server()
        server.add_generic_rpc_handlers([meddler])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield meddler, f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


async def history(address: str) -> list[Any]:
    """Returns the allocator's answers to an owner over a stream, to an owner over unary calls, and to a reader."""
    seen: list[Any] = []
    async with AsyncAllocator(address) as client:
        async with client.session("streamed", SPEC) as session:
            for change in (
                lambda step: step.allocate(1, 6, [d("a")]),
                lambda step: step.commit(1, 6, [d("a")]),
                lambda step: (step.fork(1, 2), step.grow(2, 9)),
                lambda step: step.free(1),
                lambda step: step.allocate(3, 40, []),
            ):
                step = StepBuilder()
                change(step)
                seen.append(await session.step(step))
            blocks = await client.get_pool_blocks("streamed")
            usage = await client.get_pool_usage("streamed")
            seen += [blocks.block_states, blocks.sequences, usage.namespaces, usage.longest_prefixes]
            seen.append(await client.match_prefix([d("a")]))
            seen.append([pool.spec for pool in await client.list_pools()])
            async with client.watch_events("streamed") as events:
                async for event in events:
                    seen.append(type(event))
                    if type(event).__name__ == "SnapshotEnd":
                        break
            seen.append(await client.drop_cache("streamed"))
        async with client.session("called", SPEC, transport="calls", keep_alive=False) as called:
            seen.append(await called.step(StepBuilder().allocate(1, 6, [d("a")]).allocate(2, 9)))
            seen.append(await called.step(StepBuilder().commit(1, 6, [d("a")]).fork(1, 3).free(2)))
            seen.append((await client.get_pool("called")).session_kind)
    return seen


async def test_an_owner_and_a_reader_are_answered_as_without_unknown_fields() -> None:
    async with running_allocator() as allocator:
        expected = await history(allocator.address)
        async with meddled(allocator) as (meddler, address):
            assert await history(address) == expected
    assert {
        "SessionRequest",
        "SessionReply",
        "CacheEvent",
        "OpenSessionRequest",
        "Step",
        "GetPoolBlocksResponse",
    } <= meddler.seen


async def test_an_unknown_field_of_a_specification_is_ignored_and_an_unknown_feature_is_not() -> None:
    async with running_allocator() as allocator:
        declared = with_unknown_fields(spec())
        request = pb.OpenSessionRequest(version=3, request_id="r", pool="a", spec=declared)  # type: ignore[arg-type]
        assert tuple((await allocator.stub.OpenSession(request)).features) == FEATURES
        told = (await allocator.stub.ListPools(pb.ListPoolsRequest())).pools[0].spec
        assert told.SerializeToString() == spec().SerializeToString()


# -- the worker's client -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def test_the_workers_client_reads_the_same_from_answers_with_unknown_fields(server: ScriptedServer) -> None:
    status = worker_pb.GetStatusResponse(pool="a", memory=worker_pb.PoolMemory(pool_bytes=7))
    server.answers = {"Generate": two_samples, "GetStatus": lambda *_: status}
    with Client(server.address) as client:
        expected = client.generate("prompt", n=2, temperature=1.0, request_id="r"), client.status()
        server.answers = {
            "Generate": lambda *asked: (with_unknown_fields(each) for each in two_samples(*asked)),
            "GetStatus": lambda *_: with_unknown_fields(status),
        }
        assert (client.generate("prompt", n=2, temperature=1.0, request_id="r"), client.status()) == expected
