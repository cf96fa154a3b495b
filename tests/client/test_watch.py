"""Tests event streams: their events, where they continue after a break, and the errors that end them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from quire import (
    Allocator,
    AsyncAllocator,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from quire.events import BlocksRemoved, BlocksStored, CacheEvent, IndexCleared, SnapshotEnd
from quire.v1 import allocator_pb2 as pb

from tests.client.servers import ScriptedServer, refusing, scripted_server

pytestmark = pytest.mark.timeout(60)

SESSION = b"s" * 16
ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32


@pytest.fixture(params=["sync", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def cleared(cursor: int = 5) -> pb.CacheEvent:
    return pb.CacheEvent(pool="p", session_id=SESSION, cursor=cursor, cleared=pb.IndexCleared())


def snapshot_end(cursor: int = 5) -> pb.CacheEvent:
    return pb.CacheEvent(pool="p", session_id=SESSION, cursor=cursor, snapshot_end=pb.SnapshotEnd())


def stored(cursor: int, digest: bytes = ONE) -> pb.CacheEvent:
    change = pb.BlocksStored(digests=digest, block_size=4)
    return pb.CacheEvent(pool="p", session_id=SESSION, cursor=cursor, groups=[0], stored=change)


def attempts(*script: Sequence[pb.CacheEvent | grpc.StatusCode | Reason]) -> Any:
    """Returns an answer. In each attempt it sends the next events and ends as the script says."""
    left = iter(script)

    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[pb.CacheEvent]:
        for item in next(left):
            if isinstance(item, Reason):
                refusing(item)(request, context)
            elif isinstance(item, pb.CacheEvent):
                yield item
            else:
                context.abort(item, "as the script says")

    return answer


def watched(flavour: str, address: str, *arguments: Any, **options: Any) -> tuple[list[CacheEvent], QuireError | None]:
    """Returns all events of one watch, and the error that ended it."""
    found: list[CacheEvent] = []

    async def over_asyncio() -> None:
        async with AsyncAllocator(address) as client, client.watch_events("p", *arguments, **options) as events:
            async for event in events:
                found.append(event)

    def over_threads() -> None:
        with Allocator(address) as client, client.watch_events("p", *arguments, **options) as events:
            found.extend(events)

    try:
        asyncio.run(over_asyncio()) if flavour == "asyncio" else over_threads()
    except QuireError as error:
        return found, error
    return found, None


def asked(server: ScriptedServer) -> list[tuple[bytes, int]]:
    """Returns the session and the cursor of each attempt."""
    return [(request.session_id, request.cursor) for request in server.requests]


def test_events_come_as_values_of_their_kind(flavour: str, server: ScriptedServer) -> None:
    change = pb.BlocksStored(namespace="n", parent_digest=ONE, digests=TWO + THREE, block_size=16, first_position=1)
    common = {"pool": "p", "session_id": SESSION}
    server.answers["WatchEvents"] = attempts(
        [
            pb.CacheEvent(**common, cursor=3, cleared=pb.IndexCleared()),
            pb.CacheEvent(**common, cursor=3, groups=[0, 2], stored=change),
            pb.CacheEvent(**common, cursor=3, snapshot_end=pb.SnapshotEnd()),
            pb.CacheEvent(**common, cursor=4, step=7),
            pb.CacheEvent(
                **common,
                cursor=4,
                step=7,
                groups=[1],
                removed=pb.BlocksRemoved(namespace="n", digests=ONE, first_position=9),
            ),
        ]
    )
    events, error = watched(flavour, server.address)
    assert error is None
    assert events == [
        IndexCleared("p", SESSION, 3, 0),
        BlocksStored("p", SESSION, 3, 0, (0, 2), "n", ONE, (TWO, THREE), 16, 1),
        SnapshotEnd("p", SESSION, 3, 0),
        BlocksRemoved("p", SESSION, 4, 7, (1,), "n", (ONE,), 9),
    ], "an event of an unknown kind is passed over"


def test_a_watch_that_is_cut_off_goes_on_after_its_last_event(flavour: str, server: ScriptedServer) -> None:
    lost = grpc.StatusCode.UNAVAILABLE
    server.answers["WatchEvents"] = attempts(
        [cleared(), stored(5), snapshot_end(), stored(6), lost], [lost], [stored(7), stored(8), Reason.DRAINING], []
    )
    waits: list[QuireError] = []
    events, error = watched(flavour, server.address, on_wait=waits.append)
    assert error is None
    assert [event.cursor for event in events] == [5, 5, 5, 6, 7, 8]
    assert asked(server) == [(b"", 0), (SESSION, 6), (SESSION, 6), (SESSION, 8)]
    assert [wait.reason for wait in waits] == [None, None, Reason.DRAINING]


def test_a_snapshot_that_is_cut_off_is_begun_again(flavour: str, server: ScriptedServer) -> None:
    lost = grpc.StatusCode.UNAVAILABLE
    server.answers["WatchEvents"] = attempts(
        [cleared(), stored(5), lost], [cleared(6), snapshot_end(6), cleared(1), stored(1), lost], []
    )
    events, _ = watched(flavour, server.address, SESSION, 2)
    assert len(events) == 6
    assert asked(server) == [(SESSION, 2), (b"", 0), (b"", 0)]


def test_a_watch_that_hears_nothing_is_taken_up_again(
    flavour: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may keep a connection open and answer pings although the server behind it is gone."""
    monkeypatch.setattr("quire._transport.streams.SILENCE_S", 0.3)
    scripts = iter([[cleared(), snapshot_end(), stored(6)], [], [stored(7)]])

    def quiet(_request: Any, _context: grpc.ServicerContext) -> Iterator[pb.CacheEvent]:
        script = next(scripts, None)
        yield from script or ()
        if script is not None:
            server.released.wait(30)

    server.answers["WatchEvents"] = quiet
    waits: list[QuireError] = []
    events, error = watched(flavour, server.address, on_wait=waits.append)
    assert error is None
    assert [event.cursor for event in events] == [5, 5, 6, 7]
    assert asked(server) == [(b"", 0), (SESSION, 6), (SESSION, 6), (SESSION, 7)]
    assert ["sent nothing" in str(wait) for wait in waits] == [True] * 3


def test_a_watch_whose_events_are_taken_late_is_not_silent(
    flavour: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire._transport.streams.SILENCE_S", 0.2)
    server.answers["WatchEvents"] = attempts([cleared(), snapshot_end(), stored(6)])
    taken: list[CacheEvent] = []

    async def over_asyncio() -> None:
        async with AsyncAllocator(server.address) as client, client.watch_events("p") as events:
            async for event in events:
                taken.append(event)
                await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.5)

    def over_threads() -> None:
        with Allocator(server.address) as client, client.watch_events("p") as events:
            for event in events:
                taken.append(event)
                threading.Event().wait(0.5)

    asyncio.run(over_asyncio()) if flavour == "asyncio" else over_threads()
    assert (len(taken), server.attempts["WatchEvents"]) == (3, 1)


def test_a_stream_says_where_a_later_one_may_go_on(server: ScriptedServer) -> None:
    server.answers["WatchEvents"] = attempts([cleared(), stored(5), snapshot_end(), stored(6)])
    with Allocator(server.address) as client, client.watch_events("p", SESSION, 2) as events:
        seen = [(events.session_id, events.cursor)]
        seen += [(events.session_id, events.cursor) for _ in events]
    assert seen == [(SESSION, 2), (b"", 0), (b"", 0), (SESSION, 5), (SESSION, 6)]


def test_a_watch_that_never_began_is_given_up_after_the_fourth_attempt(flavour: str, server: ScriptedServer) -> None:
    server.answers["WatchEvents"] = refusing(Reason.DRAINING)
    events, error = watched(flavour, server.address)
    assert isinstance(error, UnavailableError)
    assert (events, error.reason, server.attempts["WatchEvents"]) == ([], Reason.DRAINING, 4)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [(Reason.POOL_UNKNOWN, NotFoundError), (Reason.WATCHER_SLOW, ResourceExhaustedError)],
)
def test_what_resuming_cannot_mend_is_the_callers(
    flavour: str, server: ScriptedServer, reason: Reason, kind: type[QuireError]
) -> None:
    server.answers["WatchEvents"] = attempts([cleared(), snapshot_end(), reason])
    events, error = watched(flavour, server.address)
    assert isinstance(error, kind)
    assert (len(events), error.reason, server.attempts["WatchEvents"]) == (2, reason, 1)


def test_a_watch_ends_when_its_time_is_up(flavour: str, server: ScriptedServer) -> None:
    def silent(_request: Any, _context: grpc.ServicerContext) -> Iterator[pb.CacheEvent]:
        yield cleared()
        server.released.wait(30)

    server.answers["WatchEvents"] = silent
    events, error = watched(flavour, server.address, timeout_s=0.3)
    assert isinstance(error, DeadlineExceededError)
    assert len(events) == 1


def test_no_attempt_is_made_when_the_time_is_up(flavour: str, server: ScriptedServer) -> None:
    lost = grpc.StatusCode.UNAVAILABLE
    server.answers["WatchEvents"] = attempts([cleared(), lost], *[[lost]] * 20)
    _, error = watched(flavour, server.address, timeout_s=0.4)
    assert isinstance(error, UnavailableError | DeadlineExceededError)
    assert 1 < server.attempts["WatchEvents"] < 6


def test_a_cursor_that_fits_no_field_is_refused(server: ScriptedServer) -> None:
    with Allocator(server.address) as client, pytest.raises(InvalidArgumentError, match="cursor"):
        client.watch_events("p", SESSION, -1)


def test_closing_a_watch_that_waits_for_an_event_ends_the_thread_that_reads_it(server: ScriptedServer) -> None:
    begun = threading.Event()

    def silent(_request: Any, context: grpc.ServicerContext) -> Iterator[pb.CacheEvent]:
        context.add_callback(server.cancelled.set)
        yield cleared()
        server.released.wait(30)

    def read() -> None:
        for _ in events:
            begun.set()

    server.answers["WatchEvents"] = silent
    with Allocator(server.address) as client:
        events = client.watch_events("p")
        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(10)
        events.close()
        reader.join(10)
        assert not reader.is_alive()
        assert server.cancelled.wait(10)
