"""A watcher that applies its events knows exactly a pool's possible hits, even if its connection breaks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from grpc import aio
from quire import AsyncAllocator, GroupKind, GroupSpec, NotFoundError, PoolSpec, Reason
from quire.events import BlocksRemoved, BlocksStored, IndexCleared, SnapshotEnd
from quire.hashing import block_digests, split_digests
from quire.mirror import PrefixMirror
from quire.protocol.steps import StepBuilder
from quire.session import Result
from quire.streams import AsyncEventStream
from quire_allocator.core.events import EventLog
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import index
from quire_allocator.metrics.counters import Counters
from quire_allocator.service import AllocatorService, add_to_server

from tests.allocator.service.one_by_one import OneByOne, calls

pytestmark = pytest.mark.timeout(60)

SESSION = b"s" * 16
ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32
FULL = GroupSpec(GroupKind.FULL_ATTENTION, 4)
POOLS = {
    "full": PoolSpec(24, (FULL,)),
    "two sizes": PoolSpec(48, (GroupSpec(GroupKind.FULL_ATTENTION, 8), FULL)),
    "sliding": PoolSpec(
        64, (FULL, GroupSpec(GroupKind.SLIDING_WINDOW, 4, 10), GroupSpec(GroupKind.SLIDING_WINDOW, 4, 10))
    ),
    "chunked": PoolSpec(64, (GroupSpec(GroupKind.CHUNKED_LOCAL, 8, 16), FULL)),
    "state": PoolSpec(40, (FULL, GroupSpec(GroupKind.STATE, 8))),
    "no full attention": PoolSpec(32, (GroupSpec(GroupKind.SLIDING_WINDOW, 4, 6), GroupSpec(GroupKind.STATE, 12))),
}


@dataclass
class Scene:
    """An allocator with connections that can be cut without losing its state."""

    spec: PoolSpec
    service: AllocatorService
    server: aio.Server | None = None
    port: int = 0
    client: AsyncAllocator = field(init=False)

    async def serve(self) -> None:
        """Starts to listen, on the same port as before."""
        self.server = aio.server(options=[("grpc.so_reuseport", 0)])
        add_to_server(self.service, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def cut(self) -> None:
        """Ends every call."""
        assert self.server is not None
        await self.server.stop(None)

    @property
    def pool(self) -> Pool:
        return self.service.directory.pool("a").pool

    async def check(self, mirror: PrefixMirror, prompts: Sequence[tuple[str, list[bytes]]]) -> None:
        """Checks that the mirror has exactly the pool's hits, and agrees with it about every prompt."""
        assert mirror.is_exact
        held: dict[tuple[int, str], set[bytes]] = {}
        for stretch in index.walk(self.pool):
            for group in stretch.groups:
                held.setdefault((group, stretch.namespace), set()).update(split_digests(stretch.digests))
        for group in range(len(self.spec.groups)):
            for namespace in ("", "tenant"):
                assert mirror.stored(group, namespace) == held.get((group, namespace), set())
        for namespace, digests in prompts:
            found = await self.client.match_prefix(digests, namespace)
            assert mirror.matched_token_count(digests, namespace) == (found[0].matched_token_count if found else 0)


@asynccontextmanager
async def setting(spec: PoolSpec) -> AsyncIterator[Scene]:
    service = AllocatorService(Directory(lease_s=60, pools_max=4), Counters(), check_invariants=True)
    scene = Scene(spec, service)
    await scene.serve()
    try:
        async with AsyncAllocator(f"127.0.0.1:{scene.port}") as scene.client:
            yield scene
    finally:
        await scene.cut()


async def catch_up(events: AsyncEventStream, mirror: PrefixMirror, log: EventLog) -> None:
    """Applies events until the stream has come to the end of the log."""
    while not (mirror.is_exact and events.cursor == log.last_cursor):
        mirror.apply(await anext(events))


class RandomOwner:
    """Makes random operations on sequences of a few prompts that share prefixes, with the digests of an honest
    owner."""

    def __init__(self, seed: int, spec: PoolSpec) -> None:
        self.random = random.Random(seed)
        self.size = spec.block_size
        self.prompts: list[tuple[str, list[bytes]]] = []
        for branch in range(12):
            tokens = [branch % 3] * 4 * self.size + [branch] * 8 * self.size
            digests = block_digests(bytes(32), tokens, self.size)
            self.prompts += [("", digests), ("tenant", digests)]
        self.live: dict[int, tuple[str, list[bytes], int, int]] = {}  # id -> namespace, digests, granted, committed
        self.last_id = 0

    async def act(self, session: OneByOne) -> None:
        """Sends one random operation. Most refused operations change nothing here, either."""
        kind = self.random.choice(["allocate", "allocate", "commit", "commit", "commit", "grow", "fork", "free"])
        if kind == "allocate" or not self.live:
            await self._allocate(session)
            return
        sequence_id = self.random.choice(list(self.live))
        namespace, digests, granted, committed = self.live[sequence_id]
        if kind == "grow":
            wanted = min(granted + self.random.randrange(1, 9), len(digests) * self.size)
            if (await session.grow(sequence_id, wanted)).ok:
                self.live[sequence_id] = (namespace, digests, max(granted, wanted), committed)
            else:
                await self._free(session)
        elif kind == "commit":
            until = granted if self.random.random() < 0.5 else self.random.randint(committed, granted)
            until = max(committed, until - until % self.random.choice([1, 2 * self.size, 3 * self.size]))
            filled = digests[committed // self.size : until // self.size]
            assert (await session.commit(sequence_id, until, filled)).ok
            self.live[sequence_id] = (namespace, digests, granted, until)
        elif kind == "fork":
            if (await session.fork(sequence_id, self.last_id + 1)).result is Result.OK:
                self.last_id += 1
                self.live[self.last_id] = (namespace, digests, committed, committed)
        else:
            await self._free(session)

    async def _free(self, session: OneByOne) -> None:
        sequence_id = self.random.choice(list(self.live))
        await session.free(sequence_id)
        del self.live[sequence_id]

    async def _allocate(self, session: OneByOne) -> None:
        namespace, digests = self.random.choice(self.prompts)
        wanted = self.random.randint(1, len(digests) * self.size)
        made = await session.allocate(self.last_id + 1, wanted, digests, namespace)
        if made.ok:
            self.last_id += 1
            matched = made.matched_token_count
            self.live[self.last_id] = (namespace, digests, max(wanted, matched), matched)
        elif self.live:
            await self._free(session)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", POOLS)
async def test_a_watcher_ends_with_exactly_what_the_pool_can_hit(kind: str, seed: int) -> None:
    """The watch is closed or its connection is cut, during or after a snapshot, and then continued."""
    spec = POOLS[kind]
    async with setting(spec) as scene, calls(scene.client, "a", spec) as session:
        owner, mirror = RandomOwner(seed, spec), PrefixMirror(spec)
        for _ in range(30):
            await owner.act(session)
        events = scene.client.watch_events("a")
        for turn in range(48):
            for _ in range(owner.random.randrange(16)):
                await owner.act(session)
            if owner.random.random() < 0.5:
                await catch_up(events, mirror, scene.pool.log)
                await scene.check(mirror, owner.prompts)
            elif events.cursor < scene.pool.log.last_cursor or not mirror.is_exact:
                mirror.apply(await anext(events))
            if turn % 8 == 3:
                session_id, cursor = events.session_id, events.cursor
                await events.aclose()
                events = scene.client.watch_events("a", session_id, cursor)
            elif turn % 8 == 7:
                await scene.cut()
                await scene.serve()
        await catch_up(events, mirror, scene.pool.log)
        await scene.check(mirror, owner.prompts)
        assert scene.pool.log.last_cursor > 20
        await events.aclose()


async def test_after_a_cut_connection_no_second_snapshot_is_needed() -> None:
    async with setting(POOLS["full"]) as scene, calls(scene.client, "a", scene.spec) as session:
        owner, mirror = RandomOwner(7, scene.spec), PrefixMirror(scene.spec)
        async with scene.client.watch_events("a") as events:
            await catch_up(events, mirror, scene.pool.log)
            await scene.cut()
            await scene.serve()
            for _ in range(40):
                await owner.act(session)
            kinds = set()
            while events.cursor < scene.pool.log.last_cursor:
                event = await anext(events)
                kinds.add(type(event))
                mirror.apply(event)
            assert kinds <= {BlocksStored, BlocksRemoved}
            await scene.check(mirror, owner.prompts)


async def test_a_new_session_of_the_pool_is_told_as_another_snapshot() -> None:
    spec = POOLS["full"]
    async with setting(spec) as scene:
        owner = scene.client.session("a", spec)
        await owner.open()
        step = StepBuilder()
        step.allocate(1, 4)
        await owner.step(step)
        step = StepBuilder()
        step.commit(1, 4, [ONE])
        await owner.step(step)
        await owner.step(StepBuilder())  # This empty step acknowledges the commit.
        mirror = PrefixMirror(spec)
        async with scene.client.watch_events("a") as events:
            while not mirror.is_exact:
                mirror.apply(await anext(events))
            assert (mirror.stored(0), mirror.matched_token_count([ONE])) == ({ONE}, 4)
            before = mirror.session_id
            owner._owner.disown()  # The owner reports its pool next, as if the allocator had lost it.
            owner._drop()
            mirror.apply(await anext(events))
            assert (mirror.is_exact, mirror.stored(0)) == (False, frozenset())
            while not mirror.is_exact:
                mirror.apply(await anext(events))
            assert (mirror.stored(0), mirror.matched_token_count([ONE])) == ({ONE}, 4)
            assert mirror.session_id != before
        await owner.close()


async def test_a_watch_ends_with_not_found_when_its_pool_goes() -> None:
    async with setting(POOLS["full"]) as scene:
        session = calls(scene.client, "a", scene.spec)
        await session.open()
        events = scene.client.watch_events("a")
        assert [type(await anext(events)) for _ in range(2)] == [IndexCleared, SnapshotEnd]
        await session.close()
        with pytest.raises(NotFoundError) as raised:
            await anext(events)
        assert raised.value.reason is Reason.POOL_UNKNOWN


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("full", (24, 20, 12)),
        ("two sizes", (24, 16, 8)),
        ("sliding", (24, 20, 12)),
        ("chunked", (24, 16, 8)),
        ("state", (24, 20, 8)),
        ("no full attention", (24, 20, 12)),
    ],
)
async def test_a_hit_is_as_long_as_every_group_can_serve(kind: str, lengths: tuple[int, int, int]) -> None:
    """Computes a prompt of 24 tokens 4 at a time. Then matches all of it, all but its last block, and half of it."""
    spec = POOLS[kind]
    digests = block_digests(bytes(32), list(range(24)), 4)
    half = [*digests[:3], *block_digests(digests[2], [7] * 12, 4)]
    async with setting(spec) as scene, calls(scene.client, "a", spec) as session:
        await session.allocate(1, 4, prompt_token_count=24)
        for number, digest in enumerate(digests, 1):
            await session.grow(1, 4 * number)
            await session.commit(1, 4 * number, [digest])
        mirror = PrefixMirror(spec)
        async with scene.client.watch_events("a") as events:
            await catch_up(events, mirror, scene.pool.log)
        prompts = [("", digests), ("", digests[:5]), ("", half)]
        await scene.check(mirror, prompts)
        assert tuple(mirror.matched_token_count(prompt) for _, prompt in prompts) == lengths


def test_an_event_told_twice_changes_a_mirror_once() -> None:
    mirror = PrefixMirror(POOLS["full"])
    common = ("p", SESSION, 1, 0)
    told = BlocksStored(*common, (0,), "", b"", (ONE, TWO), 4, 0)
    for event in (IndexCleared(*common), told, told, SnapshotEnd(*common), told):
        mirror.apply(event)
    assert mirror.matched_token_count([ONE, TWO, THREE]) == 8
    assert mirror.matched_token_count([ONE, THREE]) == 4
    assert mirror.matched_token_count([ONE], "tenant") == mirror.matched_token_count([]) == 0
    gone = BlocksRemoved(*common, (0,), "", (TWO,), 1)
    mirror.apply(gone)
    mirror.apply(gone)
    assert mirror.matched_token_count([ONE, TWO]) == 4
    assert mirror.stored(0) == {ONE}
