"""Features that a peer must not ignore have names. A side that does not know a name refuses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from quire import Allocator, AsyncAllocator, PoolSpec, QuireError, Reason
from quire.errors import FailedPreconditionError, from_rpc_error
from quire.protocol.features import FEATURES, FIRST_BLOCK_ID
from quire.protocol.limits import PROTOCOL_VERSION
from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import RunningAllocator, StreamOwner, refused, running_allocator, spec
from tests.client.servers import ScriptedServer, scripted_server

PLAIN = PoolSpec.full_attention(block_count=8, block_size=4)
RELYING = replace(PLAIN, append_only=True, first_block_id=3, tells_removed=True)


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


def asking(*names: str, first_block_id: int = 0) -> pb.PoolSpec:
    declared = spec()
    declared.features.extend(names)
    declared.first_block_id = first_block_id
    return declared


async def attach(allocator: RunningAllocator, declared: pb.PoolSpec) -> Any:
    owner = StreamOwner(allocator)
    assert (await owner.attach(spec=declared)).HasField("report_required")
    return await owner.report()


async def open_session(allocator: RunningAllocator, declared: pb.PoolSpec) -> Any:
    request = pb.OpenSessionRequest(version=PROTOCOL_VERSION, request_id="r", pool="a", spec=declared)
    return await allocator.stub.OpenSession(request)


DOORS = pytest.mark.parametrize("enter", [attach, open_session])


@DOORS
async def test_a_server_tells_the_features_that_it_knows(
    allocator: RunningAllocator, enter: Callable[..., Any]
) -> None:
    assert tuple((await enter(allocator, spec())).features) == FEATURES


@DOORS
async def test_every_feature_can_be_relied_on(allocator: RunningAllocator, enter: Callable[..., Any]) -> None:
    await enter(allocator, asking(*FEATURES, first_block_id=3))
    declared = (await allocator.stub.ListPools(pb.ListPoolsRequest())).pools[0].spec
    assert sorted(declared.features) == sorted(FEATURES)


@DOORS
async def test_an_unknown_feature_is_refused_by_name_and_takes_nothing(
    allocator: RunningAllocator, enter: Callable[..., Any]
) -> None:
    with refused(Reason.VERSION, "feature 'teleport' is not known.*append-only") as caught:
        await enter(allocator, asking("append-only", "teleport"))
    assert from_rpc_error(caught.value).field == "features"
    assert not (await allocator.stub.ListPools(pb.ListPoolsRequest())).pools
    await enter(allocator, spec())


@DOORS
async def test_a_first_block_id_counts_only_with_its_feature(
    allocator: RunningAllocator, enter: Callable[..., Any]
) -> None:
    with refused(Reason.MALFORMED, f"first_block_id must be left out without the feature {FIRST_BLOCK_ID}, not 3"):
        await enter(allocator, asking(first_block_id=3))
    await enter(allocator, asking(FIRST_BLOCK_ID))


async def test_a_session_is_resumed_with_the_same_features_alone(allocator: RunningAllocator) -> None:
    owner = StreamOwner(allocator)
    await owner.attach(spec=asking("append-only", "tells-removed"))
    await owner.report()
    with refused(Reason.LAYOUT):
        await StreamOwner(allocator).attach(epoch=2, resume_session=owner.session_id, spec=asking("append-only"))
    again = StreamOwner(allocator)
    reply = await again.attach(
        epoch=3, resume_session=owner.session_id, spec=asking("tells-removed", "append-only", "tells-removed")
    )
    assert tuple(reply.resumed.features) == FEATURES


# -- owners and clients from before features had names -----------------------------------------------------------------

OLD_BOOLEANS = b"\x50\x01" + b"\x60\x01"  # fields 10 and 12, append_only and tells_removed, are set


def old_spec() -> pb.PoolSpec:
    return pb.PoolSpec.FromString(spec().SerializeToString() + OLD_BOOLEANS)


async def test_an_old_owner_is_refused_by_its_version(allocator: RunningAllocator) -> None:
    with refused(Reason.VERSION, "version 2 is not supported: this allocator supports version 3; update the owner"):
        await StreamOwner(allocator).attach(version=2, spec=old_spec())


async def test_an_old_client_is_refused_by_its_version(allocator: RunningAllocator) -> None:
    with refused(Reason.VERSION, "version 0 is not supported"):
        await allocator.stub.OpenSession(pb.OpenSessionRequest(request_id="r", pool="a", spec=old_spec()))


# -- an older allocator, or one with other features --------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def attaching(features: tuple[str, ...]) -> Callable[[Iterator[pb.SessionRequest], grpc.ServicerContext], Any]:
    """Returns the answers of an allocator that knows these features and opens any pool."""

    def answer(requests: Iterator[pb.SessionRequest], _context: grpc.ServicerContext) -> Iterator[pb.SessionReply]:
        for request in requests:
            if request.HasField("attach"):
                yield pb.SessionReply(report_required=pb.ReportRequired())
            elif request.HasField("report_end"):
                ready = pb.Ready(session_id=bytes(16), next_step=1, lease_ms=10_000, features=features)
                yield pb.SessionReply(ready=ready)
            elif request.HasField("detach"):
                return

    return answer


def opening(features: tuple[str, ...]) -> Callable[..., pb.OpenSessionResponse]:
    return lambda *_: pb.OpenSessionResponse(session_id=bytes(16), lease_ms=10_000, features=features)


@pytest.mark.parametrize("transport", ["stream", "calls"])
@pytest.mark.parametrize(
    ("served", "missing"), [((), "append-only, first-block-id, tells-removed"), (FEATURES[1:], "append-only")]
)
async def test_an_owner_leaves_an_allocator_that_lacks_a_feature(
    server: ScriptedServer, transport: Any, served: tuple[str, ...], missing: str
) -> None:
    server.answers = {"Session": attaching(served), "OpenSession": opening(served)}
    server.answers["CloseSession"] = lambda *_: pb.CloseSessionResponse()
    async with AsyncAllocator(server.address) as client:
        with pytest.raises(FailedPreconditionError, match=f"lacks {missing}, which") as caught:
            await client.session("pool", RELYING, transport=transport).open()
        assert caught.value.reason is Reason.VERSION
        async with client.session("pool", PLAIN, transport=transport):
            pass  # This session relies on no feature, so the owner can attach.


def test_the_blocking_client_leaves_too(server: ScriptedServer) -> None:
    server.answers = {"OpenSession": opening(()), "CloseSession": lambda *_: pb.CloseSessionResponse()}
    with Allocator(server.address) as client, pytest.raises(QuireError, match="lacks append-only"):
        client.session("pool", RELYING, transport="calls").open()
