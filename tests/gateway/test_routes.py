"""The gateway asks an allocator where a prompt goes, and decides by itself if it gets no answer. Scripted servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from quire.errors import Reason
from quire.hashing import prompt_digests, root_digest
from quire.local import ServerProcess
from quire.v1 import allocator_pb2 as pb
from quire.v1 import worker_pb2

from tests.client.servers import ScriptedServer, failing, refusing, scripted_server
from tests.e2e.stack import eventually
from tests.gateway.scene import STATUS, curl, gateway, script

# Two blocks. Only the first block can be a hit, because the last token is always computed.
TOKENS = [*range(1, 9)]
ANSWER = worker_pb2.GenerateResponse(
    token_ids=[1], text="a", finish_reason=worker_pb2.FINISH_REASON_STOP, usage=worker_pb2.Usage(prompt_token_count=8)
)


class Scene(NamedTuple):
    """A gateway, its allocator, and its workers with the pools `p` and `q`."""

    gateway: ServerProcess
    allocator: ScriptedServer
    p: ScriptedServer
    q: ScriptedServer

    def ask(self, tokens: Sequence[int] = TOKENS) -> None:
        body = {"model": "scripted", "prompt": list(tokens), "max_tokens": 1}
        assert curl(self.gateway, "/v1/completions", body=body).status == 200

    def metric(self, name: str) -> float:
        return metric(self.gateway, name)

    def routed_to(self, pool: str, *, reserved: bool = True) -> None:
        """Makes the allocator route to a pool."""
        self.allocator.answers["Route"] = lambda *_: pb.RouteResponse(pool=pool, address="any:1", reserved=reserved)


def metric(served: ServerProcess, name: str) -> float:
    lines = curl(served, "/metrics").body.decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)


def summary(pool: str, address: str = "any:1", model: str = "scripted") -> pb.PoolSummary:
    worker = pb.RoutedWorker(address=address, model=model)
    return pb.PoolSummary(pool=pool, session_kind=pb.SESSION_KIND_STREAM, worker=worker)


def serve(worker: ScriptedServer, pool: str) -> None:
    status = worker_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    status.pool, status.sequence_tokens_max = pool, 4_000
    script(worker).answers["GetStatus"] = lambda *_: status
    worker.answers["Generate"] = lambda *_: iter([ANSWER])


@contextmanager
def scene(folder: Path, *pools: pb.PoolSummary) -> Iterator[Scene]:
    """Runs a gateway with two listed workers, and an allocator that knows these pools."""
    with ExitStack() as stack:
        allocator, p, q = (stack.enter_context(scripted_server()) for _ in range(3))
        serve(p, "p")
        serve(q, "q")
        allocator.answers["ListPools"] = lambda *_: pb.ListPoolsResponse(pools=pools)
        allocator.answers["GetPool"] = failing(grpc.StatusCode.NOT_FOUND, times=10**6)
        addresses = [each for worker in (p, q) for each in ("--worker", worker.address)]
        served = stack.enter_context(gateway(folder, *addresses, "--allocator", allocator.address))
        ready = f'quire_gateway_allocator_ready{{allocator="{allocator.address}"}}'
        eventually(lambda: metric(served, ready) == 1, "the allocator is known", within_s=60)
        yield Scene(served, allocator, p, q)


def by(basis: str) -> str:
    return f'quire_gateway_routes_total{{by="{basis}"}}'


LOST = "quire_gateway_reservations_lost_total"


def test_a_prompt_goes_where_the_allocator_says(tmp_path: Path) -> None:
    elsewhere = (summary("z"), summary("other", model="other"), pb.PoolSummary(pool="without"))
    with scene(tmp_path, summary("p"), summary("q"), *elsewhere) as fleet:
        fleet.routed_to("q")
        for _ in range(3):
            fleet.ask()
        assert (fleet.q.attempts["Generate"], fleet.p.attempts["Generate"]) == (3, 0)
        assert (fleet.metric(by("allocator")), fleet.metric(by("mirror")), fleet.metric(LOST)) == (3, 0, 0)
        assert fleet.allocator.attempts["Route"] == 3, "one call a request"
        asked = next(each for each in fleet.allocator.requests if isinstance(each, pb.RouteRequest))
        root = root_digest(fingerprint=b"", layout="")
        assert asked.digests == b"".join(prompt_digests(root, TOKENS, 4))
        assert (asked.model, asked.prompt_token_count, asked.reservation_ms) == ("scripted", 8, 5_000)
        assert asked.excluded_pools == ["z"], "the gateway was not given that worker"


def test_a_worker_that_refuses_loses_the_reservation_and_another_one_is_asked(tmp_path: Path) -> None:
    with scene(tmp_path, summary("p"), summary("q")) as fleet:
        fleet.routed_to("p")
        fleet.p.answers["Generate"] = refusing(Reason.QUEUE_FULL)
        fleet.ask()
        assert (fleet.p.attempts["Generate"], fleet.q.attempts["Generate"]) == (1, 1)
        assert fleet.metric(LOST) == 1
        assert (fleet.metric(by("allocator")), fleet.metric(by("alone"))) == (1, 1)
        fleet.routed_to("p", reserved=False)
        fleet.ask()
        assert fleet.metric(LOST) == 1


@pytest.mark.parametrize(
    ("code", "route_count"),
    [(grpc.StatusCode.UNIMPLEMENTED, 1), (grpc.StatusCode.NOT_FOUND, 3)],
    ids=["old", "unknown"],
)
def test_an_allocator_that_refuses_leaves_the_choice_to_the_gateway(
    tmp_path: Path, code: grpc.StatusCode, route_count: int
) -> None:
    """An older allocator is not asked again. An allocator that knows no worker now may know one later."""
    with scene(tmp_path, summary("p"), summary("q")) as fleet:
        fleet.allocator.answers["Route"] = failing(code, times=10)
        for _ in range(3):
            fleet.ask()
        assert fleet.allocator.attempts["Route"] == route_count
        assert (fleet.metric(by("allocator")), fleet.metric(by("mirror"))) == (0, 3)


def _of_a_pool_that_no_candidate_has(fleet: Scene) -> None:
    fleet.routed_to("unheard-of")


def _never(fleet: Scene) -> None:
    fleet.allocator.answers["Route"] = lambda *_: fleet.allocator.released.wait(30) and None


def _gone(fleet: Scene) -> None:
    fleet.routed_to("p")
    fleet.allocator.server.stop(None).wait()


@pytest.mark.parametrize("breaks", [_of_a_pool_that_no_candidate_has, _never, _gone])
def test_without_a_usable_route_requests_are_answered(tmp_path: Path, breaks: Callable[[Scene], Any]) -> None:
    with scene(tmp_path, summary("p"), summary("q")) as fleet:
        breaks(fleet)
        for _ in range(3):
            fleet.ask()
        assert fleet.metric(by("mirror")) == 3
        assert fleet.metric(by("allocator")) == 0


def test_without_a_route_a_prompt_follows_its_prefix_and_other_prompts_avoid_its_worker(tmp_path: Path) -> None:
    """The pools are not mirrored here. So the gateway knows a prefix only from the prompt that it has sent."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> Iterator[worker_pb2.GenerateResponse]:
        begun.set()
        assert go_on.wait(60)
        yield ANSWER

    with scene(tmp_path) as fleet, ThreadPoolExecutor(1) as callers:
        fleet.p.answers["Generate"] = slow
        first = callers.submit(fleet.ask, [*range(1, 2_000)])
        try:
            assert begun.wait(60)
            fleet.p.answers["Generate"] = lambda *_: iter([ANSWER])
            fleet.ask([*range(1, 1_999), 7])
            assert (fleet.p.attempts["Generate"], fleet.q.attempts["Generate"]) == (2, 0)
            fleet.ask([*range(2, 2_001)])
            assert (fleet.p.attempts["Generate"], fleet.q.attempts["Generate"]) == (2, 1)
        finally:
            go_on.set()
        first.result(60)
        assert fleet.metric(by("mirror")) == 3


def test_an_allocator_without_workers_of_the_model_is_not_asked(tmp_path: Path) -> None:
    with scene(tmp_path, summary("p", model="other"), pb.PoolSummary(pool="q")) as fleet:
        fleet.ask()
        assert fleet.allocator.attempts["Route"] == 0
        assert fleet.metric(by("mirror")) == 1


def test_workers_are_found_by_the_allocator_and_leave_with_it(tmp_path: Path) -> None:
    with scripted_server() as allocator, scripted_server() as p, scripted_server() as q:
        serve(p, "p")
        serve(q, "q")
        allocator.answers["GetPool"] = failing(grpc.StatusCode.NOT_FOUND, times=10**6)
        allocator.answers["Route"] = lambda *_: pb.RouteResponse(pool="q", reserved=True)
        known = [summary("p", p.address)]
        allocator.answers["ListPools"] = lambda *_: pb.ListPoolsResponse(pools=known)
        with gateway(tmp_path, "--allocator", allocator.address) as served:
            fleet = Scene(served, allocator, p, q)
            fleet.ask()
            assert fleet.metric(by("alone")) == 1
            known.append(summary("q", q.address))
            ready = 'quire_gateway_worker_ready{{model="scripted",worker="{}"}}'.format
            eventually(lambda: fleet.metric(ready(q.address)) == 1, "the second worker is found", within_s=60)
            fleet.ask()
            assert (fleet.q.attempts["Generate"], fleet.metric(by("allocator"))) == (1, 1)
            del known[0]
            p.server.stop(None).wait()
            text = f'worker="{p.address}"'.encode()
            eventually(lambda: text not in curl(served, "/metrics").body, "the first one is gone", within_s=60)
            fleet.ask()
            assert fleet.metric(by("alone")) == 2
