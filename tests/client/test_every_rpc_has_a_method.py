"""Each RPC of both services has a method on both flavors of the clients, and the method calls the RPC.

The method's name is the RPC's name in snake case, except for those in NAMES. The blocking client opens Session on an
event loop in a thread of its own, because an owner must send heartbeats while its caller computes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from quire import Allocator, AsyncAllocator, AsyncClient, Client, PoolSpec, Reason
from quire.errors import FailedPreconditionError
from quire.events import IndexCleared
from quire.protocol.steps import StepBuilder
from quire.v1 import allocator_pb2 as pb
from quire.v1 import worker_pb2 as worker_pb

from tests.client.servers import ScriptedServer, refusing, scripted_server, two_samples

NAMES = {
    "GetServerInfo": "server_info",
    "GetStatus": "status",
    "OpenSession": "session",
    "Apply": "step",
    "CloseSession": "close",
    "ForkBranch": "fork",
    "ExtendBranch": "extend",
    "ScoreBranch": "score",
    "ReleaseBranches": "release",
    "RenewBranches": "keep_alive",
    "ListRequests": "requests",
    "CancelRequest": "cancel",
}
OF_A_SESSION = {"Apply", "CloseSession"}
OF_A_BRANCH = {"ForkBranch", "ExtendBranch", "ScoreBranch", "ReleaseBranches"}
SPEC = PoolSpec.full_attention(block_count=8, block_size=4)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Session": ("pool", SPEC),
    "OpenSession": ("pool", SPEC),
    "Apply": (StepBuilder(),),
    "DropCache": ("pool",),
    "MatchPrefix": ([],),
    "Route": ("model", [], 1),
    "GetPool": ("pool",),
    "GetPoolBlocks": ("pool",),
    "GetPoolUsage": ("pool",),
    "WatchEvents": ("pool",),
    "Generate": ("prompt",),
    "Prefill": ("prompt",),
    "ExtendBranch": ("more",),
    "ScoreBranch": (["a"],),
    "Tokenize": ("prompt",),
    "Detokenize": ([1],),
    "LoadAdapter": ("name", "folder"),
    "UnloadAdapter": ("name",),
    "CancelRequest": ("id",),
}
RPCS = [
    (service.name, method)
    for service in (
        pb.DESCRIPTOR.services_by_name["AllocatorService"],
        worker_pb.DESCRIPTOR.services_by_name["WorkerService"],
    )
    for method in service.methods
]


def _answer_with(message: Callable[[], Any], _request: Any, _context: grpc.ServicerContext) -> Any:
    return message()


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        for _, method in RPCS:
            empty = GetMessageClass(method.output_type)
            running.answers[method.name] = partial(_answer_with, empty)
        summary = pb.PoolSummary(pool="pool", session_kind=pb.SESSION_KIND_UNARY)
        for answer in (pb.GetPoolResponse, pb.GetPoolBlocksResponse, pb.GetPoolUsageResponse):
            name = answer.__name__.removesuffix("Response")
            running.answers[name] = partial(_answer_with, partial(answer, summary=summary))
        running.answers["OpenSession"] = lambda *_: pb.OpenSessionResponse(session_id=bytes(16), next_step=1)
        running.answers["Apply"] = lambda *_: pb.StepReply(session_id=bytes(16), number=1)
        running.answers["Generate"] = two_samples
        running.answers["WatchEvents"] = lambda *_: iter([pb.CacheEvent(cleared=pb.IndexCleared())])
        running.answers["Prefill"] = lambda *_: worker_pb.PrefillResponse(branch_id=bytes(16), ttl_ms=60_000)
        running.answers["Session"] = refusing(Reason.LAYOUT)
        yield running


def method_name(rpc: str) -> str:
    return NAMES.get(rpc, re.sub(r"(?<!^)([A-Z])", r"_\1", rpc).lower())


@pytest.mark.parametrize(("service", "method"), RPCS, ids=lambda value: getattr(value, "name", value))
def test_the_synchronous_client_calls_it(server: ScriptedServer, service: str, method: Any) -> None:
    before = server.attempts[method.name]
    with (Allocator if service == "AllocatorService" else Client)(server.address) as client:
        target: Any = client
        if method.name in OF_A_SESSION:
            target = client.session("pool", SPEC, transport="calls", keep_alive=False)  # type: ignore[union-attr]
            target.open()
        if method.name in OF_A_BRANCH:
            target = client.prefill("prompt")  # type: ignore[union-attr]
        if method.name == "RenewBranches":
            branch = client.prefill("prompt")  # type: ignore[union-attr]
            target = branch._opened
        # Without `keep_alive=False` the session would still send calls during the next test.
        options = {"transport": "calls", "keep_alive": False} if method.name == "OpenSession" else {}
        outcome = getattr(target, method_name(method.name))(*ARGUMENTS.get(method.name, ()), **options)
        if method.name == "Session":
            with pytest.raises(FailedPreconditionError, match="as the script says"), outcome:
                pass
            # The count may grow by more than 1: the asyncio test below says why.
            assert server.attempts[method.name] > before
            return
        if method.name == "OpenSession":
            outcome.open()
        if method.name == "WatchEvents":
            assert len(list(outcome)) == 1
    assert server.attempts[method.name] == before + 1


@pytest.mark.parametrize(("service", "method"), RPCS, ids=lambda value: getattr(value, "name", value))
async def test_the_asyncio_client_calls_it(server: ScriptedServer, service: str, method: Any) -> None:
    before = server.attempts[method.name]
    async with (AsyncAllocator if service == "AllocatorService" else AsyncClient)(server.address) as client:
        target: Any = client
        if method.name in OF_A_SESSION:
            target = client.session("pool", SPEC, transport="calls", keep_alive=False)  # type: ignore[union-attr]
            await target.open()
        if method.name in OF_A_BRANCH:
            target = await client.prefill("prompt")  # type: ignore[union-attr]
        if method.name == "RenewBranches":
            branch = await client.prefill("prompt")  # type: ignore[union-attr]
            target = branch._opened
        options = {"transport": "calls", "keep_alive": False} if method.name == "OpenSession" else {}
        outcome = getattr(target, method_name(method.name))(*ARGUMENTS.get(method.name, ()), **options)
        if method.name == "Session":
            with pytest.raises(FailedPreconditionError, match="as the script says"):
                await outcome.open()
            # The script refuses before it reads. If the client's write fails first, gRPC hides the reason, and the
            # session attaches again: the count grows by more than 1.
            assert server.attempts[method.name] > before
            return
        if method.name == "OpenSession":
            outcome = outcome.open()
        if method.name == "WatchEvents":
            assert [type(event) async for event in outcome] == [IndexCleared]
        else:
            assert inspect.isawaitable(outcome)
            await outcome
    assert server.attempts[method.name] == before + 1
