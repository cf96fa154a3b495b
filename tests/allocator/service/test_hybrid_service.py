"""Pools of several types of attention, quotas and usage, over gRPC.

The pool of the reference document: block size 16, 10 full and 20 sliding layers of window 32 in 3 groups of 10.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from quire.errors import Reason
from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import (
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    commits,
    d,
    grows,
    refused,
    running_allocator,
    tables_in,
)

NULL = 0xFFFFFFFF
FULL = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=16)
SLIDING = pb.GroupSpec(kind=pb.GROUP_KIND_SLIDING_WINDOW, block_size=16, window=32)
STATE = pb.GroupSpec(kind=pb.GROUP_KIND_STATE, block_size=32)


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


async def opened(
    allocator: RunningAllocator, *groups: pb.GroupSpec, block_count: int = 64, **fields: object
) -> UnaryOwner:
    pool = pb.PoolSpec(block_count=block_count, groups=groups, **fields)  # type: ignore[arg-type]
    request = pb.OpenSessionRequest(version=3, request_id="open", pool="a", spec=pool)
    return UnaryOwner(allocator, (await allocator.stub.OpenSession(request)).session_id, len(groups))


async def summary(allocator: RunningAllocator) -> pb.PoolSummary:
    return (await allocator.stub.GetPool(pb.GetPoolRequest(pool="a"))).summary


async def test_a_hybrid_pool_gives_back_what_fell_out_and_leaves_null_entries(allocator: RunningAllocator) -> None:
    owner = await opened(allocator, FULL, SLIDING, SLIDING)
    await owner.allocate(sequence_id=1, token_count=112)
    await owner.commit(sequence_id=1, token_count=112, digests=d("abcdefg"))
    # Full attention keeps 7 blocks. Token 112 reads tokens from 112 - 31 = 81 on, so each sliding group keeps blocks 5
    # and 6.
    seen = await allocator.stub.GetPoolBlocks(pb.GetPoolBlocksRequest(pool="a"))
    full, *sliding = tables_in(seen.sequences[0].tables)
    assert (len(full), NULL in full) == (7, False)
    assert [table[:5] for table in sliding] == [[NULL] * 5] * 2
    assert all(len(table) == 7 and NULL not in table[5:] for table in sliding)
    assert seen.summary.held_block_count == 11
    assert [(g.held_block_count, g.cached_block_count) for g in seen.summary.groups] == [(7, 0), (2, 5), (2, 5)]


async def test_groups_out_of_order_keep_their_own_tables(allocator: RunningAllocator) -> None:
    owner = await opened(allocator, SLIDING, FULL, SLIDING)
    allocated = await owner.allocate(sequence_id=1, token_count=48)
    await owner.commit(sequence_id=1, token_count=48, digests=d("abc"))
    seen = await allocator.stub.GetPoolBlocks(pb.GetPoolBlocksRequest(pool="a"))
    tables = tables_in(seen.sequences[0].tables)
    assert [table.count(NULL) for table in tables] == [1, 0, 1]
    assert [table[1:] for table in tables] == [list(table[1:]) for table in allocated.tables]


async def test_a_state_hit_is_answered_with_the_copy_of_its_checkpoint(allocator: RunningAllocator) -> None:
    owner = await opened(allocator, FULL, STATE)
    first = await owner.allocate(sequence_id=1, token_count=32, digests=d("ab"))
    assert [len(table) for table in first.tables] == [2, 1]
    await owner.commit(sequence_id=1, token_count=32, digests=d("ab"))
    hit = await owner.allocate(sequence_id=2, token_count=40, digests=d("ab"))
    assert hit.matched_token_count == 32
    (checkpoint,), (running,) = first.tables[1], hit.tables[1]
    assert hit.copies == ((checkpoint, running),)


async def test_waste_is_that_of_the_first_group_that_holds_tokens(allocator: RunningAllocator) -> None:
    owner = await opened(allocator, pb.GroupSpec(kind=pb.GROUP_KIND_STATE, block_size=256), FULL)
    await owner.allocate(sequence_id=1, token_count=20)
    await owner.commit(sequence_id=1, token_count=20, digests=d("a"))
    assert (await summary(allocator)).unwritten_slot_count == 12


async def test_a_state_with_uncommitted_tokens_cannot_be_forked(allocator: RunningAllocator) -> None:
    owner = await opened(allocator, FULL, STATE)
    await owner.allocate(sequence_id=1, token_count=20)
    assert (await owner.fork(parent_id=1, child_id=2)).result == pb.RESULT_UNCOMMITTED
    await owner.commit(sequence_id=1, token_count=20, digests=d("a"))
    assert (await owner.fork(parent_id=1, child_id=2)).result == pb.RESULT_OK


async def test_a_prompt_whose_prefix_is_being_computed_is_told_and_may_wait(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 8, d("a"))))
    both = grows((2, 9, d("ab")), (2, 8, d("a")))
    both.defer_token_counts.extend([4, 8])
    reply = await owner.step(grows=both)
    assert list(reply.grow_results) == [pb.RESULT_PENDING, pb.RESULT_OK]
    assert list(reply.unmatched.pending_token_counts) == [4, 4]
    assert list(reply.granted_grows) == [1]
    await owner.step(commits=commits((1, 4, d("a"))))
    assert list((await owner.step(grows=grows((3, 8, d("a"))))).matched_token_counts) == [4]


async def test_lookahead_that_was_not_used_is_given_back_by_the_commit(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 20, b"")))
    kept = commits((1, 6, d("a")))
    kept.keep_token_counts.extend([8])
    assert (await owner.step(commits=kept)).free_block_count == 6
    assert list((await owner.step(grows=grows((1, 9, b"")))).blocks) == [2]


async def test_no_space_names_the_cheapest_victim(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 16, b""), (2, 12, b"")))
    await owner.step(commits=commits((1, 16, d("abcd")), (2, 12, d("xyz"))))
    asked = grows((3, 8, b""))
    reply = await owner.step(grows=asked)
    assert (list(reply.grow_results), list(reply.refusals.shortfalls)) == ([pb.RESULT_NO_SPACE], [1])
    assert (reply.refusals.victim_sequences, reply.refusals.victim_token_counts) == ([2], [12])


async def test_a_namespace_cannot_hold_more_than_its_quota(allocator: RunningAllocator) -> None:
    quotas = [pb.Quota(namespace="small", held_blocks_max=2), pb.Quota(namespace="*", held_blocks_max=4)]
    owner = await opened(allocator, FULL, quotas=quotas)
    small = {"namespace": "small", "token_count": 48}
    refusal = await owner.allocate(sequence_id=1, **small)
    assert (refusal.result, refusal.shortfall) == (pb.RESULT_QUOTA, 1)
    assert (await owner.allocate(sequence_id=1, namespace="other", token_count=64)).result == pb.RESULT_OK


async def test_usage_tells_where_the_memory_goes(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator, block_count=16)
    await owner.allocate(sequence_id=1, token_count=12, namespace="n")
    await owner.commit(sequence_id=1, token_count=9, digests=d("ab"))
    await owner.fork(parent_id=1, child_id=2)
    await owner.allocate(sequence_id=3, token_count=4)
    seen = await allocator.stub.GetPoolUsage(pb.GetPoolUsageRequest(pool="a"))
    # The parent was granted 3 tokens beyond its 9. The fork's half-filled block has 3 empty slots. Sequence 3 has not
    # written its 4.
    assert seen.summary.unwritten_slot_count == 3 + 3 + 4
    usage = seen.usage
    assert [(n.namespace, n.held_block_count, n.sequence_count) for n in usage.namespaces] == [("n", 3, 2), ("", 1, 1)]
    assert [(p.token_count, p.block_count, p.holder_count) for p in usage.longest_prefixes] == [(8, 2, 2)]
    assert [bytes(p.digest_prefix) for p in usage.most_shared_prefixes] == [d("ab")[32:40]]
    assert (usage.run_count, usage.run_block_count, usage.free_block_count, usage.free_stretch_count) == (1, 2, 12, 1)


@pytest.mark.parametrize(
    ("phase", "complaint"),
    [
        ("keep_token_counts", "keep_token_counts"),
        ("digest_counts", "digest_count"),
        ("children", "child"),
        ("namespace_indices", "namespace_ind"),
        ("prompt_token_counts", "prompt_token_counts"),
        ("priorities", "priorities"),
        ("defer_token_counts", "defer_token_counts"),
        ("returns", "returns"),
    ],
)
async def test_a_column_of_another_length_makes_the_step_malformed(
    allocator: RunningAllocator, phase: str, complaint: str
) -> None:
    owner = await StreamOwner.ready(allocator)
    committed, forks, grown = (
        commits((1, 1, b"")),
        pb.ForkPhase(parents=[1], children=[2]),
        grows((3, 1, b"")),
    )
    for message in (committed, forks, grown):
        if hasattr(message, phase):
            getattr(message, phase)[:] = [1, 1, 1]
    with refused(Reason.MALFORMED, complaint):
        await owner.step(commits=committed, forks=forks, grows=grown)


@pytest.mark.parametrize(
    ("counts", "token_counts"), [([1], [4]), ([1, 2], [4]), ([2, 0], [8, 4]), ([1, 0], [0]), ([0, 0], [4]), ([], [4])]
)
async def test_breakpoints_that_do_not_add_up_or_do_not_rise_make_the_step_malformed(
    allocator: RunningAllocator, counts: list[int], token_counts: list[int]
) -> None:
    owner = await StreamOwner.ready(allocator)
    both = grows((1, 5, b""), (2, 6, b""))
    both.breakpoints.counts.extend(counts)
    both.breakpoints.token_counts.extend(token_counts)
    with refused(Reason.MALFORMED, "breakpoints"):
        await owner.step(grows=both)


async def test_breakpoints_are_stops_in_the_answer(allocator: RunningAllocator) -> None:
    owner = await opened(allocator, FULL, SLIDING)
    both = grows((1, 80, b""), (2, 80, b""))
    both.breakpoints.counts.extend([0, 2])
    both.breakpoints.token_counts.extend([17, 48])
    step = pb.Step(number=1, session_id=owner.session_id, grows=both)
    told = (await allocator.stub.Apply(step)).stops
    assert (list(told.counts), list(told.token_counts)) == ([1, 3], [64, 16, 48, 64])


async def test_what_returns_in_a_step_is_counted_apart_from_what_is_new(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    both = grows((1, 5, b""), (2, 6, b""))
    both.returns.extend([0, 1])
    await owner.step(grows=both)
    pool = allocator.service.directory.pool("a").pool
    assert (pool.queried_token_count, pool.returned_token_count) == (5, 6)
    both = grows((3, 5, b""))
    both.returns.extend([2])
    with refused(Reason.MALFORMED, "returns must be 0 or 1, not 2"):
        await owner.step(grows=both)


async def test_a_specification_is_told_as_it_was_declared(allocator: RunningAllocator) -> None:
    declared = pb.PoolSpec(
        block_count=64,
        groups=[FULL, SLIDING, pb.GroupSpec(kind=pb.GROUP_KIND_STATE, block_size=64)],
        cache_layout="x",
        model_fingerprint=b"y",
        watermark_block_count=5,
        quotas=[pb.Quota(namespace="n", held_blocks_max=0), pb.Quota(namespace="*", cached_blocks_max=7)],
        eviction_policy="lru",
    )
    await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="open", pool="a", spec=declared))
    assert (await summary(allocator)).spec == declared


async def test_a_pool_of_one_kind_still_shares_over_the_wire(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator, block_count=8)
    await owner.step(grows=grows((1, 9, d("ab"))))
    await owner.step(commits=commits((1, 9, d("ab"))))
    reply = await owner.step(grows=grows((2, 9, d("ab"))))
    assert (list(reply.granted_grows), list(reply.block_counts)) == ([0], [3])
