"""Engines on `quire.engine` read back the content that they wrote to their pages, over streams and over unary calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from quire import Allocator, AsyncAllocator, GroupKind, GroupSpec, InvalidArgumentError, PoolSpec, Quota
from quire.engine import NotAdmittedError, SessionLostError
from quire.session import Result

from tests.allocator.service.harness import RunningAllocator, running_allocator
from tests.client.engine_pages import PretendedEngine
from tests.client.test_allocator import Awaited

FULL = PoolSpec.full_attention(block_count=24, block_size=4)
WINDOWS = PoolSpec(
    80,
    (
        GroupSpec(GroupKind.FULL_ATTENTION, 8),
        GroupSpec(GroupKind.SLIDING_WINDOW, 4, window=10),
        GroupSpec(GroupKind.CHUNKED_LOCAL, 4, window=16),
    ),
    chunk_token_count_max=16,
)
STATES = PoolSpec(40, (GroupSpec(GroupKind.FULL_ATTENTION, 4), GroupSpec(GroupKind.STATE, 8)))
SPECS = {"full attention": FULL, "windows": WINDOWS, "states": STATES}
FLAVOURS = ("stream", "unary", "stream, for threads", "unary, for threads")


class Turned(Awaited):
    """Wraps the blocking engine so that its calls can be awaited; passes other attributes through."""

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._target, name)
        return super().__getattr__(name) if name in ("admit", "turn", "open", "close") else target


@asynccontextmanager
async def opened(allocator: RunningAllocator, flavour: str, spec: PoolSpec) -> AsyncIterator[Any]:
    """Opens an engine on pool "a"."""
    transport: Literal["stream", "calls"] = "stream" if flavour.startswith("stream") else "calls"
    if "threads" not in flavour:
        client = AsyncAllocator(allocator.address)
        async with client, client.engine("a", spec, transport=transport) as engine:
            yield engine
    else:
        with Allocator(allocator.address) as sync_client:
            sync_engine = Turned(sync_client.engine("a", spec, transport=transport))
            await sync_engine.open()
            try:
                yield sync_engine
            finally:
                await sync_engine.close()


async def assert_same_tables(engine: Any, client: AsyncAllocator) -> None:
    """Compares the allocator's state of every live sequence with the engine's."""
    shown = {each.sequence_id: each for each in (await client.get_pool_blocks("a")).sequences}
    assert set(shown) == {each.id for each in engine.live}
    for each in engine.live:
        tables = [[block for block in table if block is not None] for table in shown[each.id].tables]
        own = [[block for block in row if block != 0xFFFFFFFF] for row in each.table]
        assert own == tables, each
        assert each.room == shown[each.id].token_count


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("kind", SPECS)
async def test_every_pass_reads_what_was_computed(flavour: str, kind: str) -> None:
    spec = SPECS[kind]
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as reader:
        refused = hits = copies = 0
        # With states, only one in a hundred prompts hits. The exact number depends on thread timing.
        for seed in range(8):
            async with opened(allocator, flavour, spec) as engine:
                pretended = PretendedEngine(engine, spec, random.Random(seed))
                for _ in range(4):
                    await pretended.play(25, length_max=48)
                    if "threads" not in flavour:
                        await settle(pretended)
                        await assert_same_tables(engine, reader)
                await pretended.end()
                summary = await reader.get_pool("a")
                assert (summary.held_block_count, summary.sequence_count) == (0, 0)
                refused, hits = refused + pretended.refusal_count, hits + pretended.hit_count
                copies += pretended.copy_count
        assert refused, "the pool is small enough to be full at times"
        assert hits
        assert copies


async def settle(pretended: PretendedEngine) -> None:
    """Runs turns until no step is in flight and every fork and free is sent. A sequence without free slots would ask
    forever."""
    engine = pretended.engine
    while engine._under_way is not None or engine._agenda._forks or engine._agenda._freed:
        pretended.run_copies(await engine.turn())
        if engine._under_way is not None:
            await asyncio.wait({engine._under_way})
            pretended.run_copies(await engine.turn())


@pytest.fixture(params=["stream", "unary"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with running_allocator() as allocator, opened(allocator, request.param, FULL) as made:
        yield made


async def test_a_prompt_hits_what_its_predecessor_has_just_filled(engine: Any) -> None:
    first = await engine.admit(range(9))
    assert (first.matched, list(first.due), first.room) == (0, list(range(9)), 9)
    assert [first.slot(i) % 4 for i in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    first.append(9)
    second = await engine.admit(range(9))
    assert (second.matched, list(second.due)) == (8, [8])
    assert second.table[0][:2] == first.table[0][:2]


async def test_a_refused_prompt_says_what_is_missing_and_whom_to_free(engine: Any) -> None:
    first = await engine.admit(range(60))
    with pytest.raises(NotAdmittedError, match="NO_SPACE: 7 more blocks must become free") as raised:
        await engine.admit(range(100, 160))
    refusal = raised.value.refusal
    # The victim is `first`, the only running sequence.
    assert (refusal.result, refusal.shortfall, refusal.victim) == (Result.NO_SPACE, 7, first)
    refusal.victim.free()
    assert (await engine.admit(range(100, 160))).room >= 60
    with pytest.raises(NotAdmittedError, match="TOO_LONG"):
        await engine.admit(range(97))


async def test_who_gets_no_room_says_so_and_goes_on_when_somebody_is_freed(engine: Any) -> None:
    texts = [await engine.admit(range(48), token_count_max=90), await engine.admit(range(100, 144))]
    while not engine.refused():
        await engine.turn()
        for each in engine.ready():
            each.append(7)
    refused, other = sorted(texts, key=lambda each: each.refusal is None)
    length, room = len(refused.tokens), refused.room
    assert (refused.refusal.result, refused.refusal.shortfall) == (Result.NO_SPACE, 1)
    assert refused.refusal.victim in texts
    assert list(refused.due) == []
    with pytest.raises(ValueError, match=f"{room} have room"):
        refused.append(8)
    with pytest.raises(IndexError, match=f"outside the {room} tokens"):
        refused.slot(room)
    other.free()
    while not engine.ready():
        await engine.turn()
    assert refused.refusal is None
    assert list(refused.due) == [length - 1]
    assert (
        repr(refused) == f"<EngineSequence {refused.id}: {length - 1} of {length} tokens computed, room {refused.room}>"
    )


async def test_room_ahead_is_given_back_before_anybody_is_refused() -> None:
    async with running_allocator() as allocator, opened(allocator, "stream", FULL) as engine:
        first = await engine.admit(range(8))
        first.append(8)
        while first.room < 64:
            await engine.turn()
        second = await engine.admit(range(100, 160))
        assert second.room == 60
        assert first.room < 64
        assert engine.refused() == []


async def test_a_prompt_that_is_wrong_ends_alone(engine: Any) -> None:
    wrong, right = await asyncio.gather(
        engine.admit(range(8), namespace="x" * 5000), engine.admit(range(8)), return_exceptions=True
    )
    assert isinstance(wrong, InvalidArgumentError), wrong
    assert right.room == 8
    right.append(1)
    assert await engine.turn() == []


async def test_who_is_cancelled_while_asking_leaves_nothing_behind(engine: Any) -> None:
    asking = asyncio.create_task(engine.admit(range(8)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    while engine._under_way is not None:
        await engine.turn()
    other = await engine.admit(range(90))  # The pool holds 96 tokens, so not both prompts.
    assert engine.live == (other,)


async def test_what_makes_no_sense_is_refused_here(engine: Any) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        await engine.admit([])
    with pytest.raises(OverflowError):
        await engine.admit([2**31])
    with pytest.raises(ValueError, match="more than token_count_max=4"):
        await engine.admit(range(8), token_count_max=4)
    one = await engine.admit(range(8))
    with pytest.raises(ValueError, match=r"token must be an integer from .*, not 2147483648"):
        one.append(2**31)
    one.free()
    one.free()
    for use in (one.fork, lambda: one.append(1)):
        with pytest.raises(RuntimeError, match="was freed"):
            use()


async def test_a_fork_shares_what_is_computed_and_copies_the_block_that_it_writes(engine: Any) -> None:
    parent = await engine.admit(range(6))
    parent.append(6)
    child, late = parent.fork(), parent.fork()
    late.free()  # `late` is freed before the owner receives its fork
    grandchild = child.fork()
    child.append(7)
    grandchild.append(8)
    parent.free()  # The owner gets the forks before this free.
    copies = await engine.turn()
    assert {child.table[0][0], grandchild.table[0][0]} == {parent.table[0][0]}
    assert child.table[0][1] != grandchild.table[0][1]
    assert {source for source, _ in copies} == {parent.table[0][1]}
    assert {child, grandchild} == set(engine.ready())


async def test_what_has_no_state_yet_has_none_to_share() -> None:
    async with running_allocator() as allocator, opened(allocator, "stream", STATES) as engine:
        one = await engine.admit(range(6))
        with pytest.raises(ValueError, match="admit its tokens again"):
            one.fork()
        one.advance(one.due.stop)
        child = one.fork()
        child.append(7)
        assert await engine.turn(), "each writes a state of its own from now on"
        assert one.table[1] != child.table[1]


async def test_over_unary_calls_a_lost_allocator_loses_the_pool_and_the_engine_goes_on() -> None:
    async with running_allocator() as allocator, opened(allocator, "unary", FULL) as engine:
        one = await engine.admit(range(8))
        one.append(8)
        allocator.pass_time(11)
        with pytest.raises(SessionLostError):
            await engine.turn()
        assert not one.is_live
        assert engine.live == ()
        again = await engine.admit(one.tokens, is_return=True)
        assert (again.matched, again.room) == (0, 9)


async def test_quotas_are_told_apart() -> None:
    spec = PoolSpec.full_attention(block_count=24, block_size=4, quotas=(Quota("small", held_blocks_max=2),))
    async with running_allocator() as allocator, opened(allocator, "stream", spec) as engine:
        with pytest.raises(NotAdmittedError, match="QUOTA: 1 more blocks must become free"):
            await engine.admit(range(12), namespace="small")
        one = await engine.admit(range(8), namespace="small")
        one.append(1)
        await engine.turn()
        assert one.refusal.result is Result.QUOTA
