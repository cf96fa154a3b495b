"""The unary calls of AllocatorService over a real gRPC connection, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from grpc import aio
from quire.errors import RETRY_AFTER_S_MAX, Reason, from_rpc_error
from quire.protocol.steps import StepBuilder
from quire.session import Result
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits

from tests.allocator.service.harness import (
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    commits,
    d,
    refused,
    running_allocator,
    spec,
    tables_in,
)
from tests.allocator.service.one_by_one import Done


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


async def blocks_view(allocator: RunningAllocator, pool: str = "a", token: str = "") -> pb.GetPoolBlocksResponse:
    return await allocator.stub.GetPoolBlocks(pb.GetPoolBlocksRequest(pool=pool, page_token=token))


async def summary(allocator: RunningAllocator, pool: str = "a") -> pb.PoolSummary:
    return (await allocator.stub.GetPool(pb.GetPoolRequest(pool=pool))).summary


# -- sessions ----------------------------------------------------------------------------------------------------------


async def test_a_session_says_its_lease_and_the_limits(allocator: RunningAllocator) -> None:
    opened = await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="r", pool="a", spec=spec()))
    assert len(opened.session_id) == 16
    assert opened.lease_ms == 10_000
    assert opened.limits.step_bytes_max == limits.STEP_BYTES_MAX
    assert opened.limits.window_max == limits.WINDOW_MAX


async def test_opening_again_with_the_same_request_id_gives_the_same_session(allocator: RunningAllocator) -> None:
    request = pb.OpenSessionRequest(version=3, request_id="r", pool="a", spec=spec())
    first, second = await allocator.stub.OpenSession(request), await allocator.stub.OpenSession(request)
    assert first == second
    with refused(Reason.POOL_OWNED, "its lease ends in 10000 ms"):
        await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="other", pool="a", spec=spec()))


async def test_a_session_is_not_opened_without_a_request_id(allocator: RunningAllocator) -> None:
    with refused(Reason.MALFORMED, "request_id must have 1 to"):
        await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, pool="a", spec=spec()))


async def test_a_silent_session_expires_and_its_pool_can_be_taken(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    allocator.pass_time(9.9)
    assert (await summary(allocator)).lease_remaining_ms == pytest.approx(100, abs=1)
    allocator.pass_time(0.2)
    with refused(Reason.SESSION_UNKNOWN):
        await owner.renew()
    with refused(Reason.POOL_UNKNOWN):
        await summary(allocator)
    await UnaryOwner.open(allocator)


async def test_every_call_of_the_owner_renews_the_lease_and_reading_does_not(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    allocator.pass_time(9)
    assert await owner.renew() == pb.StepReply(session_id=owner.session_id, free_block_count=8)
    allocator.pass_time(9)
    await owner.allocate(sequence_id=1, token_count=1)
    allocator.pass_time(9)
    assert (await summary(allocator)).sequence_count == 1
    allocator.pass_time(1)
    with refused(Reason.SESSION_UNKNOWN):
        await owner.grow(sequence_id=1, token_count=2)


async def test_closing_a_session_drops_its_pool_and_may_be_repeated(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.close()
    await owner.close()
    with refused(Reason.SESSION_UNKNOWN):
        await owner.allocate(sequence_id=1, token_count=1)
    assert list((await allocator.stub.ListPools(pb.ListPoolsRequest())).pools) == []
    again = await UnaryOwner.open(allocator)
    assert again.session_id != owner.session_id


async def test_a_streams_session_takes_no_unary_call_not_even_closing(allocator: RunningAllocator) -> None:
    stream = await StreamOwner.ready(allocator)
    intruder = UnaryOwner(allocator, stream.session_id)
    for call in (partial(intruder.free, 1), intruder.renew, intruder.close):
        with refused(Reason.FENCED):
            await call()
    assert (await stream.step()).number == 1


async def test_the_number_of_pools_is_limited() -> None:
    async with running_allocator(pools_max=2) as allocator:
        await UnaryOwner.open(allocator, "a")
        await UnaryOwner.open(allocator, "b")
        with refused(Reason.LIMIT, "one caller may have at most 2 pools"):
            await UnaryOwner.open(allocator, "c")
        assert [owner.name for owner in allocator.service.directory.open_pools()] == ["a", "b"]


async def test_a_draining_allocator_opens_nothing_but_serves_what_is_open(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    allocator.service.drain()
    with refused(Reason.DRAINING):
        await UnaryOwner.open(allocator, "b")
    assert (await owner.allocate(sequence_id=1, token_count=1)).result == pb.RESULT_OK


# -- operations --------------------------------------------------------------------------------------------------------


async def test_a_sequence_lives_through_all_operations(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator, group_count=2, block_count=12)
    allocated = await owner.allocate(sequence_id=1, token_count=6, digests=d("a"))
    assert (allocated.result, allocated.matched_token_count) == (pb.RESULT_OK, 0)
    assert allocated.tables == ((0, 2), (1, 3))
    committed = await owner.commit(sequence_id=1, token_count=6, digests=d("a"))
    assert (committed.result, committed.swaps) == (pb.RESULT_OK, ())
    assert (await owner.fork(parent_id=1, child_id=2)).ok
    grown = await owner.grow(sequence_id=2, token_count=9)
    assert grown.tables == ((4, 6), (5, 7))
    assert grown.copies == ((2, 4), (3, 5))
    assert (await owner.free(sequence_id=1)).ok
    hit = await owner.allocate(sequence_id=3, token_count=5, digests=d("a"))
    assert hit.matched_token_count == 4
    twin = await owner.allocate(sequence_id=4, token_count=4, digests=d("a"))
    assert twin.tables == ((8,), (9,))
    swapped = await owner.commit(sequence_id=4, token_count=4, digests=d("a"))
    assert swapped.swaps == ((4, 0, 0, 0), (4, 1, 0, 1))


async def test_what_an_operation_cannot_do_is_a_result_and_no_error(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.allocate(sequence_id=1, token_count=24)
    steps: list[tuple[StepBuilder, Result]] = [
        (StepBuilder().allocate(2, 33), Result.TOO_LONG),
        (StepBuilder().allocate(2, 12), Result.NO_SPACE),
        (StepBuilder().grow(0, 1), Result.NOT_FOUND),
        (StepBuilder().grow(1, 33), Result.TOO_LONG),
        (StepBuilder().commit(2, 1), Result.NOT_FOUND),
        (StepBuilder().commit(1, 25), Result.TOO_LONG),
        (StepBuilder().fork(2, 3), Result.NOT_FOUND),
        (StepBuilder().fork(1, 1), Result.EXISTS),
        (StepBuilder().fork(1, 0), Result.ID_TOO_LOW),
        (StepBuilder().free(2), Result.NOT_FOUND),
    ]
    before = await blocks_view(allocator)
    for number, (step, result) in enumerate(steps):
        done = Done(await owner.step(step))
        assert done.result is result, number
        assert result is not Result.NO_SPACE or done.shortfall == 1
    seen = await blocks_view(allocator)
    assert (seen.block_states, seen.sequences) == (before.block_states, before.sequences)


async def test_a_commit_that_goes_back_is_refused_with_both_numbers(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.allocate(sequence_id=1, token_count=8)
    await owner.commit(sequence_id=1, token_count=6, digests=d("a"))
    with refused(Reason.MALFORMED, "commit of sequence 1: token_count 3 is below the 6 committed before"):
        await owner.commit(sequence_id=1, token_count=3)
    with refused(Reason.MALFORMED, "commit of sequence 1: 0 digests for 1 newly full blocks"):
        await owner.commit(sequence_id=1, token_count=8)
    assert (await owner.commit(sequence_id=1, token_count=9)).result == pb.RESULT_TOO_LONG


async def test_a_refused_call_renews_no_lease(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    lease_end = allocator.service.directory.pool("a").lease_end
    allocator.clock.now += 5.0
    with refused(Reason.MALFORMED):
        await owner.apply(owner.message(grows=pb.GrowPhase(digests=b"short")))
    with refused(Reason.STEP_GAP):
        await owner.apply(owner.message(7))
    assert allocator.service.directory.pool("a").lease_end == lease_end
    await owner.allocate(sequence_id=1, token_count=1)
    assert allocator.service.directory.pool("a").lease_end == lease_end + 5.0


async def test_a_defect_quarantines_the_one_pool_and_spares_the_others(allocator: RunningAllocator) -> None:
    broken, sound = await UnaryOwner.open(allocator, "a"), await UnaryOwner.open(allocator, "b")
    await broken.allocate(sequence_id=1, token_count=6)
    allocator.service.directory.pool("a").pool.blocks.cached_count += 1  # plants a defect: a wrong count
    with refused(Reason.POOL_QUARANTINED):
        await broken.grow(sequence_id=1, token_count=7)
    assert "a" not in allocator.service.counters._pools, "its counters go with it"
    with refused(Reason.SESSION_UNKNOWN):
        await broken.grow(sequence_id=1, token_count=7)
    assert (await sound.allocate(sequence_id=1, token_count=6)).result == pb.RESULT_OK
    again = await UnaryOwner.open(allocator, "a")
    assert (await again.allocate(sequence_id=1, token_count=6)).result == pb.RESULT_OK


async def test_a_pool_that_breaks_a_third_time_is_opened_again_only_ten_minutes_later(
    allocator: RunningAllocator,
) -> None:
    for _ in range(limits.QUARANTINES_MAX):
        broken = await UnaryOwner.open(allocator, "a")
        allocator.service.directory.pool("a").pool.blocks.cached_count += 1
        with refused(Reason.POOL_QUARANTINED):
            await broken.allocate(sequence_id=1, token_count=6)
    with pytest.raises(aio.AioRpcError) as caught:
        await UnaryOwner.open(allocator, "a")
    error = from_rpc_error(caught.value)
    assert (error.reason, error.retry_after_s) == (Reason.POOL_QUARANTINED, RETRY_AFTER_S_MAX)
    assert allocator.service.counters.refused_pool_count() == 1
    allocator.pass_time(limits.QUARANTINE_WINDOW_S)
    assert allocator.service.counters.refused_pool_count() == 0
    await UnaryOwner.open(allocator, "a")


# -- malformed input ---------------------------------------------------------------------------------------------------


def one_grow(sequence_id: int = 2, token_count: int = 1, **columns: Any) -> dict[str, Any]:
    sequences, token_counts = [sequence_id], [token_count]
    return {"grows": pb.GrowPhase(sequences=sequences, token_counts=token_counts, **columns)}


MALFORMED: list[tuple[dict[str, Any], str]] = [
    (one_grow(token_count=0), "grows.token_counts"),
    (one_grow(digest_counts=[1], digests=b"x" * 33), "digests"),
    (one_grow(digest_counts=[2], digests=b"x" * 32), "grows.digest_counts"),
    (one_grow(namespaces=["n" * 129]), "namespace"),
    (one_grow(namespaces=["é" * 65]), "namespace"),
    (one_grow(namespaces=["n"], namespace_indices=[1]), "grows.namespace_indices"),
    (one_grow(priorities=b"123"), "grows.priorities"),
    (one_grow(priorities=[1, 2]), "grows.priorities"),
    (one_grow(priorities=[11]), "grows.priorities"),
    (one_grow(priorities=[-11]), "grows.priorities"),
    ({"grows": pb.GrowPhase(sequences=[2])}, "grows.token_counts"),
    ({"commits": commits((1, 6, b"x" * 31))}, "digests"),
    ({"commits": commits((1, 8, b""))}, "commits.digest_counts"),
    ({"commits": commits((1, 7, d("a")))}, "commits.digest_counts"),
    ({"commits": commits((1, 3, b""))}, "commits.token_counts"),
    ({"commits": commits((1, 5, b""), (1, 6, b""))}, "commits.sequences"),
    ({"forks": pb.ForkPhase(parents=[1])}, "forks.children"),
    ({"ack": 3}, "ack"),
    ({"number": 0, "frees": pb.FreePhase(sequences=[1])}, "number"),
]


@pytest.mark.parametrize(("fields", "field"), MALFORMED, ids=range(len(MALFORMED)))
async def test_a_malformed_step_changes_nothing_and_its_number_may_be_used_again(
    allocator: RunningAllocator, fields: dict[str, Any], field: str
) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.allocate(sequence_id=1, token_count=8)
    await owner.commit(sequence_id=1, token_count=4, digests=d("a"))
    before = await blocks_view(allocator)
    with refused(Reason.MALFORMED) as caught:
        await owner.apply(owner.message(**fields))
    assert from_rpc_error(caught.value).field == field
    assert await blocks_view(allocator) == before
    assert (await owner.commit(sequence_id=1, token_count=8, digests=d("ab")[32:])).ok


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129, "a\n"])
async def test_a_name_that_no_pool_may_have_is_refused(allocator: RunningAllocator, name: str) -> None:
    with refused(Reason.MALFORMED):
        await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="r", pool=name, spec=spec()))
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
    await owner.allocate(sequence_id=1, token_count=8)
    await owner.commit(sequence_id=1, token_count=8, digests=d("ab"))
    await owner.free(sequence_id=1)
    await owner.allocate(sequence_id=2, token_count=6, digests=d("a"))
    await owner.commit(sequence_id=2, token_count=6)
    await owner.fork(parent_id=2, child_id=3)
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
    await owner.allocate(sequence_id=3, token_count=6, namespace="blue")
    await owner.commit(sequence_id=3, token_count=5, digests=d("a"))
    await owner.fork(parent_id=3, child_id=7)
    seen = await blocks_view(allocator)
    assert seen.block_states == bytes([3, 3, 0, 0, 0, 0, 0, 0])
    assert seen.next_page_token == ""
    parent, child = seen.sequences
    assert (parent.sequence_id, parent.namespace, parent.token_count, parent.committed_token_count) == (3, "blue", 6, 5)
    assert (child.sequence_id, child.token_count) == (7, 5)
    assert tables_in(parent.tables) == tables_in(child.tables) == [[0, 1]]
    brief = await allocator.stub.GetPool(pb.GetPoolRequest(pool="a"))
    assert brief.summary == seen.summary


async def test_many_sequences_are_read_page_by_page(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEQUENCE_BYTES_PER_ANSWER_MAX", 30)
    owner = await UnaryOwner.open(allocator)
    for sequence_id in range(1, 9):
        await owner.allocate(sequence_id=sequence_id, token_count=1)
    read: list[int] = []
    pages, token = 0, ""
    while token or not pages:
        page = await blocks_view(allocator, token=token)
        read += [sequence.sequence_id for sequence in page.sequences]
        pages, token = pages + 1, page.next_page_token
    assert read == list(range(1, 9))
    assert 2 <= pages <= 8


async def test_a_prefix_is_matched_over_all_pools_longest_first(allocator: RunningAllocator) -> None:
    for pool, letters in (("a", "ab"), ("b", "abc"), ("c", "ab"), ("d", "x")):
        owner = await UnaryOwner.open(allocator, pool)
        await owner.allocate(sequence_id=1, token_count=4 * len(letters))
        await owner.commit(sequence_id=1, token_count=4 * len(letters), digests=d(letters))
    found = (await allocator.stub.MatchPrefix(pb.MatchPrefixRequest(digests=d("abcd")))).matches
    assert [(match.pool, match.matched_token_count) for match in found] == [("b", 12), ("a", 8), ("c", 8)]
    other = pb.MatchPrefixRequest(digests=d("abcd"), namespace="blue")
    assert list((await allocator.stub.MatchPrefix(other)).matches) == []
    with refused(Reason.MALFORMED):
        await allocator.stub.MatchPrefix(pb.MatchPrefixRequest(digests=b"short"))


async def test_calls_are_counted_by_method_and_code(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.allocate(sequence_id=1, token_count=1)
    with refused(Reason.MALFORMED):
        await owner.allocate(sequence_id=2, token_count=0)
    rpcs = allocator.service.counters.rpcs
    assert rpcs["Apply", "OK"] == 1
    assert rpcs["Apply", "INVALID_ARGUMENT"] == 1
    assert dict(allocator.service.counters.of("a").operations) == {("grow", pb.RESULT_OK): 1}
