"""An allocator inside the test: a real gRPC server on a free port, a clock to move, and owners to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from grpc import aio
from quire._serving.calls import CallInterceptor
from quire.errors import Reason, code_of, from_rpc_error
from quire.protocol.limits import MESSAGE_BYTES_MAX
from quire.protocol.outcomes import StepOutcome, read_reply
from quire.protocol.steps import StepBuilder
from quire.session.call_status import Ending
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire_allocator.core.ownership.directory import BLOCKS_OF_CALLER_MAX, Directory
from quire_allocator.metrics.counters import Counters
from quire_allocator.service import AllocatorService, add_to_server

from tests.allocator.service.one_by_one import OneByOne

MESSAGE_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]
EMPTY_REPORT = pb.SessionRequest(report_end=pb.ReportEnd())
HEARTBEAT = pb.SessionRequest(heartbeat=pb.Heartbeat())
DETACH = pb.SessionRequest(detach=pb.Detach())


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class RunningAllocator:
    """A running allocator, with the clock that moves it."""

    service: AllocatorService
    clock: Clock
    stub: pb_grpc.AllocatorServiceStub
    address: str

    def pass_time(self, seconds: float) -> None:
        """Moves the clock and lets leases expire."""
        self.clock.now += seconds
        self.service.expire_leases(self.clock.now)

    @contextlib.asynccontextmanager
    async def from_elsewhere(self, number: int) -> AsyncIterator[RunningAllocator]:
        """Yields this allocator on a separate connection, as another caller has."""
        options = [*MESSAGE_OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("number", number)]
        async with aio.insecure_channel(self.address, options=options) as channel:
            yield replace(self, stub=pb_grpc.AllocatorServiceStub(channel))


@contextlib.asynccontextmanager
async def running_allocator(
    *, pools_max: int = 4, blocks_max: int = BLOCKS_OF_CALLER_MAX, check_invariants: bool = True
) -> AsyncIterator[RunningAllocator]:
    """Serves until the `with` block ends, when every pool must be consistent."""
    clock = Clock()
    directory = Directory(lease_s=10.0, pools_max=pools_max, blocks_max=blocks_max)
    service = AllocatorService(directory, Counters(), check_invariants=check_invariants, clock=clock)
    server = aio.server(interceptors=[CallInterceptor(None, 4_096)], options=MESSAGE_OPTIONS)
    add_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        async with aio.insecure_channel(address, options=MESSAGE_OPTIONS) as channel:
            yield RunningAllocator(service, clock, pb_grpc.AllocatorServiceStub(channel), address)
        directory.check_invariants()
    finally:
        await server.stop(None)


def spec(block_count: int = 8, block_size: int = 4, group_count: int = 1) -> pb.PoolSpec:
    """Returns the specification of a pool of full attention."""
    group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=block_size)
    return pb.PoolSpec(
        block_count=block_count, groups=[group] * group_count, cache_layout="nhd", model_fingerprint=b"m"
    )


def d(letters: str) -> bytes:
    """Returns one digest per letter, concatenated, each for a block that follows all letters before it."""
    return b"".join(hashlib.sha256(letters[: i + 1].encode()).digest() for i in range(len(letters)))


def numbers_in(data: bytes) -> list[int]:
    """Returns the uint32 numbers of a column."""
    return [number for (number,) in struct.iter_unpack("<I", data)]


def tables_in(tables: Sequence[pb.BlockTable]) -> list[list[int]]:
    """Returns the block ids of each table."""
    return [numbers_in(table.blocks) for table in tables]


@contextlib.contextmanager
def refused(reason: Reason, message: str = "") -> Iterator[pytest.ExceptionInfo[aio.AioRpcError]]:
    """Requires that the `with` block fails with this reason, under the status code that the table of errors has for
    it."""
    with pytest.raises(aio.AioRpcError, match=message or None) as caught:
        yield caught
    error = from_rpc_error(caught.value)
    assert (error.reason, error.code) == (reason, code_of(reason)), error


class UnaryOwner(OneByOne):
    """The owner of a unary session, which remembers its id and numbers the steps. The driver leaves checks of ids to
    the allocator."""

    def __init__(self, allocator: RunningAllocator, session_id: bytes, group_count: int = 1) -> None:
        super().__init__(self)
        self._stub = allocator.stub
        self._group_count = group_count
        self.session_id = session_id
        self.next_step = 1

    @classmethod
    async def open(cls, allocator: RunningAllocator, pool: str = "a", **shape: int) -> UnaryOwner:
        """Opens a session for a pool."""
        request = pb.OpenSessionRequest(version=3, request_id=f"open {pool}", pool=pool, spec=spec(**shape))
        opened = await allocator.stub.OpenSession(request)
        return cls(allocator, opened.session_id, len(request.spec.groups))

    def message(self, number: int | None = None, **phases: Any) -> pb.Step:
        """Returns a step as a message, by default the next one."""
        number = self.next_step if number is None else number
        return pb.Step(session_id=self.session_id, number=number, **phases)

    async def step(self, operations: StepBuilder) -> StepOutcome:
        """Sends the next step."""
        step = packed.Step.FromString(self.message().SerializeToString())
        operations.fill(step)
        reply = await self.apply(pb.Step.FromString(step.SerializeToString()))
        return read_reply(step, packed.StepReply.FromString(reply.SerializeToString()), self._group_count)

    async def apply(self, step: pb.Step) -> pb.StepReply:
        """Sends any step."""
        reply = await self._stub.Apply(step)
        self.next_step = max(self.next_step, reply.number + 1)
        return reply

    async def renew(self) -> pb.StepReply:
        """Sends a step without number and operations, which renews the lease."""
        return await self._stub.Apply(pb.Step(session_id=self.session_id))

    async def close(self) -> None:
        """Gives the pool back."""
        await self._stub.CloseSession(pb.CloseSessionRequest(session_id=self.session_id))


class StreamOwner:
    """The owner's end of a Session stream; remembers its session and numbers its steps."""

    def __init__(self, allocator: RunningAllocator) -> None:
        self.call = allocator.stub.Session()
        self._ending = Ending(self.call)
        self.session_id = b""
        self.next_step = 1

    @classmethod
    async def ready(cls, allocator: RunningAllocator, pool: str = "a", **shape: int) -> StreamOwner:
        """Returns an owner that has attached and reported."""
        owner = cls(allocator)
        reply = await owner.attach(pool=pool, spec=spec(**shape))
        assert reply.HasField("report_required")
        await owner.report()
        return owner

    async def send(self, message: pb.SessionRequest) -> None:
        """Sends without waiting for an answer."""
        await self.call.write(message)

    async def receive(self) -> pb.SessionReply:
        """Returns the next message, or raises the error of the stream."""
        with contextlib.suppress(aio.AioRpcError):
            reply = await self.call.read()
            if reply is not aio.EOF:
                return reply
        await self.end()
        raise AssertionError("the server ended the stream without an error")

    async def exchange(self, message: pb.SessionRequest) -> pb.SessionReply:
        """Sends one message, and returns the answer."""
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # `receive` raises the stream's error
            await self.send(message)
        return await self.receive()

    async def attach(self, **fields: Any) -> pb.SessionReply:
        """Attaches; omitted fields have the values of a first attach to pool "a"."""
        defaults: dict[str, Any] = {"version": 3, "pool": "a", "incarnation": b"1" * 16, "epoch": 1, "window": 4}
        fields = {**defaults, "spec": spec(), **fields}
        reply = await self.exchange(pb.SessionRequest(attach=pb.Attach(**fields)))
        if reply.HasField("resumed"):
            self.session_id, self.next_step = reply.resumed.session_id, reply.resumed.next_step
        return reply

    async def report(self, last_step: int = 0) -> pb.Ready:
        """Reports an empty pool."""
        end = pb.ReportEnd(last_step=last_step)
        ready = (await self.exchange(pb.SessionRequest(report_end=end))).ready
        self.session_id, self.next_step = ready.session_id, ready.next_step
        return ready

    async def step(self, **phases: Any) -> pb.StepReply:
        """Sends the next step."""
        reply = await self.step_as(self.next_step, **phases)
        self.next_step += 1
        return reply

    async def step_as(self, number: int, **phases: Any) -> pb.StepReply:
        """Sends a step with any number."""
        step = pb.Step(**{"session_id": self.session_id, "number": number, **phases})
        return (await self.exchange(pb.SessionRequest(step=step))).step_reply

    async def hang_up(self) -> None:
        """Ends the owner's side of the stream, and waits until the server has ended the stream."""
        await self.call.done_writing()
        assert await self.call.read() is aio.EOF

    async def end(self) -> None:
        """Waits for the end of the stream, and raises its error, if any."""
        status = await self._ending.status()
        if status.code() is not grpc.StatusCode.OK:
            raise status


def grows(*operations: tuple[int, int, bytes]) -> pb.GrowPhase:
    """Returns the phase of these grows, each as (sequence, token count, digests)."""
    return pb.GrowPhase(
        sequences=[sequence for sequence, _, _ in operations],
        token_counts=[count for _, count, _ in operations],
        digest_counts=[len(digests) // 32 for _, _, digests in operations],
        digests=b"".join(digests for _, _, digests in operations),
    )


def commits(*operations: tuple[int, int, bytes]) -> pb.CommitPhase:
    """Returns the phase of these commits, each as (sequence, token count, digests)."""
    return pb.CommitPhase(
        sequences=[sequence for sequence, _, _ in operations],
        token_counts=[count for _, count, _ in operations],
        digest_counts=[len(digests) // 32 for _, _, digests in operations],
        digests=b"".join(digests for _, _, digests in operations),
    )


async def state(
    allocator: RunningAllocator, pool: str = "a"
) -> tuple[bytes, list[tuple[int, int, int, list[list[int]]]]]:
    """Returns the states of all blocks, and id, tokens, committed tokens and tables of all sequences: nothing that time
    changes."""
    seen = await allocator.stub.GetPoolBlocks(pb.GetPoolBlocksRequest(pool=pool))
    sequences = [(s.sequence_id, s.token_count, s.committed_token_count, tables_in(s.tables)) for s in seen.sequences]
    return seen.block_states, sequences
