"""Tests the slots that a session requests ahead of decoding, against a naive twin and a real allocator."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import count

import pytest
from quire import AsyncAllocator, GroupKind, GroupSpec, PoolSpec, Quota
from quire.errors import InvalidArgumentError
from quire.protocol.outcomes import Result, StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession
from quire.session.lookahead import Decoding, Increment, give_back, needs_of

from tests.allocator.service.harness import running_allocator

HYBRID = (GroupSpec(GroupKind.FULL_ATTENTION, 16), GroupSpec(GroupKind.SLIDING_WINDOW, 8, window=32))


def blocks_of(token_count: int, sizes: tuple[int, ...]) -> int:
    """Returns the number of blocks in the tables of a sequence with this many tokens."""
    return sum(math.ceil(Fraction(token_count, size)) for size in sizes)


def naive_needs(
    decoding: list[Decoding[int]], free_block_count: int, *, ahead_tokens: int, sizes: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Applies the rules of `quire.session.lookahead` naively, one whole increment at a time."""
    if not any(each.granted < min(each.length + ahead_tokens, each.last) for each in decoding):
        return []
    increment = math.lcm(*sizes)
    room = {each.sequence: each.granted for each in decoding}
    free = free_block_count

    def add_unit(sequence: int) -> int:
        """Extends a sequence's slots to the next multiple of an increment; returns how many blocks they take."""
        before = room[sequence]
        room[sequence] = (before // increment + 1) * increment
        return blocks_of(room[sequence], sizes) - blocks_of(before, sizes)

    for each in decoding:
        if min(each.length, each.last) > room[each.sequence]:
            # Another sequence may share the half-filled block, so the naive rule counts a copy.
            free -= sum(each.granted % size > 0 for size in sizes)
        while min(each.length, each.last) > room[each.sequence]:
            free -= add_unit(each.sequence)
    if free < 0:
        least = min(sizes)
        return [
            (each.sequence, next(n for n in count(min(each.length, each.last)) if n % least == 0))
            for each in decoding
            if min(each.length, each.last) > each.granted
        ]
    for each in decoding:
        wanted = min(each.length + ahead_tokens + (increment if ahead_tokens else 0), each.last)
        while room[each.sequence] < wanted:
            before = room[each.sequence]
            cost = add_unit(each.sequence)
            if cost > free:
                room[each.sequence] = before
                break
            free -= cost
    return [(each.sequence, room[each.sequence]) for each in decoding if room[each.sequence] > each.granted]


@pytest.mark.parametrize("seed", range(40))
def test_needs_are_those_of_a_naive_twin_and_never_more_than_is_free(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        sizes = dice.choice([(1,), (4,), (16,), (16, 8), (8, 16, 16), (4, 6)])
        increment = Increment.of(*sizes)
        ahead_tokens = dice.choice([0, 1, increment.token_count, 50])
        decoding = []
        for number in range(dice.randrange(6)):
            length = dice.randrange(1, 100)
            granted = max(0, length + dice.randrange(-20, 60))
            decoding.append(Decoding(number, granted, length, length + dice.randrange(-1, 80)))
        free = dice.randrange(40)
        expected = naive_needs(decoding, free, ahead_tokens=ahead_tokens, sizes=sizes)
        asks = needs_of(decoding, free, ahead_tokens=ahead_tokens, increment=increment)
        assert asks == expected
        granted_to = {each.sequence: each.granted for each in decoding}
        taken = sum(blocks_of(room, sizes) - blocks_of(granted_to[each], sizes) for each, room in asks)
        least = sum(
            max(0, blocks_of(increment.least(min(each.length, each.last)), sizes) - blocks_of(each.granted, sizes))
            for each in decoding
            if each.lacks_room
        )
        assert taken <= max(free, least)


@pytest.mark.parametrize("seed", range(20))
def test_no_more_is_given_back_than_a_block_too_much_and_nobody_loses_what_it_needs(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        sizes = dice.choice([(1,), (4,), (16,), (16, 8), (8, 16, 16), (4, 6)])
        holders = []
        for number in range(dice.randrange(6)):
            length = dice.randrange(1, 100)
            holders.append((number, length + dice.randrange(60), length))
        missing = dice.randrange(30)
        kept = give_back(holders, missing, Increment.of(*sizes))
        freed = {
            each: blocks_of(granted, sizes) - blocks_of(kept.get(each, granted), sizes) for each, granted, _ in holders
        }
        for each, granted, length in holders:
            assert length <= kept.get(each, granted) <= granted
        spare = sum(
            blocks_of(granted, sizes)
            - min(blocks_of(granted, sizes), blocks_of(Increment.of(*sizes).least(length), sizes))
            for _, granted, length in holders
        )
        assert sum(freed.values()) >= min(missing, spare)
        assert sum(freed.values()) < missing + len(sizes) or not kept
        oldest = min(kept, default=len(holders))
        assert all(freed[each] > 0 for each in kept)
        for each, granted, length in holders[oldest + 1 :]:
            if each not in kept:
                assert Increment.of(*sizes).least(length) >= granted, "a newer one had some to give"


async def opened(client: AsyncAllocator, spec: PoolSpec, lengths: list[int], *, ahead_tokens: int) -> AsyncSession:
    """Opens a session with committed sequences 1, 2, ... of these lengths."""
    session = client.session("p", spec, ahead_tokens=ahead_tokens)
    await session.open()
    step = StepBuilder()
    for sequence_id, length in enumerate(lengths, 1):
        step.allocate(sequence_id, length)
    await session.step(step)
    step = StepBuilder()
    for sequence_id, length in enumerate(lengths, 1):
        step.commit(sequence_id, length, [bytes([sequence_id] * 32)] * (length // spec.block_size))
    await session.step(step)
    return session


def room_of(session: AsyncSession, sequence_id: int) -> int:
    """Returns the number of tokens that a sequence has slots for, by the session's ledger."""
    return session.ledger.sequences[sequence_id].token_count


async def asked(session: AsyncSession, *decoding: Decoding[int]) -> tuple[StepOutcome, list[int]]:
    """Asks ahead for these sequences. Returns the answer, and how many tokens each sequence then has slots for."""
    step = StepBuilder()
    session.ahead.ask(step, decoding)
    outcome = await session.step(step)
    room = {each.sequence: each.granted for each in decoding}
    room |= {grown.sequence_id: grown.token_count for grown in outcome.grows if grown.result is Result.OK}
    assert room == {each: room_of(session, each) for each in room}
    return outcome, list(room.values())


async def test_everybody_who_decodes_has_room_for_so_many_tokens() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = await opened(client, PoolSpec.full_attention(block_count=64, block_size=4), [10, 20], ahead_tokens=16)
        outcome, room = await asked(session, Decoding(1, 10, 11, 100), Decoding(2, 20, 21, 30))
        assert [grown.result for grown in outcome.grows] == [Result.OK, Result.OK]
        assert room == [32, 32], "the second one ends at 30 tokens, in its eighth block"
        step = StepBuilder()
        session.ahead.ask(step, [Decoding(1, 32, 16, 100), Decoding(2, 32, 26, 30)])
        assert not step, "both have 16 tokens ahead, or all that they will need"
        session.ahead.ask(step, [Decoding(1, 32, 17, 100), Decoding(2, 32, 27, 30)])
        assert step.operation_count == 1
        await session.close()


async def test_what_is_asked_ahead_is_free_and_the_oldest_get_it() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        spec = PoolSpec.full_attention(block_count=12, block_size=4)
        session = await opened(client, spec, [8, 8, 8], ahead_tokens=64)
        outcome, room = await asked(session, *[Decoding(each, 8, 9, 200) for each in (1, 2, 3)])
        assert [grown.result for grown in outcome.grows] == [Result.OK] * 3
        assert room == [24, 12, 12], "one block for each, and the three that nobody needs for the oldest"
        assert outcome.free_block_count == 0
        await session.close()


async def test_groups_of_other_block_sizes_grow_together() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = await opened(client, PoolSpec(29, HYBRID), [32, 32], ahead_tokens=16)
        outcome, room = await asked(session, Decoding(1, 32, 33, 500), Decoding(2, 32, 33, 500))
        assert [grown.result for grown in outcome.grows] == [Result.OK, Result.OK]
        assert room == [80, 64], "3 blocks for 16 tokens, and 17 were free"
        assert [[len(blocks) for blocks in grown.blocks] for grown in outcome.grows] == [[3, 6], [2, 4]]
        assert outcome.free_block_count == 2
        await session.close()


async def test_where_blocks_are_short_groups_of_other_block_sizes_get_what_the_next_token_takes() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = await opened(client, PoolSpec(2 + 6, HYBRID), [32], ahead_tokens=16)
        outcome, room = await asked(session, Decoding(1, 32, 33, 500))
        assert outcome.grows[0].result is Result.OK, "two blocks are free, and 16 tokens more would take three"
        assert room == [40]
        assert outcome.free_block_count == 0
        await session.close()


async def test_who_is_refused_for_a_quota_gets_what_its_next_token_takes() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        spec = PoolSpec.full_attention(block_count=64, block_size=4, quotas=(Quota("", held_blocks_max=3),))
        session = await opened(client, spec, [8], ahead_tokens=16)
        outcome, room = await asked(session, Decoding(1, 8, 9, 500))
        assert outcome.grows[0].result is Result.QUOTA
        assert room == [8]
        step = StepBuilder()
        session.ahead.ask(step, [Decoding(1, 8, 9, 500)], free_block_count=0)
        assert (await session.step(step)).grows[0].result is Result.OK
        assert room_of(session, 1) == 12
        await session.close()


async def test_what_is_kept_for_a_prompt_in_the_same_step_is_not_taken_ahead() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = await opened(client, PoolSpec.full_attention(block_count=12, block_size=4), [8], ahead_tokens=64)
        step = StepBuilder()
        session.ahead.ask(step, [Decoding(1, 8, 9, 500)], free_block_count=10 - 6)
        step.allocate(2, 24)
        assert [grown.result for grown in (await session.step(step)).grows] == [Result.OK, Result.OK]
        assert room_of(session, 1) == 24
        await session.close()


async def test_who_has_room_takes_no_block_that_another_one_needs_in_groups_of_other_block_sizes() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = await opened(client, PoolSpec(5, HYBRID), [5, 8], ahead_tokens=16)
        outcome, room = await asked(session, Decoding(1, 5, 6, 100), Decoding(2, 8, 9, 100))
        assert [grown.result for grown in outcome.grows] == [Result.OK, Result.OK]
        assert room == [8, 16], "the first one's blocks have room, and one block is free"
        step = StepBuilder()
        session.ahead.ask(step, [Decoding(1, 8, 7, 100), Decoding(2, 16, 10, 100)], free_block_count=0)
        assert not step
        await session.close()


async def test_the_newest_give_back_what_a_prompt_needs_in_one_step_with_it() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        spec = PoolSpec.full_attention(block_count=16, block_size=4)
        session = await opened(client, spec, [8, 8], ahead_tokens=16)
        _, room = await asked(session, Decoding(1, 8, 9, 100), Decoding(2, 8, 9, 100))
        assert room == [32, 32], "all 16 blocks"
        kept = session.ahead.give_back(7, [(1, 32, 9), (2, 32, 9)])
        assert kept == {2: 12, 1: 24}
        assert session.ahead.give_back(99, [(1, 32, 9), (2, 32, 9)]) == {2: 12, 1: 12}, "nobody loses what it needs"
        assert session.ahead.give_back(0, [(1, 32, 9), (2, 32, 9)]) == {}
        step = StepBuilder()
        for sequence_id, token_count in kept.items():
            step.commit(sequence_id, 8, b"", token_count)
        step.allocate(3, 28)
        outcome = await session.step(step)
        assert outcome.grows[0].result is Result.OK
        assert [room_of(session, each) for each in (1, 2, 3)] == [24, 12, 28]
        await session.close()


async def test_what_a_fork_needs_for_its_copy_is_not_taken_ahead() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = await opened(client, PoolSpec.full_attention(block_count=8, block_size=4), [6], ahead_tokens=64)
        step = StepBuilder()
        step.fork(1, 2)
        await session.step(step)
        outcome, room = await asked(session, Decoding(1, 6, 7, 500), Decoding(2, 6, 7, 500))
        assert [grown.result for grown in outcome.grows] == [Result.OK, Result.OK]
        assert room == [24, 8]
        await session.close()


async def test_without_room_ahead_only_what_the_next_token_needs_is_asked_for() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        session = await opened(client, PoolSpec.full_attention(block_count=64, block_size=4), [8], ahead_tokens=0)
        _, room = await asked(session, Decoding(1, 8, 9, 100))
        assert room == [12]
        step = StepBuilder()
        session.ahead.ask(step, [Decoding(1, 12, 12, 100)])
        assert not step
        await session.close()


async def test_room_for_less_than_nothing_is_refused() -> None:
    async with AsyncAllocator("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgumentError, match="ahead_tokens must be an integer from 0 to 4294967295, not -1"):
            client.session("p", PoolSpec.full_attention(block_count=4, block_size=4), ahead_tokens=-1)


def test_states_alone_take_no_blocks_ahead() -> None:
    increment = Increment.of()
    sequences = [Decoding(number, 5, 6, 9) for number in range(3)]
    assert needs_of(sequences, 0, ahead_tokens=2, increment=increment) == [(number, 9) for number in range(3)]
