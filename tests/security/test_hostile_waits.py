"""One caller occupies every kind of wait at a gateway's routes. Another caller is served.

The waits come from the gateway's route table: a new route that takes a body needs a smallest body in `NEEDED`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from quire.local import ServerProcess
from quire.v1 import allocator_pb2
from quire.v1 import worker_pb2 as pb
from quire_gateway.app import POOLING_PATHS

from tests.client.servers import ScriptedServer, scripted_server
from tests.gateway.scene import curl, gateway, script
from tests.security.gateway_callers import HONEST, HOSTILE, NEEDED, as_many, connect, request, warm_up
from tests.security.test_hostile_gateway import kinds, others_are_served, routes

HELD = 6  # number of requests that wait at the worker
MORE = 7  # each of the `HELD` requests is sent this many more times
WITHOUT_BODY = {"/v1/responses/branch_00/cancel"}
ANSWERS: dict[str, Any] = {
    "Tokenize": pb.TokenizeResponse(token_ids=[1, 2, 3]),
    "Detokenize": pb.DetokenizeResponse(texts=[b"a"]),
    "ForkBranch": pb.ForkBranchResponse(branch_ids=[b"f" * 16]),
    "ExtendBranch": pb.ExtendBranchResponse(),
    "ScoreBranch": pb.ScoreBranchResponse(),
    "MatchPrefix": allocator_pb2.MatchPrefixResponse(),
    "DropCache": allocator_pb2.DropCacheResponse(),
}
MARK, TOKEN = b"hostile", 99  # The hostile caller's texts contain `MARK`, and its tokens `TOKEN`.


class HeldWorker:
    """A worker that holds the hostile caller's calls from `hold` to `end`."""

    def __init__(self, server: ScriptedServer) -> None:
        self.begun, self._may_end = threading.Semaphore(0), threading.Event()
        self._may_end.set()
        self._branch_count = 0
        script(server)
        server.answers["Generate"] = self._held(as_many)
        server.answers["Prefill"] = self._held(self._prefilled)
        for name, answer in ANSWERS.items():
            server.answers[name] = self._held(lambda *_, answer=answer: answer)

    def hold(self) -> None:
        self._may_end.clear()

    def end(self) -> None:
        self._may_end.set()

    def _held(self, answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def answered(asked: Any, context: Any) -> Any:
            is_hostile = MARK in asked.SerializeToString() or TOKEN in getattr(asked, "token_ids", ())
            if is_hostile and not self._may_end.is_set():
                self.begun.release()
                self._may_end.wait(60)
            return answer(asked, context)

        return answered

    def _prefilled(self, _asked: Any, _context: Any) -> pb.PrefillResponse:
        self._branch_count += 1
        return pb.PrefillResponse(branch_id=MARK + b"%09d" % self._branch_count, ttl_ms=600_000)


@pytest.fixture(scope="module")
def holding() -> Iterator[tuple[HeldWorker, ScriptedServer]]:
    with scripted_server(threads=128) as server:
        yield HeldWorker(server), server


@pytest.fixture(scope="module")
def worker(holding: tuple[HeldWorker, ScriptedServer]) -> HeldWorker:
    return holding[0]


@pytest.fixture(scope="module")
def served(
    holding: tuple[HeldWorker, ScriptedServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    keys = f"{HONEST} honest,{HOSTILE} hostile"
    address = holding[1].address
    servers = ("--worker", address, "--allocator", address)
    with gateway(tmp_path_factory.mktemp("waits"), *servers, "--max-in-flight", "32", QUIRE_API_KEYS=keys) as process:
        warm_up(process)
        yield process


def as_hostile(served: ServerProcess, path: str, body: object) -> Any:
    answer = curl(served, path, "-H", f"Authorization: Bearer {HOSTILE}", body=body)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def waits(served: ServerProcess) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a path and a body for each way to wait for a worker."""
    described = as_hostile(served, "/openapi.json", None)
    schemas = described["components"]["schemas"]
    for path, kind in kinds(described).items():
        body = json.loads(json.dumps(NEEDED[path]).replace('"p"', '"hostile"').replace("[1]", f"[{TOKEN}]"))
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": "hostile"}]
        if path == "/v1/branches":
            body = {"prompt": "hostile"}
        yield path, body
        if "stream" in schemas[kind]["properties"]:
            yield path, {**body, "stream": True}
        if "background" in schemas[kind]["properties"]:
            yield path, {**body, "background": True}


def test_every_route_that_takes_a_body_has_a_wait_here() -> None:
    posted = {path.replace("{identity}", "branch_00") for method, path in routes() if method == "POST"}
    assert posted - set(POOLING_PATHS) - WITHOUT_BODY == set(NEEDED)


def sent(served: ServerProcess, path: str, body: dict[str, Any]) -> closing[socket.socket]:
    """Sends a request, and returns its connection."""
    connection = connect(served)
    with suppress(ConnectionError):
        connection.sendall(request(HOSTILE, path, json.dumps(body).encode()))
    return closing(connection)


@pytest.mark.timeout(300)
def test_whatever_one_caller_waits_for_another_is_served(served: ServerProcess, worker: HeldWorker) -> None:
    made = [as_hostile(served, "/v1/branches", {"prompt": "hostile"}) for _ in range(HELD)]
    for path, body in waits(served):
        paths = [path.replace("branch_00", branch["id"]) for branch in made]
        worker.hold()
        try:
            with ExitStack() as cleanup, others_are_served(served):
                for named in paths:
                    cleanup.enter_context(sent(served, named, body))
                    # Requests of the previous path may hold their places a moment longer, so this request is repeated.
                    while not worker.begun.acquire(timeout=1):
                        cleanup.enter_context(sent(served, named, body))
                for named in paths * MORE:
                    cleanup.enter_context(sent(served, named, body))
        finally:
            worker.end()
        while worker.begun.acquire(blocking=False):
            pass


@pytest.mark.timeout(300)
def test_whatever_answers_one_caller_leaves_unread_another_is_served(served: ServerProcess) -> None:
    """The answers are those of every route without a body. Requests follow each other without waiting."""
    asked = sorted({path for method, path in routes() if method == "GET"})
    assert len(asked) > 5, asked
    for path in asked:
        one = request(HOSTILE, path.replace("{", "").replace("}", ""), b"", "GET", b"X: y")
        with ExitStack() as cleanup, others_are_served(served):
            for _ in range(8):
                connection = cleanup.enter_context(closing(connect(served)))
                connection.settimeout(0.5)
                with suppress(TimeoutError, ConnectionError):
                    connection.sendall(one * 5_000)
