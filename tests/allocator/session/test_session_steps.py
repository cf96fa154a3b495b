"""Steps over a real gRPC stream: phases, results, replay, refusals, quarantine; equal to the unary calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
from quire.errors import Reason
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.metrics.collector import AllocatorCollector
from quire_allocator.session.stream import SessionStream

from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.service.harness import (
    EMPTY_REPORT,
    RunningAllocator,
    StreamOwner,
    commits,
    d,
    grows,
    refused,
    running_allocator,
    spec,
    state,
)


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


async def test_phases_are_applied_in_the_order_commit_free_fork_grow(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator, block_count=4)
    first = await owner.step(grows=grows((1, 8, b""), (2, 8, b"")))
    assert (list(first.blocks), list(first.block_counts)) == ([0, 1, 2, 3], [2, 2])
    assert first.free_block_count == 0
    reply = await owner.step(
        commits=commits((1, 6, d("a"))),  # the commit publishes this block before the new sequence looks it up
        frees=pb.FreePhase(sequences=[2]),  # the free empties the blocks that the grows take
        forks=pb.ForkPhase(parents=[1], children=[3]),  # the fork shares this block and the half-filled one
        grows=grows((3, 7, b""), (4, 5, d("a"))),
    )
    assert [list(results) for results in (reply.commit_results, reply.fork_results, reply.grow_results)] == [[]] * 3
    assert reply.copies == pb.Copies(sources=[1], destinations=[2])
    assert list(reply.matched_token_counts) == [0, 4]
    assert (list(reply.blocks), list(reply.block_counts)) == ([2, 0, 3], [1, 2])
    assert reply.free_block_count == 0


async def test_results_that_are_not_all_ok_are_listed_per_operation(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 24, b"")))
    reply = await owner.step(
        commits=commits((9, 1, b""), (1, 25, b"")),
        frees=pb.FreePhase(sequences=[9]),
        forks=pb.ForkPhase(parents=[9, 1, 1, 1], children=[2, 2, 1, 0]),
        grows=grows((5, 12, b""), (6, 33, b""), (1, 25, b"")),
    )
    assert list(reply.commit_results) == [pb.RESULT_NOT_FOUND, pb.RESULT_TOO_LONG]
    assert list(reply.free_results) == [pb.RESULT_NOT_FOUND]
    assert list(reply.fork_results) == [pb.RESULT_NOT_FOUND, pb.RESULT_OK, pb.RESULT_EXISTS, pb.RESULT_ID_TOO_LOW]
    assert list(reply.grow_results) == [pb.RESULT_NO_SPACE, pb.RESULT_TOO_LONG, pb.RESULT_OK]
    assert list(reply.refusals.shortfalls) == [1, 0, 0]
    assert (list(reply.granted_grows), list(reply.block_counts)) == ([2], [1])
    assert (reply.refusals.victim_sequences, reply.refusals.victim_token_counts) == ([2, 0, 0], [])


async def test_swaps_name_their_commit_group_position_and_block(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator, group_count=2)
    await owner.step(grows=grows((1, 4, b""), (2, 4, b"")))
    reply = await owner.step(commits=commits((1, 4, d("a")), (2, 4, d("a"))))
    told = reply.swaps
    swaps = zip(told.commits, told.groups, told.indices, told.blocks, strict=True)
    assert list(swaps) == [(1, 0, 0, 0), (1, 1, 0, 1)]


async def test_namespaces_are_named_once_per_step(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator, block_count=16)
    phase = grows((1, 4, b""), (2, 4, b""))
    phase.namespaces.extend(["red", "blue"])
    phase.namespace_indices.extend([0, 1])
    await owner.step(grows=phase)
    await owner.step(commits=commits((2, 4, d("a"))))
    hits = grows((3, 5, d("a")), (4, 5, d("a")))
    hits.namespaces.extend(["red", "blue"])
    hits.namespace_indices.extend([1, 0])
    assert list((await owner.step(grows=hits)).matched_token_counts) == [4, 0]


async def test_a_repeated_step_gets_the_same_reply_and_changes_nothing(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    phases = {"grows": grows((1, 6, b""))}
    first = await owner.step(**phases)
    before = await state(allocator)
    assert await owner.step_as(1, **phases) == first
    assert await state(allocator) == before


async def test_a_repeated_number_with_other_content_is_a_mismatch(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 6, b"")))
    before = await state(allocator)
    with refused(Reason.STEP_MISMATCH):
        await owner.step_as(1, grows=grows((1, 7, b"")))
    assert await state(allocator) == before


@pytest.mark.parametrize("number", [1, 2, 5, 7])
async def test_a_number_that_is_neither_next_nor_kept_is_a_gap(allocator: RunningAllocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    for ack in (0, 1, 2):
        await owner.step(ack=ack)
    before = await state(allocator)
    with refused(Reason.STEP_GAP):
        await owner.step_as(number)
    assert await state(allocator) == before


async def test_replies_are_kept_for_as_many_steps_as_the_window(allocator: RunningAllocator) -> None:
    owner = StreamOwner(allocator)
    await owner.attach(window=2)
    await owner.report()
    for _ in range(3):
        await owner.step()
    assert (await owner.step_as(2)).number == 2
    with refused(Reason.STEP_GAP):
        await owner.step_as(1)


async def test_a_step_of_another_session_is_refused(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    with refused(Reason.SESSION_UNKNOWN):
        await owner.step_as(1, session_id=bytes(16), grows=grows((1, 6, b"")))
    assert (await state(allocator))[1] == []


MALFORMED_STEPS: list[dict[str, Any]] = [
    {"commits": pb.CommitPhase(sequences=[1])},
    {"commits": pb.CommitPhase(token_counts=[1])},
    {"commits": commits((1, 6, b""), (1, 6, b""))},
    {"commits": commits((1, 3, b""))},
    {"commits": commits((1, 8, b""))},
    {"commits": commits((1, 5, d("a")))},
    {"commits": pb.CommitPhase(sequences=[1], token_counts=[8], digest_counts=[1])},
    {"commits": pb.CommitPhase(sequences=[1], token_counts=[8], digest_counts=[1], digests=b"short")},
    {"commits": pb.CommitPhase(sequences=[1], token_counts=[8], digests=d("a"))},
    {"commits": pb.CommitPhase(sequences=[1], token_counts=[8], digest_counts=[1, 0], digests=d("a"))},
    {"forks": pb.ForkPhase(parents=[1])},
    {"forks": pb.ForkPhase(children=[2])},
    {"grows": pb.GrowPhase(sequences=[2])},
    {"grows": pb.GrowPhase(sequences=[2], token_counts=[0])},
    {"grows": pb.GrowPhase(sequences=[2], token_counts=[1, 2])},
    {"grows": pb.GrowPhase(sequences=[2], token_counts=[1], namespace_indices=[1])},
    {
        "grows": pb.GrowPhase(
            sequences=[2],
            token_counts=[1],
            namespaces=["a"],
            namespace_indices=[0, 0],
        )
    },
    {"grows": pb.GrowPhase(sequences=[2], token_counts=[1], namespaces=["é" * 65])},
    {"grows": pb.GrowPhase(sequences=[2], token_counts=[1], digest_counts=[2], digests=d("a"))},
    {"ack": 3},
    {"ack": 99},
]


@pytest.mark.parametrize("phases", MALFORMED_STEPS, ids=range(len(MALFORMED_STEPS)))
async def test_a_malformed_step_is_refused_whole_and_its_number_is_not_consumed(
    allocator: RunningAllocator, phases: dict[str, Any]
) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 8, b"")))
    await owner.step(commits=commits((1, 4, d("x"))))
    before = await state(allocator)
    with refused(Reason.MALFORMED):
        await owner.step(frees=pb.FreePhase(sequences=[1]), **phases)
    assert await state(allocator) == before
    again = StreamOwner(allocator)
    assert (await again.attach(epoch=2, resume_session=owner.session_id)).resumed.next_step == 3


async def test_a_message_that_is_not_expected_ends_an_open_session(allocator: RunningAllocator) -> None:
    for message in (EMPTY_REPORT, pb.SessionRequest(), pb.SessionRequest(attach=pb.Attach())):
        owner = await StreamOwner.ready(allocator)
        with refused(Reason.MALFORMED):
            await owner.exchange(message)
        allocator.pass_time(10)


async def test_steps_are_limited_in_bytes_and_operations(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator, "a")
    with refused(Reason.TOO_LARGE):
        await owner.step(grows=pb.GrowPhase(digests=bytes(limits.STEP_BYTES_MAX)))
    owner = await StreamOwner.ready(allocator, "b")
    with refused(Reason.TOO_LARGE, "operations"):
        await owner.step(frees=pb.FreePhase(sequences=[1] * (limits.OPERATIONS_PER_STEP_MAX + 1)))
    assert [each.steps.next_step for each in allocator.service.directory.open_pools()] == [1, 1]


async def test_a_large_step_counts_with_its_reply_until_it_is_acknowledged(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator, block_count=400)
    phase = grows((1, 1_300, bytes(range(256)) * 40))
    reply = await owner.step(grows=phase)
    shares = allocator.service.sessions.kept_bytes.shares
    assert phase.ByteSize() + reply.ByteSize() < shares.count < phase.ByteSize() + reply.ByteSize() + 100
    await owner.step(ack=1)
    assert shares.count == 0


@pytest.mark.skipif(IS_COMPILED, reason="constants of extension modules cannot be replaced")
async def test_children_count_as_live_sequences(allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEQUENCES_MAX", 2)
    owner = await StreamOwner.ready(allocator)
    with refused(Reason.LIMIT, "live sequences"):
        await owner.step(
            grows=grows((1, 1, b""), (2, 1, b"")),
            forks=pb.ForkPhase(parents=[1], children=[3]),
        )
    owned = allocator.service.directory.pool("a")
    assert (dict(owned.pool.sequences), owned.steps.next_step) == ({}, 1)


@pytest.mark.skipif(IS_COMPILED, reason="constants of extension modules cannot be replaced")
async def test_freed_sequences_make_room_for_new_ones_in_the_same_step(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEQUENCES_MAX", 2)
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 1, b""), (2, 1, b"")))
    await owner.step(frees=pb.FreePhase(sequences=[1]), grows=grows((3, 1, b"")))
    assert list(allocator.service.directory.pool("a").pool.sequences) == [2, 3]


async def test_a_drop_cannot_keep_more_digests_than_it_has(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(drops=[pb.CacheDrop(namespace="", digests=d("ab"), kept_digest_count=2)])
    with refused(Reason.MALFORMED, "kept_digest_count must be at most 2, the number of digests, not 3"):
        await owner.step(drops=[pb.CacheDrop(namespace="", digests=d("ab"), kept_digest_count=3)])


async def test_a_defect_quarantines_the_pool_until_it_is_reported_anew(allocator: RunningAllocator) -> None:
    owner, other = await StreamOwner.ready(allocator, "a"), await StreamOwner.ready(allocator, "b")
    await owner.step(grows=grows((1, 6, b"")))
    allocator.service.directory.pool("a").pool.blocks.cached_count += 1  # plants a defect: a wrong count
    with refused(Reason.POOL_QUARANTINED):
        await owner.step(grows=grows((1, 7, b"")))
    with refused(Reason.POOL_UNKNOWN):
        await state(allocator, "a")
    assert (await other.step(grows=grows((1, 6, b"")))).number == 1
    again = StreamOwner(allocator)
    assert (await again.attach(epoch=2, resume_session=owner.session_id)).HasField("report_required")
    await again.report(last_step=1)
    assert (await again.step(grows=grows((1, 6, b"")))).number == 2


async def test_steps_are_counted_by_operation_and_result(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 4, b""), (2, 4, b"")), frees=pb.FreePhase(sequences=[9]))
    await owner.hang_up()  # The server counts a step only after it has sent the answer.
    numbers = allocator.service.counters.of("a")
    assert sum(numbers.step_seconds.counts) == 1
    assert numbers.step_seconds_sum > 0
    assert dict(numbers.operations) == {("grow", pb.RESULT_OK): 2, ("free", pb.RESULT_NOT_FOUND): 1}


async def test_a_pool_that_is_dropped_while_an_answer_is_sent_leaves_no_counters(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SessionStream._write

    def drop_and_write(stream: SessionStream, answer: bytes) -> Awaitable[None]:
        if pb.SessionReply.FromString(answer).HasField("step_reply"):
            # the pool is dropped, as after the end of its lease
            allocator.service.sessions.drop(allocator.service.directory.pool("a"))
        return write(stream, answer)

    owner = await StreamOwner.ready(allocator)
    monkeypatch.setattr(SessionStream, "_write", drop_and_write)
    await owner.step(grows=grows((1, 4, b"")))
    await owner.hang_up()
    assert "a" not in allocator.service.counters._pools


async def test_a_pool_that_goes_while_metrics_are_read_leaves_no_counters(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await StreamOwner.ready(allocator)
    service = allocator.service
    seen = service.directory.open_pools()  # what the metrics' thread has read just before the drop
    service.sessions.drop(service.directory.pool("a"))
    monkeypatch.setattr(type(service.directory), "open_pools", lambda _directory: seen)
    metrics = {metric.name: metric for metric in AllocatorCollector(service.directory, service.counters).collect()}
    assert [sample.value for sample in metrics["quire_allocator_steps"].samples] == [0]
    assert "a" not in service.counters._pools


@pytest.mark.skipif(IS_COMPILED, reason="constants of extension modules cannot be replaced")
@pytest.mark.parametrize(("limit", "told"), [("REMOVED_TOLD_MAX", 2), ("REMOVED_SCOPES_MAX", 2)])
async def test_what_left_the_index_is_told_up_to_a_limit(
    limit: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_allocator() as allocator:
        owner = StreamOwner(allocator)
        declared = spec()
        declared.features.append("tells-removed")
        await owner.attach(spec=declared)
        await owner.report()
        for number, name in enumerate("xyz", 1):
            phase = grows((number, 4, b""))
            phase.namespaces.append(name)
            await owner.step(grows=phase)
            await owner.step(commits=commits((number, 4, d("a"))))
        freed = await owner.step(frees=pb.FreePhase(sequences=[1, 2, 3]))
        assert not freed.HasField("removed")
        monkeypatch.setattr(limits, limit, told)
        reply = await owner.step(drops=[pb.CacheDrop()])
        assert reply.dropped_block_counts == [3]
        assert [each.digests for each in reply.removed.blocks] == [d("a")] * told
        assert reply.removed.is_cut
