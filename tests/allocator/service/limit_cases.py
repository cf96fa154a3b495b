"""Requests to a running allocator that use a given number of each limited thing.

Each case prepares the limit, marks the moment before the last request (`last`), and makes that request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from quire.protocol.packing import pack_uint32
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.session.steps import pool_digest

from tests.allocator.service.harness import RunningAllocator, StreamOwner, UnaryOwner, grows, spec

_before_last: list[Callable[[], None]] = []


@contextlib.contextmanager
def remembering(look: Callable[[], None]) -> Iterator[None]:
    """Calls `look` before the last request of the case in the `with` block."""
    _before_last.append(look)
    try:
        yield
    finally:
        _before_last.remove(look)


def last() -> None:
    """Marks that the next request reaches the limit."""
    for look in _before_last:
        look()


def digest_of(owner: Ownership) -> tuple[bytes, int, int]:
    """Returns the digest of a pool's sequences, and its numbers of free and cached blocks."""
    return pool_digest(owner.pool), owner.pool.blocks.free_count, owner.pool.blocks.cached_count


# -- steps -------------------------------------------------------------------------------------------------------------


async def step_of_bytes(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    step = pb.Step(session_id=owner.session_id, number=1, grows=grows((1, 1, b"")))
    fill(step.grows.namespaces, step.ByteSize, number)
    assert step.ByteSize() == number
    last()
    assert (await owner.exchange(pb.SessionRequest(step=step))).step_reply.number == 1


def fill(names: Any, size: Callable[[], int], number: int) -> None:
    """Adds names until a message has exactly `number` bytes."""
    while number - size() > 400:
        names.append("x" * 100)
    names.append("")
    while size() < number:
        if len(names[-1]) == 120:
            names.append("")
        else:
            names[-1] += "x"


async def step_of_operations(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    last()
    await owner.step(frees=pb.FreePhase(sequences=[1] * (number - 1)), grows=grows((1, 1, b"")))


async def sequences_of_a_stream(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator, block_count=number, block_size=1)
    size = limits.OPERATIONS_PER_STEP_MAX
    batches = [range(first, min(first + size, number + 1)) for first in range(1, number + 1, size)]
    for batch in batches:
        if batch is batches[-1]:
            last()
        await owner.step(grows=pb.GrowPhase(sequences=batch, token_counts=[1] * len(batch)))


async def namespace_of_a_step(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    last()
    await owner.step(grows=pb.GrowPhase(sequences=[1], token_counts=[1], namespaces=[name_of(number)]))


def name_of(size: int) -> str:
    """Returns a name of this many bytes, in fewer characters."""
    return "é" * (size // 2) + "x" * (size % 2)


# -- attach and report -------------------------------------------------------------------------------------------------


async def window(allocator: RunningAllocator, number: int) -> None:
    assert (await StreamOwner(allocator).attach(window=number)).HasField("report_required")


async def version(allocator: RunningAllocator, number: int) -> None:
    assert (await StreamOwner(allocator).attach(version=number)).HasField("report_required")


async def pool_name(allocator: RunningAllocator, number: int) -> None:
    await StreamOwner(allocator).attach(pool="p" * number)


async def reported_last_step(allocator: RunningAllocator, number: int) -> None:
    owner = StreamOwner(allocator)
    await owner.attach()
    last()
    assert (await owner.report(number)).next_step == number + 1


async def reported_last_sequence_id(allocator: RunningAllocator, number: int) -> None:
    owner = StreamOwner(allocator)
    await owner.attach()
    last()
    end = pb.ReportEnd(last_sequence_id=number)
    await open_with(owner, end)


def reported(number: int, **fields: Any) -> pb.ReportedSequence:
    """Returns a reported sequence of one token, in block `number - 1`."""
    table = pb.BlockTable(blocks=(number - 1).to_bytes(4, "little"))
    return pb.ReportedSequence(sequence_id=number, token_count=1, tables=[table], **fields)


async def report_chunks(allocator: RunningAllocator, *chunks: pb.ReportChunk, block_count: int = 8192) -> None:
    """Reports a pool in these chunks."""
    owner = StreamOwner(allocator)
    await owner.attach(spec=spec(block_count=block_count, block_size=1))
    last()
    for number, chunk in enumerate(chunks):
        chunk.number = number
        await owner.send(pb.SessionRequest(report_chunk=chunk))
        if not await taken_in(allocator, owner, number + 1):  # one more write would hide why the stream ended
            await owner.receive()
    end = pb.ReportEnd(chunk_count=len(chunks), last_sequence_id=8192)
    await open_with(owner, end)


async def open_with(owner: StreamOwner, end: pb.ReportEnd) -> None:
    """Ends a report, which may take so long that heartbeats come before its answer."""
    reply = await owner.exchange(pb.SessionRequest(report_end=end))
    while reply.HasField("heartbeat"):
        reply = await owner.receive()
    assert reply.HasField("ready")


async def taken_in(allocator: RunningAllocator, owner: StreamOwner, count: int) -> bool:
    """Waits until `count` chunks are staged; returns False if the stream ended instead."""
    while not any(
        machine._report and machine._report._chunk_count == count for machine in allocator.service.sessions.staging
    ):
        if owner.call.done():
            return False
        await allocator.stub.ListPools(pb.ListPoolsRequest())
    return True


async def chunk_of_bytes(allocator: RunningAllocator, number: int) -> None:
    chunk = pb.ReportChunk(namespaces=[""], sequences=[reported(1)])
    fill(chunk.namespaces, chunk.ByteSize, number)
    await report_chunks(allocator, chunk)


async def chunk_of_entries(allocator: RunningAllocator, number: int) -> None:
    await report_chunks(
        allocator, pb.ReportChunk(namespaces=[""], sequences=[reported(i) for i in range(1, number + 1)])
    )


async def report_of_bytes(allocator: RunningAllocator, number: int) -> None:
    first = pb.ReportChunk(namespaces=[""], sequences=[reported(1)])
    fill(first.namespaces, first.ByteSize, number // 2)
    second = pb.ReportChunk(number=1, namespaces=[""], sequences=[reported(2)])
    fill(second.namespaces, second.ByteSize, number - number // 2)
    await report_chunks(allocator, first, second)


async def reported_shared_entries(allocator: RunningAllocator, number: int) -> None:
    block_count = 16
    prefix = range((block_count + number) // 2)
    published = pb.ReportedPrefix(
        digests=b"".join(block.to_bytes(32, "little") for block in prefix), blocks=pack_uint32(prefix)
    )
    table, count = pb.BlockTable(blocks=published.blocks), len(prefix)
    sequences = [
        pb.ReportedSequence(sequence_id=i, token_count=count, committed_token_count=count, tables=[table])
        for i in (1, 2)
    ]
    chunk = pb.ReportChunk(namespaces=[""], sequences=sequences, prefixes=[published])
    if number % 2:
        chunk.sequences.append(reported(block_count))
    await report_chunks(allocator, chunk, block_count=block_count)


async def reported_sequences(allocator: RunningAllocator, number: int) -> None:
    half = number // 2
    await report_chunks(
        allocator,
        pb.ReportChunk(namespaces=[""], sequences=[reported(i) for i in range(1, half + 1)]),
        pb.ReportChunk(namespaces=[""], sequences=[reported(i) for i in range(half + 1, number + 1)]),
    )


async def namespace_of_a_report(allocator: RunningAllocator, number: int) -> None:
    await report_chunks(allocator, pb.ReportChunk(namespaces=[name_of(number)], sequences=[reported(1)]))


async def reports_at_a_time(allocator: RunningAllocator, number: int) -> None:
    chunk = pb.ReportChunk(namespaces=[""], sequences=[reported(1)])
    end = pb.ReportEnd(chunk_count=1, last_sequence_id=1)
    async with contextlib.AsyncExitStack() as connections:
        owners = []
        # each owner has its own connection, because one caller may have only half of the reports
        for place in range(number):
            owners.append(StreamOwner(await connections.enter_async_context(allocator.from_elsewhere(place))))
        for place, owner in enumerate(owners):
            await owner.attach(pool=f"p{place}")
            if owner is owners[-1]:
                last()
            with contextlib.suppress(Exception):
                await owner.send(pb.SessionRequest(report_chunk=chunk))
            while len(allocator.service.sessions.staging) <= place < limits.REPORTS_MAX:
                await allocator.stub.ListPools(pb.ListPoolsRequest())  # waits until the server has read the chunk
        for owner in reversed(owners):
            await open_with(owner, end)


async def streams(allocator: RunningAllocator, number: int) -> None:
    owners = []
    for place in range(number):
        if place == number - 1:
            last()
        owners.append(StreamOwner(allocator))
        await owners[-1].attach(pool=f"p{place}")
    for owner in owners:
        owner.call.cancel()


# -- specifications ----------------------------------------------------------------------------------------------------


async def open_pool(allocator: RunningAllocator, declared: pb.PoolSpec) -> None:
    last()
    await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="r", pool="a", spec=declared))


def one_group(kind: pb.GroupKind.ValueType, **fields: int) -> pb.PoolSpec:
    return pb.PoolSpec(block_count=9, groups=[pb.GroupSpec(kind=kind, block_size=4, **fields)])


async def blocks(allocator: RunningAllocator, number: int) -> None:
    await StreamOwner(allocator).attach(spec=spec(block_count=number))


async def block_size(allocator: RunningAllocator, number: int) -> None:
    await open_pool(allocator, spec(block_size=number))


async def features(allocator: RunningAllocator, number: int) -> None:
    declared = spec()
    declared.features.extend(["append-only"] * number)
    await open_pool(allocator, declared)


async def groups(allocator: RunningAllocator, number: int) -> None:
    await open_pool(allocator, spec(group_count=number))


async def window_tokens(allocator: RunningAllocator, number: int) -> None:
    await open_pool(allocator, one_group(pb.GROUP_KIND_SLIDING_WINDOW, window=number))


async def quotas(allocator: RunningAllocator, number: int) -> None:
    declared = spec()
    declared.quotas.extend(pb.Quota(namespace=str(i)) for i in range(number))
    await open_pool(allocator, declared)


async def namespace_of_a_quota(allocator: RunningAllocator, number: int) -> None:
    declared = spec()
    declared.quotas.add(namespace=name_of(number))
    await open_pool(allocator, declared)


async def layout(allocator: RunningAllocator, number: int) -> None:
    declared = spec()
    declared.cache_layout = name_of(number)
    await open_pool(allocator, declared)


async def fingerprint(allocator: RunningAllocator, number: int) -> None:
    declared = spec()
    declared.model_fingerprint = bytes(number)
    await open_pool(allocator, declared)


async def pools(allocator: RunningAllocator, number: int) -> None:
    for place in range(number):
        if place == number - 1:
            last()
        await UnaryOwner.open(allocator, f"p{place}", block_count=1)


async def blocks_of_all_pools(allocator: RunningAllocator, number: int) -> None:
    bystanders = sum(owner.spec.block_count for owner in allocator.service.directory.open_pools())
    left, place = number - bystanders, 0
    while left:
        part = min(left, limits.BLOCKS_MAX)
        left, place = left - part, place + 1
        if not left:
            last()
        await StreamOwner(allocator).attach(pool=f"p{place}", spec=spec(block_count=part))


# -- unary sessions, readers -------------------------------------------------------------------------------------------


async def allocation_with_an_answer_of_bytes(allocator: RunningAllocator, number: int) -> None:
    owner = await UnaryOwner.open(allocator, block_count=600_000, block_size=1)
    last()
    entries = (number - 57) // 4  # `step_reply_bytes_max` counts 4 bytes for each entry, and 57 more
    assert (await owner.allocate(sequence_id=1, token_count=entries)).result == pb.RESULT_OK
    await owner.close()


async def namespace_of_a_match(allocator: RunningAllocator, number: int) -> None:
    await allocator.stub.MatchPrefix(pb.MatchPrefixRequest(namespace=name_of(number)))


async def request_id_of_opening(allocator: RunningAllocator, number: int) -> None:
    last()
    await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="r" * number, pool="a", spec=spec()))


async def message_of_bytes(allocator: RunningAllocator, number: int) -> None:
    request = pb.MatchPrefixRequest()
    request.digests = bytes((number - 512) // 32 * 32)
    request.namespace = "x" * 128
    rest = number - request.ByteSize()
    length = rest - 4  # bytes of the field's value; its tag takes two more, and its length two
    unknown = b"\x9a\x06" + bytes([0x80 | length & 0x7F, length >> 7]) + bytes(length)
    request.MergeFromString(unknown)  # a field of a newer client, which the server ignores
    assert request.ByteSize() == number
    last()
    await allocator.stub.MatchPrefix(request)


async def watchers(allocator: RunningAllocator, number: int) -> None:
    await UnaryOwner.open(allocator)
    calls = [allocator.stub.WatchEvents(pb.WatchEventsRequest(pool="a")) for _ in range(number)]
    for call in calls:
        if call is calls[-1]:
            last()
        assert (await call.read()).HasField("cleared")
    for call in calls:
        call.cancel()
