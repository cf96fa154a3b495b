"""Tests what owners' streams may hold at an allocator together."""

from __future__ import annotations

import contextlib

import pytest
from quire._serving.caller_shares import CallerShares
from quire.errors import Reason
from quire.protocol.permissions import EVERYTHING, Permissions
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits, server
from quire_allocator.core.ownership.directory import BLOCKS_OF_CALLER_MAX

from tests.allocator.service.harness import EMPTY_REPORT, RunningAllocator, grows, refused, running_allocator, spec


async def open_stream(allocator: RunningAllocator, pool: str, block_count: int = 8) -> tuple[object, bytes]:
    stream = allocator.stub.Session()
    shape = pb.Attach(version=3, pool=pool, incarnation=b"1" * 16, epoch=1, window=2, spec=spec(block_count))
    await stream.write(pb.SessionRequest(attach=shape))
    assert (await stream.read()).HasField("report_required")
    await stream.write(EMPTY_REPORT)
    return stream, (await stream.read()).ready.session_id


async def test_callers_leave_streams_for_others() -> None:
    """Each connection is a caller here."""
    async with running_allocator(pools_max=64) as allocator, contextlib.AsyncExitStack() as connections:
        assert allocator.service.streams.places.count_max == limits.STREAMS_OF_ALL_MAX
        allocator.service.streams.places = CallerShares(4, 3)
        others = [await connections.enter_async_context(allocator.from_elsewhere(each)) for each in range(4)]
        held = [await open_stream(others[0], f"first-{each}") for each in range(3)]
        with refused(Reason.LIMIT, "at most 3 streams"):
            await open_stream(others[0], "first-3")
        held += [await open_stream(others[1], f"second-{each}") for each in range(3)]
        held += [await open_stream(others[2], "third-0")]
        with refused(Reason.LIMIT):
            await open_stream(others[2], "third-1")
        held += [await open_stream(others[3], "fourth-0")]
        assert len(held) == limits.STREAMS_OF_ALL_MAX // 128


async def test_a_stream_that_may_own_no_pool_gives_back_no_place() -> None:
    async with running_allocator() as allocator:
        allocator.service.authorize = lambda _context: Permissions()
        with refused(Reason.POOL_FORBIDDEN):
            await open_stream(allocator, "a")
        allocator.service.authorize = lambda _context: EVERYTHING
        held = await open_stream(allocator, "a")
        assert (allocator.service.streams.places.count, len(held)) == (1, 2)


async def test_a_reply_that_takes_too_many_bytes_ends_its_stream_and_its_owner_resumes() -> None:
    block_count = 50_000
    async with running_allocator() as allocator:
        assert allocator.service.streams.unread.each_max == limits.UNREAD_BYTES_MAX
        allocator.service.streams.unread = CallerShares(2 * 4 * block_count - 1)
        stream, session_id = await open_stream(allocator, "a", block_count)
        step = pb.Step(session_id=session_id, number=1, grows=grows((1, 4 * block_count, b"")))
        with refused(Reason.LIMIT, "bytes of replies unread"):
            await stream.write(pb.SessionRequest(step=step))
            await stream.read()
        assert not allocator.service.streams.unread.count

        allocator.service.streams.unread = CallerShares(4 << 20)
        stream = allocator.stub.Session()
        shape = pb.Attach(
            version=3, pool="a", incarnation=b"1" * 16, epoch=2, window=2, spec=spec(block_count),
            resume_session=session_id,
        )  # fmt: skip
        await stream.write(pb.SessionRequest(attach=shape))
        assert (await stream.read()).resumed.next_step == 2
        await stream.write(pb.SessionRequest(step=step))
        assert len((await stream.read()).step_reply.blocks) == block_count
        assert not allocator.service.streams.unread.count


MOST = {
    "--streams-per-caller": limits.STREAMS_OF_ALL_MAX // 2,
    "--blocks-per-caller": BLOCKS_OF_CALLER_MAX,
    "--memory-per-caller": 1 << 20,
}


@pytest.mark.parametrize("option", MOST)
def test_streams_and_blocks_of_a_caller_are_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for count in (1, MOST[option]):
        options = server.parse_arguments([option, str(count)])
        assert getattr(options, option[2:].replace("-", "_")) == count
    for wrong in ("0", str(MOST[option] + 1), "many"):
        with pytest.raises(SystemExit):
            server.parse_arguments([option, wrong])
        assert option in capsys.readouterr().err
