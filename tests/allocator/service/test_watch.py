"""WatchEvents over gRPC: snapshot, order, acknowledgment, resuming, and the ends of a watch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from quire._serving.caller_shares import CallerShares
from quire.errors import Reason
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.readers import index

from tests.allocator.service.harness import (
    EMPTY_REPORT,
    HEARTBEAT,
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    commits,
    d,
    grows,
    refused,
    running_allocator,
    spec,
)


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


class Watch:
    """A watcher, and its view of the hittable blocks."""

    def __init__(self, allocator: RunningAllocator, session_id: bytes = b"", cursor: int = 0, pool: str = "a") -> None:
        request = pb.WatchEventsRequest(pool=pool, session_id=session_id, cursor=cursor)
        self.call = allocator.stub.WatchEvents(request)
        self.session_id, self.cursor = session_id, cursor
        self.stored: set[tuple[int, str, int, bytes]] = set()
        self.log: list[str] = []

    async def next(self) -> pb.CacheEvent:
        """Applies one event, and returns it."""
        event: Any = await self.call.read()
        assert isinstance(event, pb.CacheEvent), await self.call.details()
        self.session_id, self.cursor = event.session_id, event.cursor
        kind = event.WhichOneof("change")
        self.log.append(str(kind))
        if kind == "cleared":
            self.stored.clear()
        elif kind == "stored":
            self.stored |= keys(event, event.stored)
        elif kind == "removed":
            assert keys(event, event.removed) <= self.stored or "snapshot_end" not in self.log
            self.stored -= keys(event, event.removed)
        return event

    async def until(self, kind: str) -> pb.CacheEvent:
        """Applies events up to one of this kind, and returns it."""
        while (event := await self.next()).WhichOneof("change") != kind:
            pass
        return event


def keys(event: pb.CacheEvent, change: pb.BlocksStored | pb.BlocksRemoved) -> set[tuple[int, str, int, bytes]]:
    digests = [change.digests[i : i + 32] for i in range(0, len(change.digests), 32)]
    return {
        (group, change.namespace, change.first_position + i, digest)
        for group in event.groups
        for i, digest in enumerate(digests)
    }


def hittable(allocator: RunningAllocator, pool: str = "a") -> set[tuple[int, str, int, bytes]]:
    found = set()
    for stretch in index.walk(allocator.service.directory.pool(pool).pool):
        for i in range(0, len(stretch.digests), 32):
            found |= {
                (group, stretch.namespace, stretch.first_position + i // 32, stretch.digests[i : i + 32])
                for group in stretch.groups
            }
    return found


def keep_two_events(allocator: RunningAllocator, pool: str = "a") -> None:
    allocator.service.directory.pool(pool).pool.log.event_count_max = 2


async def filled(allocator: RunningAllocator, letters: str = "ab") -> UnaryOwner:
    owner = await UnaryOwner.open(allocator)
    await owner.allocate(sequence_id=1, token_count=4 * len(letters))
    await owner.commit(sequence_id=1, token_count=4 * len(letters), digests=d(letters))
    return owner


async def test_a_watch_begins_with_everything_that_can_be_hit(allocator: RunningAllocator) -> None:
    await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    assert watch.log == ["cleared", "stored", "snapshot_end"]
    assert watch.stored == hittable(allocator) == {(0, "", 0, d("ab")[:32]), (0, "", 1, d("ab")[32:])}


async def test_changes_follow_in_order_with_parent_block_size_and_session(allocator: RunningAllocator) -> None:
    owner = await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    await owner.grow(sequence_id=1, token_count=12)
    await owner.commit(sequence_id=1, token_count=12, digests=d("abc")[64:])
    event = await watch.next()
    assert event.session_id == owner.session_id
    assert (event.stored.parent_digest, event.stored.digests) == (d("ab")[32:], d("abc")[64:])
    assert (event.stored.block_size, event.stored.first_position, list(event.groups)) == (4, 2, [0])
    await owner.free(sequence_id=1)
    # takes 6 of 8 blocks, so the deepest of 3 cached ones is evicted
    await owner.allocate(sequence_id=2, token_count=24)
    assert (await watch.next()).removed.digests == d("abc")[64:]


async def test_a_digest_that_a_second_block_carries_is_neither_stored_nor_removed_again(
    allocator: RunningAllocator,
) -> None:
    owner = await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    await owner.allocate(sequence_id=2, token_count=8)
    await owner.commit(sequence_id=2, token_count=8, digests=d("ab"))
    await owner.free(sequence_id=1)
    await owner.allocate(sequence_id=3, token_count=4)
    await owner.commit(sequence_id=3, token_count=4, digests=d("z"))
    assert (await watch.next()).stored.digests == d("z")


async def test_what_a_step_did_is_told_only_once_its_reply_is_acknowledged(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    await owner.step(grows=grows((1, 4, b"")))
    await owner.step(commits=commits((1, 4, d("a"))))
    told = asyncio.create_task(watch.next())
    await owner.exchange(HEARTBEAT)  # a heartbeat without `ack` acknowledges nothing
    assert not told.done()
    await owner.exchange(pb.SessionRequest(heartbeat=pb.Heartbeat(ack=2)))
    event = await told
    assert (event.stored.digests, event.step) == (d("a"), 2)


async def test_nobody_is_told_what_hits_before_the_step_that_made_it_hit_is_acknowledged(
    allocator: RunningAllocator,
) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 12, b"")))
    await owner.step(commits=commits((1, 4, d("a"))))
    await owner.step(ack=2, commits=commits((1, 12, d("abc")[32:])))

    async def matched() -> list[int]:
        answer = await allocator.stub.MatchPrefix(pb.MatchPrefixRequest(digests=d("abcd")))
        return [match.matched_token_count for match in answer.matches]

    watch = Watch(allocator)
    await watch.until("snapshot_end")
    assert (await matched(), watch.stored) == ([4], {(0, "", 0, d("a"))})
    await owner.exchange(pb.SessionRequest(heartbeat=pb.Heartbeat(ack=3)))
    assert (await watch.next()).stored.digests == d("abc")[32:]
    assert (await matched(), watch.stored) == ([12], hittable(allocator))


async def test_a_watch_resumes_where_it_ended(allocator: RunningAllocator) -> None:
    owner = await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    watch.call.cancel()
    await owner.allocate(sequence_id=2, token_count=4)
    await owner.commit(sequence_id=2, token_count=4, digests=d("z"))
    again = Watch(allocator, watch.session_id, watch.cursor)
    assert (await again.next()).stored.digests == d("z")


async def test_a_cursor_that_is_not_kept_any_more_starts_over(allocator: RunningAllocator) -> None:
    owner = await filled(allocator, "a")
    keep_two_events(allocator)
    for sequence_id, letter in enumerate("wxyz", 2):
        await owner.allocate(sequence_id=sequence_id, token_count=4)
        await owner.commit(sequence_id=sequence_id, token_count=4, digests=d(letter))
    watch = Watch(allocator, owner.session_id, 1)
    await watch.until("snapshot_end")
    assert watch.log[0] == "cleared"
    assert watch.stored == hittable(allocator)


async def test_a_watcher_that_falls_behind_is_dropped_with_a_reason(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator, block_count=200_000)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    keep_two_events(allocator)
    digests = d("a") * 4096
    # These events fill every buffer on the way to a watcher that does not read. The watcher's handler then waits, but
    # steps do not.
    for sequence_id in range(1, 50):
        await owner.allocate(sequence_id=sequence_id, token_count=4 * 4096, namespace=str(sequence_id))
        await owner.commit(sequence_id=sequence_id, token_count=4 * 4096, digests=digests)
    with refused(Reason.WATCHER_SLOW):
        while isinstance(event := await watch.call.read(), pb.CacheEvent):
            assert event.stored.digests
        raise AssertionError("the watch ended without an error")


async def test_a_watcher_far_behind_is_served_in_turns_until_it_has_caught_up(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENTS_PER_TURN_MAX", 3)
    owner = await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    for sequence_id, letters in enumerate("cdefghij", 2):  # each sequence evicts the blocks of the previous one
        await owner.allocate(sequence_id=sequence_id, token_count=4, digests=d(letters))
        await owner.commit(sequence_id=sequence_id, token_count=4, digests=d(letters))
        await owner.free(sequence_id=sequence_id)
    log = allocator.service.directory.pool("a").pool.log
    assert log.last_cursor > 2 * limits.EVENTS_PER_TURN_MAX
    while watch.cursor < log.last_cursor:
        await watch.next()
    assert watch.stored == hittable(allocator)


async def test_a_new_session_of_the_pool_is_told_as_a_new_snapshot(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    watch = Watch(allocator)
    first = await watch.until("snapshot_end")
    await owner.hang_up()
    again = StreamOwner(allocator)
    await again.attach(epoch=2, resume_session=b"another session!")
    await again.send(EMPTY_REPORT)
    second = await watch.until("snapshot_end")
    assert watch.log == ["cleared", "snapshot_end"] * 2
    assert first.session_id != second.session_id


async def test_a_watch_ends_with_its_pool(allocator: RunningAllocator) -> None:
    owner = await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    await owner.close()
    with refused(Reason.POOL_UNKNOWN):
        await watch.call.read()


async def test_a_watch_ends_when_its_pool_is_quarantined(allocator: RunningAllocator) -> None:
    owner = await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    allocator.service.directory.pool("a").pool.blocks.cached_count += 1  # plants a defect: a wrong count
    with refused(Reason.POOL_QUARANTINED):
        await owner.grow(sequence_id=1, token_count=9)
    with refused(Reason.POOL_UNKNOWN):
        await watch.call.read()


async def test_a_watch_ends_when_the_allocator_drains(allocator: RunningAllocator) -> None:
    await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    allocator.service.drain()
    with refused(Reason.DRAINING):
        await watch.call.read()


async def test_an_unknown_pool_cannot_be_watched(allocator: RunningAllocator) -> None:
    with refused(Reason.POOL_UNKNOWN):
        await Watch(allocator).call.read()


async def test_the_number_of_watchers_is_limited(allocator: RunningAllocator) -> None:
    allocator.service.watching.places = CallerShares(1)
    await filled(allocator)
    first = Watch(allocator)
    await first.until("snapshot_end")
    with refused(Reason.LIMIT, "watches"):
        await Watch(allocator).call.read()
    first.call.cancel()


async def test_a_watch_of_a_quiet_pool_is_told_that_nothing_happens(
    allocator: RunningAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_allocator.watch.WATCH_BEAT_S", 0.01)
    await filled(allocator)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    owner = allocator.service.directory.pool("a")
    for _ in range(3):
        message = await watch.call.read()
        assert message.WhichOneof("change") == "progress"
        assert (message.session_id, message.cursor) == (owner.session_id, owner.pool.log.last_cursor)
    watch.call.cancel()


async def test_a_long_stretch_comes_in_pieces_that_fit_a_message(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator, block_count=20_000)
    digests = b"".join(i.to_bytes(32, "little") for i in range(10_000))
    await owner.allocate(sequence_id=1, token_count=40_000)
    await owner.commit(sequence_id=1, token_count=40_000, digests=digests)
    watch = Watch(allocator)
    await watch.until("snapshot_end")
    assert watch.log == ["cleared", "stored", "stored", "stored", "snapshot_end"]
    assert watch.stored == hittable(allocator)
    assert len(watch.stored) == 10_000


@pytest.mark.parametrize("seed", range(4))
async def test_a_watcher_knows_what_can_be_hit_after_any_history(allocator: RunningAllocator, seed: int) -> None:
    window = pb.GroupSpec(kind=pb.GROUP_KIND_SLIDING_WINDOW, block_size=4, window=6)
    pool = pb.PoolSpec(block_count=24, groups=[*spec().groups, window])
    opened = await allocator.stub.OpenSession(pb.OpenSessionRequest(version=3, request_id="open", pool="a", spec=pool))
    owner, chance = UnaryOwner(allocator, opened.session_id, group_count=2), random.Random(seed)
    watch = Watch(allocator)
    for sequence_id in range(1, 60):
        letters = "".join(chance.choice("ab") for _ in range(chance.randint(1, 5)))
        length = 4 * len(letters) + 1
        grown = await owner.allocate(sequence_id=sequence_id, token_count=length, digests=d(letters))
        if grown.result == pb.RESULT_OK:
            new = d(letters)[grown.matched_token_count * 8 :]
            await owner.commit(sequence_id=sequence_id, token_count=length, digests=new)
            await owner.free(sequence_id=sequence_id)
        if chance.random() < 0.1:  # another call continues from the cursor
            while watch.log[-1:] != ["snapshot_end"] and "snapshot_end" not in watch.log:
                await watch.next()
            watch.call.cancel()
            stored, log = watch.stored, watch.log
            watch = Watch(allocator, watch.session_id, watch.cursor)
            watch.stored, watch.log = stored, log
    last = allocator.service.directory.pool("a").pool.log.last_cursor
    while watch.cursor < last or "snapshot_end" not in watch.log:
        await watch.next()
    assert watch.stored == hittable(allocator)
