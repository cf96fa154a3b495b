"""Answers must fit into a message, and memory must be bounded: large answers, pools and prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from quire import AsyncAllocator
from quire.errors import Reason, from_rpc_error
from quire.protocol.limits import MESSAGE_BYTES_MAX
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.readers import invariants, usage
from quire_allocator.wire import reply_size, step_apply, step_checks

from tests.allocator.core.pools import make_pool
from tests.allocator.service.harness import (
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    commits,
    d,
    grows,
    refused,
    running_allocator,
    spec,
    state,
)

EVERY_BLOCK = 1_200_000  # blocks of the large pool, too many for one answer to list


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


# -- answers that could not be sent ------------------------------------------------------------------------------------


async def test_a_unary_answer_too_large_to_send_is_refused_before_anything_is_done() -> None:
    async with running_allocator(check_invariants=False) as allocator:
        owner = await UnaryOwner.open(allocator, block_count=EVERY_BLOCK, block_size=1)
        with refused(Reason.TOO_LARGE):
            await owner.allocate(sequence_id=1, token_count=EVERY_BLOCK)
        await owner.allocate(sequence_id=1, token_count=400_000)
        with refused(Reason.TOO_LARGE):
            await owner.grow(sequence_id=1, token_count=EVERY_BLOCK)
        sequence = allocator.service.directory.pool("a").pool.sequences[1]
        assert sequence.token_count == 400_000
        assert (await owner.allocate(sequence_id=2, token_count=EVERY_BLOCK + 1)).result == pb.RESULT_TOO_LONG
        await owner.close()


async def test_a_step_whose_reply_would_be_too_large_is_refused_whole() -> None:
    async with running_allocator(check_invariants=False) as allocator:
        owner = await StreamOwner.ready(allocator, block_count=EVERY_BLOCK, block_size=1)
        await owner.step(grows=grows((1, 400_000, b"")))
        with refused(Reason.TOO_LARGE):
            await owner.step(frees=pb.FreePhase(sequences=[1]), grows=grows((2, 300_000, b""), (3, 300_000, b"")))
        pool = allocator.service.directory.pool("a")
        assert list(pool.pool.sequences) == [1]
        assert pool.steps.next_step == 2
        allocator.pass_time(10)


async def test_long_sequences_may_grow_and_fork_by_little_in_one_step() -> None:
    async with running_allocator(check_invariants=False) as allocator:
        owner = await StreamOwner.ready(allocator, block_count=EVERY_BLOCK, block_size=1)
        for token_count in (400_000, 800_000):
            await owner.step(grows=grows((1, token_count, b"")))
        allocator.service.directory.pool("a").pool.commit(1, 800_000, bytes(32 * 800_000))
        reply = await owner.step(
            forks=pb.ForkPhase(parents=[1, 2], children=[2, 3]),
            grows=grows((3, 800_002, b""), (1, 800_001, b"")),
        )
        assert list(reply.block_counts) == [2, 1]
        allocator.pass_time(10)


@pytest.mark.parametrize("groups", [1, 64])
def test_a_reply_is_never_larger_than_foreseen(groups: int) -> None:
    pool = make_pool(6_000, block_size=2, group_count=groups)
    phases: list[dict[str, Any]] = [
        {"grows": grows((1, 21, b""), (2, 21, b""), (3, 7_000, b""))},
        {"commits": commits((1, 21, d("abcdefghij")))},
        {
            "commits": commits((2, 21, d("abcdefghij"))),
            "forks": pb.ForkPhase(parents=[2, 9], children=[5, 6]),
        },
        {"grows": grows((5, 23, b""), (5, 25, b""), (9, 8, b""), (8, 8, b""), (10, 8, d("a")))},
        {
            "frees": pb.FreePhase(sequences=[1]),
            "forks": pb.ForkPhase(parents=[1], children=[20]),
        },
        {
            "frees": pb.FreePhase(sequences=[2]),
            "forks": pb.ForkPhase(parents=[2, 5, 20], children=[20, 21, 22]),
            "grows": grows((21, 23, b""), (22, 30, b"")),
        },
        {"forks": pb.ForkPhase(parents=[5] * 60, children=range(30, 90))},
        # each fork copies a block in each group
        {"grows": grows(*((sequence, 22, b"") for sequence in range(30, 90)))},
    ]
    for number, phase in enumerate(phases, 1):
        step = packed.Step.FromString(pb.Step(number=number, **phase).SerializeToString())
        columns, reply = step_checks.check_step(pool, step), packed.StepReply(number=number)
        coarse = reply_size.step_reply_bytes_max(pool, columns)
        exact = reply_size.step_reply_bytes_max(pool, columns, exact=True)
        step_apply.apply_step(pool, columns, reply)
        assert reply.ByteSize() - 100 <= exact <= coarse, f"step {number}"
        invariants.check(pool)


# -- memory ------------------------------------------------------------------------------------------------------------


async def test_the_blocks_of_all_pools_together_are_limited() -> None:
    async with running_allocator(blocks_max=20) as allocator:
        await UnaryOwner.open(allocator, "a", block_count=12)
        with refused(Reason.LIMIT, "8 are left"):
            await UnaryOwner.open(allocator, "b", block_count=9)
        with refused(Reason.LIMIT, "8 are left"):
            await StreamOwner(allocator).attach(pool="b", spec=spec(block_count=9))
        await UnaryOwner.open(allocator, "b", block_count=8)


async def test_a_pool_cannot_outgrow_the_limit_by_a_second_report() -> None:
    async with running_allocator(blocks_max=20) as allocator:
        owner = await StreamOwner.ready(allocator, block_count=20)
        before = await state(allocator)
        larger = StreamOwner(allocator)
        await larger.attach(epoch=2, spec=spec(block_count=21))
        with refused(Reason.LIMIT, "20 are left"):
            await larger.report()
        assert await state(allocator) == before
        again = StreamOwner(allocator)
        assert (await again.attach(epoch=3, spec=spec(block_count=20), resume_session=owner.session_id)).resumed


async def test_an_attach_alone_takes_no_memory(allocator: RunningAllocator) -> None:
    owner = StreamOwner(allocator)
    await owner.attach(spec=spec(block_count=limits.BLOCKS_MAX))
    (claimed,) = allocator.service.directory._owners.values()
    assert claimed.pool.blocks.block_count == 0
    assert claimed.spec.block_count == limits.BLOCKS_MAX


# -- reading page by page ----------------------------------------------------------------------------------------------


async def test_a_large_pool_is_read_in_answers_that_fit() -> None:
    block_count = limits.BLOCKS_MAX
    async with running_allocator(check_invariants=False) as allocator:
        owner = await UnaryOwner.open(allocator, block_count=block_count, block_size=1)
        await owner.allocate(sequence_id=4, token_count=5)
        for token_count in (400_000, 800_000, EVERY_BLOCK):
            await owner.grow(5, token_count)  # The first grow creates the sequence.
        await owner.allocate(sequence_id=9, token_count=7)
        async with AsyncAllocator(allocator.address) as client:
            seen = await client.get_pool_blocks("a")
        pool = allocator.service.directory.pool("a").pool
        assert seen.block_states == usage.block_states(pool).to_bytes()
        assert [sequence.sequence_id for sequence in seen.sequences] == [4, 5, 9]
        for sequence in seen.sequences:
            (table,) = pool.tables(pool.sequences[sequence.sequence_id])
            assert sequence.tables == (tuple(table),)
        await owner.close()


async def test_tables_of_several_groups_and_block_states_are_put_together_again(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await UnaryOwner.open(allocator, block_count=300, block_size=1, group_count=2)
    for sequence_id in (1, 2, 7):
        await owner.allocate(sequence_id=sequence_id, token_count=11 * sequence_id)
    async with AsyncAllocator(allocator.address) as client:
        whole = await client.get_pool_blocks("a")
        for states_max, sequence_bytes_max in ((7, 1 << 19), (1 << 20, 40), (7, 40), (200, 1), (3, 300)):
            monkeypatch.setattr(limits, "STATES_PER_ANSWER_MAX", states_max)
            monkeypatch.setattr(limits, "SEQUENCE_BYTES_PER_ANSWER_MAX", sequence_bytes_max)
            assert await client.get_pool_blocks("a") == whole
    assert [len(sequence.tables[1]) for sequence in whole.sequences] == [11, 22, 77]


async def test_a_sequence_that_goes_while_it_is_read_harms_nobody(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEQUENCE_BYTES_PER_ANSWER_MAX", 16)
    owner = await UnaryOwner.open(allocator, block_count=20, block_size=1)
    for sequence_id in (1, 2):
        await owner.allocate(sequence_id=sequence_id, token_count=9)
    request = pb.GetPoolBlocksRequest(pool="a")
    request.page_token = (await allocator.stub.GetPoolBlocks(request)).next_page_token
    (first,) = (await allocator.stub.GetPoolBlocks(request)).sequences
    assert (first.sequence_id, first.first_entry, len(first.tables[0].blocks), first.continues) == (1, 4, 16, True)
    await owner.free(sequence_id=1)
    (second,) = (await allocator.stub.GetPoolBlocks(request)).sequences
    assert (second.sequence_id, second.first_entry) == (2, 0)


@pytest.mark.parametrize("token", ["no token", "bm8=", "MS4y", "LTEuMC4w", "MC4wLjAuMA=="])
async def test_a_token_that_the_allocator_did_not_give_is_refused(allocator: RunningAllocator, token: str) -> None:
    await UnaryOwner.open(allocator)
    with refused(Reason.MALFORMED, "page_token is not from this allocator") as caught:
        await allocator.stub.GetPoolBlocks(pb.GetPoolBlocksRequest(pool="a", page_token=token))
    assert from_rpc_error(caught.value).field == "page_token"


async def test_a_page_has_as_many_sequences_as_were_asked_for(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    for sequence_id in range(1, 6):
        await owner.allocate(sequence_id, 1)
    request, pages = pb.GetPoolBlocksRequest(pool="a", page_size=2), []
    while not pages or request.page_token:
        page = await allocator.stub.GetPoolBlocks(request)
        pages.append(([sequence.sequence_id for sequence in page.sequences], len(page.block_states)))
        request.page_token = page.next_page_token
    assert pages == [([1, 2], 8), ([3, 4], 0), ([5], 0)]


def test_one_answer_of_everything_fits_a_message() -> None:
    assert limits.STATES_PER_ANSWER_MAX + limits.SEQUENCE_BYTES_PER_ANSWER_MAX + (64 << 10) <= MESSAGE_BYTES_MAX
