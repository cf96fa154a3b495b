"""The unary calls of AllocatorService over a real gRPC connection, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio
from quire.errors import RETRY_AFTER_S_MAX, Reason, from_rpc_error
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits

from tests.allocator.service.harness import (
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    d,
    refused,
    running_allocator,
    spec,
    tables_in,
)


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


async def blocks_view(allocator: RunningAllocator, pool: str = "a", after: int = 0) -> pb.GetPoolResponse:
    return await allocator.stub.GetPool(pb.GetPoolRequest(pool=pool, view=pb.POOL_VIEW_BLOCKS, after_sequence_id=after))


async def summary(allocator: RunningAllocator, pool: str = "a") -> pb.PoolSummary:
    return (await allocator.stub.GetPool(pb.GetPoolRequest(pool=pool))).summary


# -- sessions ----------------------------------------------------------------------------------------------------------


async def test_a_session_says_its_lease_and_the_limits(allocator: RunningAllocator) -> None:
    opened = await allocator.stub.OpenSession(pb.OpenSessionRequest(version=2, request_id="r", pool="a", spec=spec()))
    assert len(opened.session_id) == 16
    assert opened.lease_ms == 10_000
    assert opened.limits.step_bytes_max == limits.STEP_BYTES_MAX
    assert opened.limits.window_max == limits.WINDOW_MAX


async def test_opening_again_with_the_same_request_id_gives_the_same_session(allocator: RunningAllocator) -> None:
    request = pb.OpenSessionRequest(version=2, request_id="r", pool="a", spec=spec())
    first, second = await allocator.stub.OpenSession(request), await allocator.stub.OpenSession(request)
    assert first == second
    with refused(Reason.POOL_OWNED, "10000 ms longer"):
        await allocator.stub.OpenSession(pb.OpenSessionRequest(version=2, request_id="other", pool="a", spec=spec()))


async def test_a_silent_session_expires_and_its_pool_can_be_taken(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    allocator.pass_time(9.9)
    assert (await summary(allocator)).lease_remaining_ms == pytest.approx(100, abs=1)
    allocator.pass_time(0.2)
    with refused(Reason.SESSION_UNKNOWN):
        await owner.call("KeepAlive")
    with refused(Reason.POOL_UNKNOWN):
        await summary(allocator)
    await UnaryOwner.open(allocator)


async def test_every_call_of_the_owner_renews_the_lease_and_reading_does_not(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    allocator.pass_time(9)
    assert (await owner.call("KeepAlive")).lease_ms == 10_000
    allocator.pass_time(9)
    await owner.call("Allocate", sequence_id=1, token_count=1)
    allocator.pass_time(9)
    assert (await summary(allocator)).sequence_count == 1
    allocator.pass_time(1)
    with refused(Reason.SESSION_UNKNOWN):
        await owner.call("Grow", sequence_id=1, token_count=2)


async def test_closing_a_session_drops_its_pool_and_may_be_repeated(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("CloseSession")
    await owner.call("CloseSession")
    with refused(Reason.SESSION_UNKNOWN):
        await owner.call("Allocate", sequence_id=1, token_count=1)
    assert list((await allocator.stub.ListPools(pb.ListPoolsRequest())).pools) == []
    again = await UnaryOwner.open(allocator)
    assert again.session_id != owner.session_id


async def test_a_streams_session_takes_no_unary_call_not_even_closing(allocator: RunningAllocator) -> None:
    stream = await StreamOwner.ready(allocator)
    intruder = UnaryOwner(allocator, stream.session_id)
    for method, fields in (("Free", {"sequence_id": 1}), ("KeepAlive", {}), ("CloseSession", {})):
        with refused(Reason.FENCED):
            await intruder.call(method, **fields)
    assert (await stream.step()).number == 1


async def test_the_number_of_pools_is_limited() -> None:
    async with running_allocator(pools_max=2) as allocator:
        await UnaryOwner.open(allocator, "a")
        await UnaryOwner.open(allocator, "b")
        with refused(Reason.LIMIT, "one caller has at most 2 pools"):
            await UnaryOwner.open(allocator, "c")
        assert [owner.name for owner in allocator.service.directory.open_pools()] == ["a", "b"]


async def test_a_draining_allocator_opens_nothing_but_serves_what_is_open(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    allocator.service.drain()
    with refused(Reason.DRAINING):
        await UnaryOwner.open(allocator, "b")
    assert (await owner.call("Allocate", sequence_id=1, token_count=1)).result == pb.RESULT_OK


# -- operations --------------------------------------------------------------------------------------------------------


async def test_a_sequence_lives_through_all_operations(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator, group_count=2, block_count=12)
    allocated = await owner.call("Allocate", sequence_id=1, token_count=6, digests=d("a"))
    assert (allocated.result, allocated.matched_token_count) == (pb.RESULT_OK, 0)
    assert tables_in(allocated.tables) == [[0, 2], [1, 3]]
    committed = await owner.call("Commit", sequence_id=1, token_count=6, digests=d("a"))
    assert committed == pb.CommitResponse()
    assert await owner.call("Fork", parent_id=1, child_id=2) == pb.ForkResponse()
    grown = await owner.call("Grow", sequence_id=2, token_count=9)
    assert tables_in(grown.tables) == [[4, 6], [5, 7]]
    assert (list(grown.copy_sources), list(grown.copy_destinations)) == ([2, 3], [4, 5])
    assert await owner.call("Free", sequence_id=1) == pb.FreeResponse()
    hit = await owner.call("Allocate", sequence_id=3, token_count=5, digests=d("a"))
    assert hit.matched_token_count == 4
    twin = await owner.call("Allocate", sequence_id=4, token_count=4, digests=d("a"))
    assert tables_in(twin.tables) == [[8], [9]]
    swapped = await owner.call("Commit", sequence_id=4, token_count=4, digests=d("a"))
    assert list(zip(swapped.swap_groups, swapped.swap_indices, swapped.swap_blocks, strict=True)) == [
        (0, 0, 0),
        (1, 0, 1),
    ]


async def test_what_an_operation_cannot_do_is_a_result_and_no_error(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", sequence_id=1, token_count=24)
    calls: list[tuple[str, dict[str, int], int, int]] = [
        ("Allocate", {"sequence_id": 1, "token_count": 1}, pb.RESULT_EXISTS, 0),
        ("Allocate", {"sequence_id": 2, "token_count": 33}, pb.RESULT_TOO_LONG, 0),
        ("Allocate", {"sequence_id": 2, "token_count": 12}, pb.RESULT_NO_SPACE, 1),
        ("Grow", {"sequence_id": 2, "token_count": 1}, pb.RESULT_NOT_FOUND, 0),
        ("Grow", {"sequence_id": 1, "token_count": 33}, pb.RESULT_TOO_LONG, 0),
        ("Commit", {"sequence_id": 2, "token_count": 1}, pb.RESULT_NOT_FOUND, 0),
        ("Commit", {"sequence_id": 1, "token_count": 25}, pb.RESULT_TOO_LONG, 0),
        ("Fork", {"parent_id": 2, "child_id": 3}, pb.RESULT_NOT_FOUND, 0),
        ("Allocate", {"sequence_id": 0, "token_count": 1}, pb.RESULT_ID_TOO_LOW, 0),
        ("Fork", {"parent_id": 1, "child_id": 1}, pb.RESULT_EXISTS, 0),
        ("Fork", {"parent_id": 1, "child_id": 0}, pb.RESULT_ID_TOO_LOW, 0),
        ("Free", {"sequence_id": 2}, pb.RESULT_NOT_FOUND, 0),
    ]
    before = await blocks_view(allocator)
    for method, fields, result, shortfall in calls:
        answer = await owner.call(method, **fields)
        assert answer.result == result, method
        assert getattr(answer, "shortfall", 0) == shortfall, method
    assert await blocks_view(allocator) == before


async def test_the_number_of_live_sequences_is_limited(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEQUENCES_MAX", 2)
    owner = await UnaryOwner.open(allocator)
    for sequence_id in (1, 2):
        await owner.call("Allocate", sequence_id=sequence_id, token_count=1)
    with refused(Reason.LIMIT):
        await owner.call("Allocate", sequence_id=3, token_count=1)
    with refused(Reason.LIMIT):
        await owner.call("Fork", parent_id=1, child_id=3)
    await owner.call("Free", sequence_id=1)
    assert (await owner.call("Fork", parent_id=2, child_id=3)).result == pb.RESULT_OK


async def test_a_commit_that_goes_back_is_refused_with_both_numbers(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", sequence_id=1, token_count=8)
    await owner.call("Commit", sequence_id=1, token_count=6, digests=d("a"))
    with refused(Reason.MALFORMED, "commit of sequence 1: token_count 3 is below the 6 committed before"):
        await owner.call("Commit", sequence_id=1, token_count=3)
    with refused(Reason.MALFORMED, "commit of sequence 1: 0 digests for 1 full blocks"):
        await owner.call("Commit", sequence_id=1, token_count=8)
    assert (await owner.call("Commit", sequence_id=1, token_count=9)).result == pb.RESULT_TOO_LONG


async def test_a_refused_call_renews_no_lease(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    lease_end = allocator.service.directory.pool("a").lease_end
    allocator.clock.now += 5.0
    with refused(Reason.MALFORMED):
        await owner.call("Allocate", sequence_id=1, token_count=1, digests=b"short")
    with refused(Reason.MALFORMED):
        await owner.call("Allocate", sequence_id=1, token_count=1, request_id="r" * 100)
    assert allocator.service.directory.pool("a").lease_end == lease_end
    await owner.call("Allocate", sequence_id=1, token_count=1)
    assert allocator.service.directory.pool("a").lease_end == lease_end + 5.0


async def test_a_defect_quarantines_the_one_pool_and_spares_the_others(allocator: RunningAllocator) -> None:
    broken, sound = await UnaryOwner.open(allocator, "a"), await UnaryOwner.open(allocator, "b")
    await broken.call("Allocate", sequence_id=1, token_count=6)
    allocator.service.directory.pool("a").pool.blocks.cached_count += 1  # the defect
    with refused(Reason.POOL_QUARANTINED):
        await broken.call("Grow", sequence_id=1, token_count=7)
    assert "a" not in allocator.service.counters._pools, "its counters go with it"
    with refused(Reason.SESSION_UNKNOWN):
        await broken.call("Grow", sequence_id=1, token_count=7)
    assert (await sound.call("Allocate", sequence_id=1, token_count=6)).result == pb.RESULT_OK
    again = await UnaryOwner.open(allocator, "a")
    assert (await again.call("Allocate", sequence_id=1, token_count=6)).result == pb.RESULT_OK


async def test_a_pool_that_breaks_a_third_time_is_opened_again_only_ten_minutes_later(
    allocator: RunningAllocator,
) -> None:
    for _ in range(limits.QUARANTINES_MAX):
        broken = await UnaryOwner.open(allocator, "a")
        allocator.service.directory.pool("a").pool.blocks.cached_count += 1
        with refused(Reason.POOL_QUARANTINED):
            await broken.call("Allocate", sequence_id=1, token_count=6)
    with pytest.raises(aio.AioRpcError) as caught:
        await UnaryOwner.open(allocator, "a")
    error = from_rpc_error(caught.value)
    assert (error.reason, error.retry_after_s) == (Reason.POOL_QUARANTINED, RETRY_AFTER_S_MAX)
    assert allocator.service.counters.refused_pool_count() == 1
    allocator.pass_time(limits.QUARANTINE_WINDOW_S)
    assert allocator.service.counters.refused_pool_count() == 0
    await UnaryOwner.open(allocator, "a")


# -- malformed input ---------------------------------------------------------------------------------------------------

MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("Allocate", {"sequence_id": 2}),
    ("Allocate", {"sequence_id": 2, "token_count": 1, "digests": b"x" * 33}),
    ("Allocate", {"sequence_id": 2, "token_count": 1, "namespace": "n" * 129}),
    ("Allocate", {"sequence_id": 2, "token_count": 1, "namespace": "é" * 65}),
    ("Allocate", {"sequence_id": 2, "token_count": 1, "request_id": ""}),
    ("Allocate", {"sequence_id": 2, "token_count": 1, "request_id": "r" * 65}),
    ("Grow", {"sequence_id": 1}),
    ("Commit", {"sequence_id": 1, "token_count": 6, "digests": b"x" * 31}),
    ("Commit", {"sequence_id": 1, "token_count": 8}),
    ("Commit", {"sequence_id": 1, "token_count": 7, "digests": d("a")}),
    ("Commit", {"sequence_id": 1, "token_count": 3}),
    ("Free", {"sequence_id": 1, "request_id": ""}),
    ("Fork", {"parent_id": 1, "child_id": 2, "request_id": "r" * 65}),
]


@pytest.mark.parametrize(("method", "fields"), MALFORMED, ids=range(len(MALFORMED)))
async def test_a_malformed_operation_changes_nothing(
    allocator: RunningAllocator, method: str, fields: dict[str, Any]
) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", sequence_id=1, token_count=8)
    await owner.call("Commit", sequence_id=1, token_count=4, digests=d("a"))
    before = await blocks_view(allocator)
    with refused(Reason.MALFORMED):
        await owner.call(method, **fields)
    assert await blocks_view(allocator) == before


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129, "a\n"])
async def test_a_name_that_no_pool_may_have_is_refused(allocator: RunningAllocator, name: str) -> None:
    with refused(Reason.MALFORMED):
        await allocator.stub.OpenSession(pb.OpenSessionRequest(version=2, request_id="r", pool=name, spec=spec()))
    with refused(Reason.MALFORMED):
        await summary(allocator, name)
    assert list(allocator.service.directory.open_pools()) == []


async def test_a_repeated_opening_with_another_specification_is_refused(allocator: RunningAllocator) -> None:
    await UnaryOwner.open(allocator)
    with refused(Reason.LAYOUT):
        await UnaryOwner.open(allocator, block_count=9)
    assert (await summary(allocator)).spec.block_count == 8


# -- reading -----------------------------------------------------------------------------------------------------------


async def test_pools_are_listed_by_name_with_counts_that_add_up(allocator: RunningAllocator) -> None:
    stream = await StreamOwner.ready(allocator, "b")
    owner = await UnaryOwner.open(allocator, "a")
    await owner.call("Allocate", sequence_id=1, token_count=8)
    await owner.call("Commit", sequence_id=1, token_count=8, digests=d("ab"))
    await owner.call("Free", sequence_id=1)
    await owner.call("Allocate", sequence_id=2, token_count=6, digests=d("a"))
    await owner.call("Commit", sequence_id=2, token_count=6)
    await owner.call("Fork", parent_id=2, child_id=3)
    first, second = (await allocator.stub.ListPools(pb.ListPoolsRequest())).pools
    assert [first.pool, second.pool] == ["a", "b"]
    assert [first.session_kind, second.session_kind] == [pb.SESSION_KIND_UNARY, pb.SESSION_KIND_STREAM]
    assert first.spec == spec()
    assert (first.empty_block_count, first.cached_block_count, first.held_block_count) == (5, 1, 2)
    assert (first.sequence_count, first.table_entry_count) == (2, 4)
    assert second.connected
    await stream.hang_up()
    assert not (await summary(allocator, "b")).connected


async def test_the_blocks_view_shows_states_and_sequences_and_the_summary_alone_does_not(
    allocator: RunningAllocator,
) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", sequence_id=3, token_count=6, namespace="blue")
    await owner.call("Commit", sequence_id=3, token_count=5, digests=d("a"))
    await owner.call("Fork", parent_id=3, child_id=7)
    seen = await blocks_view(allocator)
    assert seen.block_states == bytes([3, 3, 0, 0, 0, 0, 0, 0])
    assert not seen.truncated
    parent, child = seen.sequences
    assert (parent.sequence_id, parent.namespace, parent.token_count, parent.committed_token_count) == (3, "blue", 6, 5)
    assert (child.sequence_id, child.token_count) == (7, 5)
    assert tables_in(parent.tables) == tables_in(child.tables) == [[0, 1]]
    brief = await allocator.stub.GetPool(pb.GetPoolRequest(pool="a"))
    assert (brief.summary, brief.block_states, list(brief.sequences)) == (seen.summary, b"", [])


async def test_many_sequences_are_read_page_by_page(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEQUENCE_BYTES_PER_ANSWER_MAX", 30)
    owner = await UnaryOwner.open(allocator)
    for sequence_id in range(1, 9):
        await owner.call("Allocate", sequence_id=sequence_id, token_count=1)
    read: list[int] = []
    pages = 0
    while True:
        page = await blocks_view(allocator, after=read[-1] if read else 0)
        read += [sequence.sequence_id for sequence in page.sequences]
        pages += 1
        if not page.truncated:
            break
    assert read == list(range(1, 9))
    assert 2 <= pages <= 8


async def test_a_prefix_is_matched_over_all_pools_longest_first(allocator: RunningAllocator) -> None:
    for pool, letters in (("a", "ab"), ("b", "abc"), ("c", "ab"), ("d", "x")):
        owner = await UnaryOwner.open(allocator, pool)
        await owner.call("Allocate", sequence_id=1, token_count=4 * len(letters))
        await owner.call("Commit", sequence_id=1, token_count=4 * len(letters), digests=d(letters))
    found = (await allocator.stub.MatchPrefix(pb.MatchPrefixRequest(digests=d("abcd")))).matches
    assert [(match.pool, match.matched_token_count) for match in found] == [("b", 12), ("a", 8), ("c", 8)]
    other = pb.MatchPrefixRequest(digests=d("abcd"), namespace="blue")
    assert list((await allocator.stub.MatchPrefix(other)).matches) == []
    with refused(Reason.MALFORMED):
        await allocator.stub.MatchPrefix(pb.MatchPrefixRequest(digests=b"short"))


async def test_calls_are_counted_by_method_and_code(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", sequence_id=1, token_count=1)
    with refused(Reason.MALFORMED):
        await owner.call("Allocate", sequence_id=2)
    rpcs = allocator.service.counters.rpcs
    assert rpcs["Allocate", "OK"] == 1
    assert rpcs["Allocate", "INVALID_ARGUMENT"] == 1
    assert dict(allocator.service.counters.of("a").operations) == {("grow", pb.RESULT_OK): 1}
