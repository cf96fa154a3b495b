"""Servers describe themselves, and owners follow the periods that the allocator announces."""

from __future__ import annotations

import pytest
import quire
from quire import AsyncAllocator
from quire.protocol.features import FEATURES, ROUTE
from quire.protocol.limits import HEARTBEAT_S, PROTOCOL_VERSION, SILENCE_S
from quire.session.owner import PoolOwner
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire.v1 import server_pb2
from quire_allocator.wire import translate

from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.service.harness import StreamOwner, running_allocator, spec


async def test_an_allocator_says_what_it_is() -> None:
    async with running_allocator() as allocator, AsyncAllocator(allocator.address) as client:
        info = await client.server_info()
        owner = StreamOwner(allocator)
        await owner.attach()
        ready = await owner.report()
    assert (info.version, info.protocol_version) == (quire.__version__, PROTOCOL_VERSION)
    assert info.features == (*FEATURES, ROUTE)
    assert info.core == ("compiled" if IS_COMPILED else "python")
    assert (info.limits.heartbeat_ms, info.limits.silence_ms, info.limits.stops_max) == (1000, 3000, 36)
    assert ready.limits == translate.LIMITS


def entered(**periods: int) -> PoolOwner:
    owner = PoolOwner("a", spec(), incarnation=bytes(16))
    owner.attach()
    owner.receive(packed.SessionReply(report_required=pb.ReportRequired()))
    ready = pb.Ready(session_id=b"s" * 16, next_step=1, limits=server_pb2.Limits(**periods))
    owner.receive(packed.SessionReply(ready=ready))
    return owner


@pytest.mark.parametrize(
    ("told", "heartbeat_s", "silence_s"),
    [
        ({"heartbeat_ms": 250, "silence_ms": 900}, 0.25, 0.9),
        ({}, HEARTBEAT_S, SILENCE_S),
        ({"heartbeat_ms": 1, "silence_ms": 1}, 0.01, 0.01),
    ],
)
def test_an_owner_goes_by_the_periods_that_it_is_told(
    told: dict[str, int], heartbeat_s: float, silence_s: float
) -> None:
    owner = entered(**told)
    assert (owner.heartbeat_s, owner.silence_s) == (heartbeat_s, silence_s)
