"""Tests the security matrix: every kind of caller calls every RPC of both services and health."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.errors import Reason, code_of, from_rpc_error
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire.v1 import server_pb2
from quire.v1 import worker_pb2 as worker_pb
from quire.v1 import worker_pb2_grpc as worker_pb_grpc

from tests.allocator.service.harness import EMPTY_REPORT, commits, d, grows, spec
from tests.security.certificates import Certificates
from tests.security.deployment import TOKEN, Caller, Deployment, deployed

WAIT_S = 30.0
NAMES = (f"fresh/{number}" for number in itertools.count())
IDS = (f"request {number}" for number in itertools.count())

# Name of a caller with a valid certificate -> options that give the certificate its permissions.
PERMITTED = {
    "everything": ["--pool", "*", "--namespace", "*"],
    "nothing": [],
    "another pool": ["--pool", "other", "--observe", "other*", "--namespace", "*"],
    "an observer": ["--observe", "*", "--namespace", "*"],
    "another namespace": ["--pool", "*", "--namespace", "blue"],
}
CLOSED = ("plain", "no certificate", "stranger", "expired", "server")
NO_TOKEN = ("no token", "wrong token")


class Scene:
    """The deployment, with a pool `a` that has a sequence in the namespace `red`, and the connections of every
    caller."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        certificates = deployment.certificates
        everything = certificates.client("everything")
        self.callers = {
            "plain": Caller(None),
            "no certificate": Caller(certificates.anonymous()),
            "no token": Caller(everything, None),
            "wrong token": Caller(everything, TOKEN[::-1]),
            **{name: Caller(certificates.client(name)) for name in ("stranger", "expired", "server")},
            **{name: Caller(certificates.client(name.replace(" ", "-"))) for name in PERMITTED},
        }
        self._channels: dict[tuple[str, str], grpc.Channel] = {}
        opened = self.call("everything", "OpenSession", version=3, request_id="open", pool="a", spec=spec())
        self.session_id = opened.session_id
        red = grows((1, 5, d("a")))
        red.namespaces.append("red")
        self.apply("everything", number=1, grows=red)
        self.apply("everything", number=2, commits=commits((1, 4, d("a"))))

    def channel(self, who: str, server: str = "allocator") -> grpc.Channel:
        address = getattr(self.deployment, server).address
        return self._channels.setdefault((who, server), self.callers[who].channel(address))

    def call(self, who: str, method: str, **fields: Any) -> Any:
        """Makes a unary call to the allocator."""
        request = getattr(pb, f"{method}Request")(**fields)
        stub = getattr(pb_grpc.AllocatorServiceStub(self.channel(who)), method)
        return stub(request, metadata=self.callers[who].metadata, timeout=WAIT_S)

    def apply(self, who: str, **fields: Any) -> pb.StepReply:
        """Sends a step on the session of pool `a`, unless `fields` name another one."""
        stub = pb_grpc.AllocatorServiceStub(self.channel(who))
        step = pb.Step(**{"session_id": self.session_id, **fields})
        return stub.Apply(step, metadata=self.callers[who].metadata, timeout=WAIT_S)

    def state(self) -> list[Any]:
        """Returns everything that a call could have changed in pool `a`, and the names of all pools."""
        seen = self.call("everything", "GetPoolBlocks", pool="a")
        seen.summary.ClearField("lease_remaining_ms")
        pools = self.call("everything", "ListPools").pools
        return [seen, [pool.pool for pool in pools if not pool.pool.startswith("fresh/")]]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


@pytest.fixture(scope="module")
def scene(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    for name, options in PERMITTED.items():
        certificates.add(name.replace(" ", "-"), *options)
    with deployed(certificates, tmp_path_factory.mktemp("matrix"), allocator_options=["--lease", "3600"]) as deployment:
        scene = Scene(deployment)
        try:
            yield scene
        finally:
            scene.close()


# -- one call of each RPC; it succeeds for a caller with all permissions -----------------------------------------------


def session(scene: Scene, who: str) -> Any:
    """Attaches, sends an empty report, grows a sequence in `red` by one step, and detaches. The step alone may be
    refused."""
    attach = pb.Attach(version=3, pool=next(NAMES), incarnation=b"1" * 16, epoch=1, window=1, spec=spec())
    requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
    requests.put(pb.SessionRequest(attach=attach))
    requests.put(EMPTY_REPORT)
    stub = pb_grpc.AllocatorServiceStub(scene.channel(who))
    replies = stub.Session(iter(requests.get, None), metadata=scene.callers[who].metadata, timeout=WAIT_S)
    try:
        return attached_step(requests, replies, is_permitted=who != "another namespace")
    finally:
        requests.put(None)


def attached_step(requests: Any, replies: Any, *, is_permitted: bool) -> pb.SessionReply:
    assert next(replies).HasField("report_required")
    step = pb.Step(session_id=next(replies).ready.session_id, number=1, grows=grows((1, 4, b"")))
    step.grows.namespaces.append("red")
    requests.put(pb.SessionRequest(step=step))
    reply: pb.SessionReply = next(replies)
    assert list(reply.step_reply.grow_results) == ([] if is_permitted else [pb.RESULT_FORBIDDEN])
    requests.put(pb.SessionRequest(detach=pb.Detach()))
    assert list(replies) == []
    return reply


def unary(method: str, **fields: Any) -> Callable[[Scene, str], Any]:
    """Returns a unary call that does not affect other cells of the matrix, because it changes nothing or has its own
    owner."""
    return lambda scene, who: scene.call(who, method, **fields)


def apply(scene: Scene, who: str) -> Any:
    """Grows the sequence in `red` by one step on the session of pool `a`."""
    number = scene.call("everything", "GetPool", pool="a").summary.last_step + 1
    return scene.apply(who, number=number, grows=grows((1, 5, b"")))


def renew(scene: Scene, who: str) -> Any:
    return scene.apply(who)


def watch(scene: Scene, who: str) -> list[pb.CacheEvent]:
    stub = pb_grpc.AllocatorServiceStub(scene.channel(who))
    request = pb.WatchEventsRequest(pool="a")
    events = stub.WatchEvents(request, metadata=scene.callers[who].metadata, timeout=WAIT_S)
    seen = []
    for event in events:
        seen.append(event)
        if event.HasField("snapshot_end"):
            break
    events.cancel()
    return seen


def generate(scene: Scene, who: str) -> Any:
    stub = worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker"))
    request = worker_pb.GenerateRequest(
        text="The for", namespace="red", sampling=worker_pb.SamplingParams(max_tokens=1)
    )
    return list(stub.Generate(request, metadata=scene.callers[who].metadata, timeout=WAIT_S))


def get_status(scene: Scene, who: str) -> Any:
    stub = worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker"))
    return stub.GetStatus(worker_pb.GetStatusRequest(), metadata=scene.callers[who].metadata, timeout=WAIT_S)


def get_server_info(scene: Scene, who: str) -> Any:
    """Returns the answer of the allocator. The worker's answer must have the same version."""
    request = server_pb2.GetServerInfoRequest()
    told = [
        pb_grpc.AllocatorServiceStub(scene.channel(who)),
        worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker")),
    ]
    first, second = (stub.GetServerInfo(request, metadata=scene.callers[who].metadata, timeout=WAIT_S) for stub in told)
    assert first.version == second.version
    return first


def of_adapters(method: str, answer: Reason | None = None, **fields: Any) -> Callable[[Scene, str], Any]:
    """Returns a call about the worker's adapters. The worker has none, and a permitted caller gets `answer`."""

    def call(scene: Scene, who: str) -> Any:
        request = getattr(worker_pb, f"{method}Request")(**fields)
        stub = getattr(worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker")), method)
        try:
            return stub(request, metadata=scene.callers[who].metadata, timeout=WAIT_S)
        except grpc.RpcError as error:
            if answer is None or from_rpc_error(error).reason is not answer:
                raise
            return answer

    return call


def tokenize(scene: Scene, who: str) -> Any:
    stub = worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker"))
    request = worker_pb.TokenizeRequest(text="The for")
    return stub.Tokenize(request, metadata=scene.callers[who].metadata, timeout=WAIT_S)


def detokenize(scene: Scene, who: str) -> Any:
    stub = worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker"))
    request = worker_pb.DetokenizeRequest(token_ids=[1, 2])
    return stub.Detokenize(request, metadata=scene.callers[who].metadata, timeout=WAIT_S)


def health(server: str) -> Callable[[Scene, str], Any]:
    def call(scene: Scene, who: str) -> Any:
        check = health_pb2_grpc.HealthStub(scene.channel(who, server)).Check
        return check(health_pb2.HealthCheckRequest(), metadata=scene.callers[who].metadata, timeout=WAIT_S)

    return call


def open_and_close(scene: Scene, who: str) -> Any:
    opened = scene.call(who, "OpenSession", version=3, request_id=next(IDS), pool=next(NAMES), spec=spec())
    scene.call(who, "CloseSession", session_id=opened.session_id)
    return opened


def close_another(scene: Scene, who: str) -> Any:
    """Closes another caller's session of a pool. The session survives if the caller is not permitted."""
    opened = scene.call("everything", "OpenSession", version=3, request_id=next(IDS), pool=next(NAMES), spec=spec())
    try:
        return scene.call(who, "CloseSession", session_id=opened.session_id)
    except grpc.RpcError:
        assert scene.apply("everything", session_id=opened.session_id).free_block_count
        scene.call("everything", "CloseSession", session_id=opened.session_id)
        raise


def prefill(scene: Scene, who: str) -> Any:
    stub = worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker"))
    request = worker_pb.PrefillRequest(text="The for", namespace="red", ttl_ms=100)
    return stub.Prefill(request, metadata=scene.callers[who].metadata, timeout=WAIT_S)


def of_branch(method: str, **fields: Any) -> Callable[[Scene, str], Any]:
    """Returns a call on a permitted caller's branch in `red`."""

    def call(scene: Scene, who: str) -> Any:
        stub = worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker"))
        request = getattr(worker_pb, f"{method}Request")(branch_id=prefill(scene, "everything").branch_id, **fields)
        return getattr(stub, method)(request, metadata=scene.callers[who].metadata, timeout=WAIT_S)

    return call


def of_branches(method: str) -> Callable[[Scene, str], Any]:
    """Returns a call that names branches. The call must not touch branches that the caller may not use."""

    def call(scene: Scene, who: str) -> Any:
        stub = worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker"))
        branch_id = prefill(scene, "everything").branch_id
        request = getattr(worker_pb, f"{method}Request")(branch_ids=[branch_id])
        reply = getattr(stub, method)(request, metadata=scene.callers[who].metadata, timeout=WAIT_S)
        if method == "RenewBranches":
            is_permitted = expected(who, "ForkBranch") is None
            assert list(reply.unknown_branch_ids) == ([] if is_permitted else [branch_id])
        return reply

    return call


def of_requests(method: str, **fields: Any) -> Callable[[Scene, str], Any]:
    """Returns a call about the worker's requests or branches. The ids in the call do not exist."""

    def call(scene: Scene, who: str) -> Any:
        stub = worker_pb_grpc.WorkerServiceStub(scene.channel(who, "worker"))
        request = getattr(worker_pb, f"{method}Request")(**fields)
        return getattr(stub, method)(request, metadata=scene.callers[who].metadata, timeout=WAIT_S)

    return call


def routed(scene: Scene, who: str) -> Any:
    """Asks for the worker of a prompt in `red`. No pool here has a worker, and callers learn no more."""
    try:
        return scene.call(who, "Route", namespace="red", model="m", prompt_token_count=1)
    except grpc.RpcError as error:
        if from_rpc_error(error).reason != Reason.MODEL_UNKNOWN:
            raise
        return error


OWNING = Reason.POOL_FORBIDDEN
USING = Reason.NAMESPACE_FORBIDDEN
# Callers that may not use a branch's namespace get this reason even though the branch exists.
UNKNOWN = Reason.BRANCH_UNKNOWN
# RPC -> the call, the answer to an observer of all pools, and the answer to a caller with another namespace.
CALLS: dict[str, tuple[Callable[[Scene, str], Any], Reason | None, Reason | None]] = {
    "Session": (session, OWNING, None),
    "OpenSession": (open_and_close, OWNING, None),
    "Apply": (apply, OWNING, USING),
    "renewal of a lease": (renew, OWNING, USING),
    "CloseSession": (close_another, OWNING, None),
    "DropCache": (unary("DropCache", pool="a", drop=pb.CacheDrop(namespace="red")), OWNING, USING),
    "MatchPrefix": (unary("MatchPrefix", namespace="red", digests=d("a")), None, USING),
    "Route": (routed, None, USING),
    "GetServerInfo": (get_server_info, None, None),
    "ListPools": (unary("ListPools"), None, None),
    "GetPool": (unary("GetPool", pool="a"), None, None),
    "GetPoolBlocks": (unary("GetPoolBlocks", pool="a"), None, None),
    "GetPoolUsage": (unary("GetPoolUsage", pool="a"), None, None),
    "WatchEvents": (watch, None, None),
    "Generate": (generate, None, USING),
    "Prefill": (prefill, None, USING),
    "ForkBranch": (of_branch("ForkBranch", count=1), None, UNKNOWN),
    "ExtendBranch": (of_branch("ExtendBranch", text="x"), None, UNKNOWN),
    "ScoreBranch": (of_branch("ScoreBranch", candidates=[worker_pb.Continuation(text="x")]), None, UNKNOWN),
    "RenewBranches": (of_branches("RenewBranches"), None, None),
    "ReleaseBranches": (of_branches("ReleaseBranches"), None, None),
    "GetStatus": (get_status, None, None),
    "LoadAdapter": (of_adapters("LoadAdapter", Reason.NOT_SUPPORTED, name="a", folder="a"), OWNING, None),
    "UnloadAdapter": (of_adapters("UnloadAdapter", Reason.ADAPTER_UNKNOWN, name="a"), OWNING, None),
    "ListAdapters": (of_adapters("ListAdapters"), None, None),
    "ListBranches": (of_requests("ListBranches"), None, None),
    "ListRequests": (of_requests("ListRequests"), None, None),
    "CancelRequest": (of_requests("CancelRequest", request_id="nobody"), None, None),
    "Tokenize": (tokenize, None, None),
    "Detokenize": (detokenize, None, None),
    "health of the allocator": (health("allocator"), None, None),
    "health of the worker": (health("worker"), None, None),
}
# These calls name no pool, so they do not depend on the pools in a caller's certificate.
WITHOUT_POOL = {
    "MatchPrefix",
    "Route",
    "ListPools",
    *(
        method.name
        for method in worker_pb.DESCRIPTOR.services_by_name["WorkerService"].methods
        if not method.name.endswith(
            ("Adapter", "Adapters", "ListBranches", "ListRequests")
        )  # The excluded calls concern the worker's own pool.
    ),
    "health of the allocator",
    "health of the worker",
}
NAMING_RED = {rpc for rpc, (_, _, reason) in CALLS.items() if reason in (USING, UNKNOWN)}


def expected(who: str, rpc: str) -> tuple[grpc.StatusCode, Reason | None] | None:
    """Returns the code and the reason of the refusal; None if the call is answered."""
    if who in CLOSED:
        return grpc.StatusCode.UNAVAILABLE, None
    _, observing, namespaced = CALLS[rpc]
    reason: Reason | None = None
    if who in NO_TOKEN:
        reason = Reason.TOKEN
    elif who == "an observer":
        reason = observing
    elif who == "another namespace":
        reason = namespaced
    elif who == "another pool" or (who == "nothing" and rpc not in WITHOUT_POOL):
        reason = None if rpc in WITHOUT_POOL else OWNING
    elif who == "nothing" and rpc in NAMING_RED:
        reason = namespaced
    return None if reason is None else (code_of(reason), reason)


@pytest.mark.parametrize("rpc", CALLS)
@pytest.mark.parametrize("who", [*CLOSED, *NO_TOKEN, *PERMITTED])
def test_a_caller_gets_what_it_may_and_else_the_right_reason_and_changes_nothing(
    scene: Scene, who: str, rpc: str
) -> None:
    call, before, refusal = CALLS[rpc][0], scene.state(), expected(who, rpc)
    if refusal is None:
        assert call(scene, who) is not None
        return
    with pytest.raises(grpc.RpcError) as caught:
        call(scene, who)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == refusal, error
    assert scene.state() == before
