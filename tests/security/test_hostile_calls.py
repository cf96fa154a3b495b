"""One caller holds every call at every point of its exchange, and does not read its answers. Another caller is served.

The calls come from the services' descriptors. `REQUESTS` has a request for each; a call without one fails a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2
from quire.protocol.limits import MESSAGE_BYTES_MAX
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire.v1 import server_pb2
from quire.v1 import worker_pb2 as worker_pb
from quire.v1 import worker_pb2_grpc as worker_pb_grpc

from tests.allocator.service.harness import EMPTY_REPORT, d, grows, spec
from tests.security.certificates import Certificates
from tests.security.deployment import Deployment, deployed
from tests.security.raw_http2 import RawCaller, framed, raw_caller
from tests.security.test_hostile_doors import (
    MEMORY_BYTES,
    METHODS,
    assert_others_are_served,
    channel,
    metadata,
)

ATTACKER = "attacker"
NUMBERS = itertools.count()
LARGE_POOL_BLOCKS = 1 << 20  # One answer of GetPoolBlocks has a byte for each block.
UNREAD = 200  # number of calls of each kind whose answers stay unread
HALF_SENT = 500  # number of calls with a half-sent message of the largest size
STREAMS = 64  # number of attached streams
LONG = worker_pb.SamplingParams(max_tokens=400, ignore_eos=True)


CONVERSATIONS = {
    f"/{service.full_name}/{method.name}"
    for module in (pb, worker_pb, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.client_streaming
}


HEARTBEAT = pb.SessionRequest(heartbeat=pb.Heartbeat())
STEP = pb.SessionRequest(step=pb.Step(number=1, grows=grows((1, 4, b""))))


class Scene:
    """The deployment, with things of the attacker that its requests can name."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.session_id = self.branch_id = b""

    async def fill(self) -> None:
        """Opens a large pool of the attacker, and makes a branch if there is none."""
        async with channel(self.deployment, ATTACKER, "allocator") as connection:
            large = pb.OpenSessionRequest(
                version=3, request_id="large", pool="attacker-large", spec=spec(LARGE_POOL_BLOCKS)
            )
            opened = await pb_grpc.AllocatorServiceStub(connection).OpenSession(large, metadata=metadata())
            self.session_id = opened.session_id
        if self.branch_id:
            return
        async with channel(self.deployment, ATTACKER, "worker") as connection:
            request = worker_pb.PrefillRequest(text="The for", namespace=ATTACKER, ttl_ms=600_000)
            made = await worker_pb_grpc.WorkerServiceStub(connection).Prefill(request, metadata=metadata())
            self.branch_id = made.branch_id


# Call -> the request that gives the largest answer, or the longest work, that one caller can get from this call.
REQUESTS: dict[str, Callable[[Scene], Any]] = {
    "/quire.v1.AllocatorService/GetServerInfo": lambda _: server_pb2.GetServerInfoRequest(),
    "/quire.v1.AllocatorService/ListPools": lambda _: pb.ListPoolsRequest(),
    "/quire.v1.AllocatorService/GetPool": lambda _: pb.GetPoolRequest(pool="attacker-large"),
    "/quire.v1.AllocatorService/GetPoolBlocks": lambda _: pb.GetPoolBlocksRequest(pool="attacker-large"),
    "/quire.v1.AllocatorService/GetPoolUsage": lambda _: pb.GetPoolUsageRequest(pool="attacker-large"),
    "/quire.v1.AllocatorService/MatchPrefix": lambda _: pb.MatchPrefixRequest(
        namespace=ATTACKER, digests=d("a") * 16_384
    ),
    "/quire.v1.AllocatorService/Route": lambda _: pb.RouteRequest(
        namespace=ATTACKER, model="m", digests=d("a") * 16_384, prompt_token_count=1 << 24, reservation_ms=60_000
    ),
    "/quire.v1.AllocatorService/WatchEvents": lambda _: pb.WatchEventsRequest(pool="attacker-large"),
    "/quire.v1.AllocatorService/OpenSession": lambda _: pb.OpenSessionRequest(
        version=3, request_id=f"open {next(NUMBERS)}", pool=f"attacker-opened-{next(NUMBERS) % 64}", spec=spec()
    ),
    "/quire.v1.AllocatorService/Apply": lambda scene: pb.Step(session_id=scene.session_id),
    "/quire.v1.AllocatorService/CloseSession": lambda _: pb.CloseSessionRequest(session_id=b"n" * 16),
    "/quire.v1.AllocatorService/DropCache": lambda _: pb.DropCacheRequest(
        pool="attacker-large", drop=pb.CacheDrop(namespace=ATTACKER)
    ),
    "/quire.v1.AllocatorService/Session": lambda _: attach(),
    "/quire.v1.WorkerService/Generate": lambda _: worker_pb.GenerateRequest(
        text="The for", namespace=ATTACKER, sampling=LONG
    ),
    "/quire.v1.WorkerService/Prefill": lambda _: worker_pb.PrefillRequest(
        text="The for", namespace=ATTACKER, ttl_ms=1_000
    ),
    "/quire.v1.WorkerService/ForkBranch": lambda scene: worker_pb.ForkBranchRequest(
        branch_id=scene.branch_id, count=64
    ),
    "/quire.v1.WorkerService/ExtendBranch": lambda scene: worker_pb.ExtendBranchRequest(
        branch_id=scene.branch_id, text=" x"
    ),
    "/quire.v1.WorkerService/ScoreBranch": lambda scene: worker_pb.ScoreBranchRequest(
        branch_id=scene.branch_id, candidates=[worker_pb.Continuation(text="for x in y")] * 64
    ),
    "/quire.v1.WorkerService/RenewBranches": lambda scene: worker_pb.RenewBranchesRequest(
        branch_ids=[scene.branch_id, *(number.to_bytes(16) for number in range(1_000))]
    ),
    "/quire.v1.WorkerService/ReleaseBranches": lambda _: worker_pb.ReleaseBranchesRequest(branch_ids=[b"n" * 16]),
    "/quire.v1.WorkerService/ListBranches": lambda _: worker_pb.ListBranchesRequest(),
    "/quire.v1.WorkerService/GetStatus": lambda _: worker_pb.GetStatusRequest(),
    "/quire.v1.WorkerService/LoadAdapter": lambda _: worker_pb.LoadAdapterRequest(name="a", folder="a"),
    "/quire.v1.WorkerService/UnloadAdapter": lambda _: worker_pb.UnloadAdapterRequest(name="a"),
    "/quire.v1.WorkerService/ListAdapters": lambda _: worker_pb.ListAdaptersRequest(),
    "/quire.v1.WorkerService/Tokenize": lambda _: worker_pb.TokenizeRequest(text="x1 " * 20_000),
    "/quire.v1.WorkerService/Detokenize": lambda _: worker_pb.DetokenizeRequest(token_ids=[*range(1, 2_000)] * 30),
    "/quire.v1.WorkerService/GetServerInfo": lambda _: server_pb2.GetServerInfoRequest(),
    "/quire.v1.WorkerService/ListRequests": lambda _: worker_pb.ListRequestsRequest(),
    "/quire.v1.WorkerService/CancelRequest": lambda _: worker_pb.CancelRequestRequest(request_id="nobody"),
    "/grpc.health.v1.Health/Check": lambda _: health_pb2.HealthCheckRequest(),
    "/grpc.health.v1.Health/List": lambda _: health_pb2.HealthListRequest(),
    "/grpc.health.v1.Health/Watch": lambda _: health_pb2.HealthCheckRequest(),
}


def attach(**fields: Any) -> pb.SessionRequest:
    """Attaches to one of a few pools. Their owners may attach again and again."""
    number = next(NUMBERS)
    name, epoch = f"attacker-{number % STREAMS}", 1 + number
    request = pb.Attach(version=3, pool=name, incarnation=b"1" * 16, epoch=epoch, window=1, spec=spec(), **fields)
    return pb.SessionRequest(attach=request)


# Stage -> the messages that an owner's stream sends before the held message. Only the answer to the attach names the
# session's id. A step here has no id, so the allocator refuses the step.
STAGES: dict[str, Callable[[], list[pb.SessionRequest]]] = {
    "before the attach": list,
    "before an empty report": lambda: [attach()],
    "in a report": lambda: [attach(last_step=1), pb.SessionRequest(report_chunk=pb.ReportChunk())],
    "in a step": lambda: [attach(), EMPTY_REPORT],
    "in a step after heartbeats": lambda: [attach(), EMPTY_REPORT, *[HEARTBEAT] * 9],
    "after a step": lambda: [attach(), EMPTY_REPORT, STEP],
}


@pytest.fixture(scope="module")
def scene(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    for name in ("attacker", "honest"):
        if not (certificates.folder / f"{name}.pem").exists():
            certificates.add(name, "--pool", f"{name}*", "--observe", "*", "--namespace", name)
    with deployed(certificates, tmp_path_factory.mktemp("calls")) as running:
        made = Scene(running)
        asyncio.run(made.fill())
        yield made


@contextlib.asynccontextmanager
async def others_are_served(scene: Scene, *attacks: str) -> AsyncIterator[None]:
    """Checks at the end of the block that another caller is served, and the peak memory of both servers."""
    pids = [server.process.pid for server in (scene.deployment.allocator, scene.deployment.worker)]
    before = [psutil.Process(pid).memory_info().rss for pid in pids]
    for pid in pids:
        forget_peak(pid)
    yield
    await assert_others_are_served(scene.deployment)
    for pid, rss in zip(pids, before, strict=True):
        assert peak_bytes(pid) - rss < MEMORY_BYTES, attacks


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Returns the largest resident memory of a process since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


@contextlib.asynccontextmanager
async def attacker(scene: Scene, server: str, **options: Any) -> AsyncIterator[RawCaller]:
    tls = scene.deployment.certificates.client(ATTACKER)
    async with raw_caller(getattr(scene.deployment, server).address, tls, **options) as caller:
        yield caller


def test_every_call_of_the_services_has_a_request_here() -> None:
    assert {method for methods in METHODS.values() for method in methods} == set(REQUESTS)


def cut(message: bytes) -> list[bytes]:
    """Returns a message that is cut in each of its parts, and a message that claims to be of the largest size."""
    whole = framed(message)
    return [whole[:1], whole[:4], whole[:5], whole[:-1] or whole[:1], framed(b"\x7a" * 30_000, MESSAGE_BYTES_MAX - 1)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", METHODS)
async def test_messages_that_are_cut_anywhere_keep_nobody_from_an_answer(scene: Scene, server: str) -> None:
    async with others_are_served(scene), attacker(scene, server) as caller:
        parts = {}
        for method in METHODS[server]:
            request = REQUESTS[method](scene).SerializeToString()
            for part in cut(request) * 8:
                parts[caller.begin(method, metadata())] = part
        await caller.send(parts)


def alike() -> Iterator[tuple[str, list[str]]]:
    """Yields each server with calls that it reads alike: all its unary calls together, and each stream alone."""
    for server, methods in METHODS.items():
        yield server, [method for method in methods if method not in CONVERSATIONS]
        yield from ((server, [method]) for method in methods if method in CONVERSATIONS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("server", "methods"), [*alike()], ids=lambda each: each if isinstance(each, str) else each[0])
async def test_messages_of_the_largest_size_without_their_last_byte_take_a_bounded_memory(
    scene: Scene, server: str, methods: list[str]
) -> None:
    async with others_are_served(scene, *methods), attacker(scene, server) as caller:
        part = framed(b"\x7a" * (MESSAGE_BYTES_MAX - 100), MESSAGE_BYTES_MAX - 99)
        calls = itertools.islice(itertools.cycle(methods), HALF_SENT)
        await caller.send({caller.begin(method, metadata()): part for method in calls})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", METHODS)
async def test_answers_that_nobody_takes_take_a_bounded_memory(scene: Scene, server: str) -> None:
    for method in METHODS[server]:
        await scene.fill()
        async with others_are_served(scene, method), attacker(scene, server, window=0) as caller:
            calls = [caller.begin(method, metadata()) for _ in range(UNREAD)]
            parts = {call: framed(REQUESTS[method](scene).SerializeToString()) for call in calls}
            await caller.send(parts, are_last=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("window", [0, 65_535], ids=["unread", "read"])
@pytest.mark.parametrize("stage", STAGES)
async def test_owners_streams_that_are_held_at_every_stage_leave_places_for_others(
    scene: Scene, stage: str, window: int
) -> None:
    """Each stream sends the messages of the stage, then half of another one."""
    async with others_are_served(scene), attacker(scene, "allocator", window=window) as caller:
        parts = {}
        for _ in range(STREAMS):
            sent = b"".join(framed(each.SerializeToString()) for each in STAGES[stage]())
            half = framed(b"\x12" * (MESSAGE_BYTES_MAX >> 1), MESSAGE_BYTES_MAX - 100)
            parts[caller.begin("/quire.v1.AllocatorService/Session", metadata())] = sent + half
        await caller.send(parts)
