"""Tests numbers at the limits of every timeout parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from quire import Allocator, AsyncAllocator, AsyncClient, Client, InvalidArgumentError, Reason
from quire.local import DRAIN_S_MAX, LocalStack
from quire.v1 import allocator_pb2 as pb
from quire.v1 import worker_pb2 as worker_pb

from tests.client.servers import ScriptedServer, scripted_server, two_samples

LONG = [1e8, 1e10, 1e300, math.inf, 10**12]
WRONG: list[Any] = [math.nan, -1.0, -math.inf, True, "5"]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        scripted.answers["ListPools"] = lambda _request, _context: pb.ListPoolsResponse()
        scripted.answers["GetStatus"] = lambda _request, _context: worker_pb.GetStatusResponse()
        scripted.answers["Generate"] = two_samples
        scripted.answers["WatchEvents"] = lambda _request, _context: iter(
            [pb.CacheEvent(snapshot_end=pb.SnapshotEnd())]
        )
        yield scripted


CALLS: list[Callable[[str, Any], Any]] = [
    lambda address, timeout_s: Allocator(address).list_pools(timeout_s=timeout_s),
    lambda address, timeout_s: Allocator(address, timeout_s=timeout_s).list_pools(),
    lambda address, timeout_s: Client(address, timeout_s=timeout_s).tokenize,
    lambda address, timeout_s: Client(address).generate("p", timeout_s=timeout_s),
    lambda address, timeout_s: next(Allocator(address).watch_events("p", timeout_s=timeout_s)),
]


@pytest.mark.parametrize("timeout_s", LONG)
@pytest.mark.parametrize("call", CALLS)
def test_a_very_long_time_is_no_short_one(
    call: Callable[[str, Any], Any], timeout_s: float, server: ScriptedServer
) -> None:
    assert call(server.address, timeout_s) is not None
    assert server.time_remaining_s > 3_600


@pytest.mark.parametrize("timeout_s", WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_time_is_refused_with_its_value(
    call: Callable[[str, Any], Any], timeout_s: float, server: ScriptedServer
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"timeout_s .* not {timeout_s!r}") as raised:
        call(server.address, timeout_s)
    assert raised.value.reason is Reason.BAD_PARAMETER


@pytest.mark.parametrize("timeout_s", LONG)
async def test_a_very_long_time_is_none_for_asyncio_either(timeout_s: float, server: ScriptedServer) -> None:
    async with AsyncAllocator(server.address) as allocator, AsyncClient(server.address) as worker:
        assert await allocator.list_pools(timeout_s=timeout_s) == ()
        assert (await worker.generate("p", timeout_s=timeout_s)).samples
        assert await anext(allocator.watch_events("p", timeout_s=timeout_s))
        with pytest.raises(InvalidArgumentError):
            await allocator.list_pools(timeout_s=math.nan)


@pytest.mark.parametrize("timeout_s", WRONG)
@pytest.mark.parametrize("name", ["start_timeout_s", "drain_timeout_s"])
def test_what_is_no_time_starts_no_servers(name: str, timeout_s: Any) -> None:
    given: dict[str, Any] = {name: timeout_s}
    with pytest.raises(InvalidArgumentError, match=f"{name} must be 0 or more seconds, not {timeout_s!r}"):
        LocalStack("model", **given)


@pytest.mark.parametrize("timeout_s", LONG)
def test_servers_may_have_any_time(timeout_s: float) -> None:
    stack = LocalStack("model", start_timeout_s=timeout_s, drain_timeout_s=timeout_s)
    assert math.isfinite(stack._start_timeout_s)
    assert stack._drain_timeout_s == DRAIN_S_MAX
