"""Sends malformed messages and bytes to every RPC of the allocator, over gRPC."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire.v1 import allocator_pb2 as pb
from quire.v1 import server_pb2

from tests.allocator.service.harness import EMPTY_REPORT, commits, d, grows, running_allocator, spec
from tests.fuzz.messages import Malformer
from tests.fuzz.wire import ask, converse, in_a_thread, listen

SERVICE = pb.DESCRIPTOR.services_by_name["AllocatorService"]
FUZZED = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


class Scene:
    """A channel to an allocator that also serves a bystander. The attacks must not disturb the bystander."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        request = pb.OpenSessionRequest(version=3, request_id="bystander", pool="bystander", spec=spec())
        self.bystander = self.call("OpenSession", request).session_id
        self.call("Apply", pb.Step(session_id=self.bystander, number=1, grows=grows((1, 9, d("ab")))))
        self.state = self.look()

    def call(self, method: str, request: Any) -> Any:
        """Makes a valid unary call."""
        path = f"/{SERVICE.full_name}/{method}"
        kind = GetMessageClass(SERVICE.methods_by_name[method].output_type)
        caller = self.channel.unary_unary(path, type(request).SerializeToString, kind.FromString)
        return caller(request, timeout=30)

    def look(self) -> bytes:
        """Returns everything that a reader can see of the bystander's pool."""
        seen = self.call("GetPoolBlocks", pb.GetPoolBlocksRequest(pool="bystander"))
        seen.summary.lease_remaining_ms = 0
        return bytes(seen.SerializeToString(deterministic=True))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with (
        in_a_thread(lambda: running_allocator(pools_max=1000)) as allocator,
        grpc.insecure_channel(allocator.address) as channel,
    ):
        yield Scene(channel)


def right_messages(scene: Scene, chance: random.Random) -> list[pb.SessionRequest]:
    """Returns the messages of a stream from attach to detach."""
    incarnation = bytes(chance.randint(0, 255) for _ in range(16))
    pool = f"pool-{chance.randint(0, 1 << 60)}"
    attach = pb.Attach(version=3, pool=pool, incarnation=incarnation, epoch=1, spec=spec(), window=2)
    step = pb.Step(session_id=bytes(16), number=1, grows=grows((1, 9, d("ab"))))
    messages = [pb.SessionRequest(attach=attach), EMPTY_REPORT, pb.SessionRequest(heartbeat=pb.Heartbeat())]
    return [*messages, pb.SessionRequest(step=step), pb.SessionRequest(detach=pb.Detach())]


RIGHT: dict[str, Any] = {
    "OpenSession": pb.OpenSessionRequest(version=3, request_id="r", pool="other", spec=spec()),
    "Apply": pb.Step(session_id=bytes(16), number=1, grows=grows((2, 3, d("ab"))), commits=commits((1, 4, d("a")))),
    "CloseSession": pb.CloseSessionRequest(session_id=bytes(16)),
    "DropCache": pb.DropCacheRequest(pool="other", drop=pb.CacheDrop(namespace="", digests=d("ab"))),
    "MatchPrefix": pb.MatchPrefixRequest(digests=d("ab")),
    "Route": pb.RouteRequest(model="model", digests=d("ab"), prompt_token_count=9, reservation_ms=1_000),
    "GetServerInfo": server_pb2.GetServerInfoRequest(),
    "ListPools": pb.ListPoolsRequest(),
    "GetPool": pb.GetPoolRequest(pool="bystander"),
    "GetPoolBlocks": pb.GetPoolBlocksRequest(pool="bystander", page_size=1),
    "GetPoolUsage": pb.GetPoolUsageRequest(pool="bystander"),
    "WatchEvents": pb.WatchEventsRequest(pool="bystander", session_id=bytes(16), cursor=1),
}


def test_every_rpc_is_fuzzed() -> None:
    assert {method.name for method in SERVICE.methods} == {*RIGHT, "Session"}


@pytest.mark.parametrize("method", RIGHT)
@given(chance=st.randoms(use_true_random=False))
@settings(FUZZED, max_examples=25)
def test_a_malformed_request_is_refused_with_a_reason_and_disturbs_nobody(
    scene: Scene, method: str, chance: random.Random
) -> None:
    malformer, right = Malformer(chance), RIGHT[method]
    message = malformer.anything(type(right)) if chance.random() < 0.3 else malformer.changed(right)
    data = message.SerializeToString()
    if chance.random() < 0.5:
        data = malformer.scrambled(data)
    call = listen if method == "WatchEvents" else ask
    call(scene.channel, f"/{SERVICE.full_name}/{method}", data)
    assert scene.look() == scene.state


@given(chance=st.randoms(use_true_random=False))
@FUZZED
def test_a_malformed_message_ends_its_stream_with_a_reason_and_disturbs_nobody(
    scene: Scene, chance: random.Random
) -> None:
    malformer, messages = Malformer(chance), right_messages(scene, chance)
    place = chance.randrange(len(messages))
    spoiled = malformer.changed(messages[place]) if chance.random() < 0.7 else malformer.anything(pb.SessionRequest)
    data = [message.SerializeToString() for message in messages]
    data[place] = spoiled.SerializeToString()
    if chance.random() < 0.5:
        data[place] = malformer.scrambled(data[place])
    converse(scene.channel, f"/{SERVICE.full_name}/Session", data)
    assert scene.look() == scene.state


@pytest.mark.parametrize("method", RIGHT)
def test_bytes_that_are_no_message_are_malformed(scene: Scene, method: str) -> None:
    call = listen if method == "WatchEvents" else ask
    error = call(scene.channel, f"/{SERVICE.full_name}/{method}", b"\xff\xff\xff")
    assert error is not None
    assert error.reason == "MALFORMED"


def test_bytes_that_are_no_message_of_the_session_are_malformed(scene: Scene) -> None:
    error = converse(scene.channel, f"/{SERVICE.full_name}/Session", [b"\xff\xff\xff"])
    assert error is not None
    assert error.reason == "MALFORMED"
