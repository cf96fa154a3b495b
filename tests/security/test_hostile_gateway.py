"""While one caller attacks a gateway within its permissions, another caller is served.

The gateway is a process, and its callers are sockets. The tests generate the attacks from the gateway's own description
of its routes and fields, so they cover additions.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from quire.local import ServerProcess
from quire.v1 import worker_pb2 as pb
from quire_gateway.app import make_app
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Telemetry
from quire_gateway.responses.store import Store
from starlette.routing import Route

from tests.client.servers import ScriptedServer, scripted_server
from tests.gateway.scene import curl, gateway, script
from tests.security.gateway_callers import (
    GROWTH_BYTES_MAX,
    HONEST,
    HOSTILE,
    LIVENESS_S_MAX,
    NEEDED,
    as_many,
    connect,
    first_token_s,
    liveness_s,
    request,
    rss,
    warm_up,
)

FIRST_TOKEN_S_MAX = 2.0
BODY_BYTES = 8 << 20
REFUSALS = {400, 404, 413, 429, 501}  # 404: no such branch; 501: the scripted worker has no answer
ITEMS = (1, -1.5, "a", "", None, True, [], {}, [[]], {"a": 1})


@pytest.fixture(scope="module")
def worker() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        script(server).answers["Generate"] = as_many
        for name in ("Detokenize", "Prefill", "MatchPrefix", "DropCache"):
            server.answers[name] = lambda _, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in the script")
        yield server


@pytest.fixture(scope="module")
def served(worker: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    servers = ("--worker", worker.address, "--allocator", worker.address, "--max-in-flight", "32")
    with gateway(folder, *servers, QUIRE_API_KEYS=f"{HONEST} honest,{HOSTILE} hostile") as process:
        warm_up(process)
        yield process


@contextmanager
def others_are_served(served: ServerProcess) -> Iterator[None]:
    """Sends another caller's requests again and again during the block, and once after it."""
    before = rss(served)
    ended, found, peak = threading.Event(), list[tuple[float, float]](), [before]

    def ask() -> None:
        while True:
            is_last = ended.is_set()
            found.append((first_token_s(served, HONEST), liveness_s(served)))
            peak.append(rss(served))
            if is_last:
                return
            ended.wait(0.1)

    failed: list[BaseException] = []

    def run() -> None:
        try:
            ask()
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=run)
    asking.start()
    try:
        yield
    finally:
        ended.set()
        asking.join()
    assert not failed, failed
    assert max(first for first, _ in found) < FIRST_TOKEN_S_MAX
    assert max(live for _, live in found) < LIVENESS_S_MAX
    assert max(peak) - before < GROWTH_BYTES_MAX


@pytest.fixture(scope="module")
def described(served: ServerProcess) -> dict[str, Any]:
    answer = curl(served, "/openapi.json", "-H", f"Authorization: Bearer {HOSTILE}")
    found: dict[str, Any] = json.loads(answer.body)
    return found


def routes() -> list[tuple[str, str]]:
    """Returns every method and path that the gateway serves, including those missing from its description."""
    telemetry = Telemetry()
    store = Store(telemetry, bytes_max=0, lifetime_s=1, are_several=False)
    app = make_app(
        Fleet([], []),
        telemetry,
        store,
        version="0",
        registry=CollectorRegistry(),
        request_timeout_s=1,
        is_draining=lambda: False,
    )
    return [(method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods or ()]


def half_sent() -> list[bytes]:
    """Returns requests for every route and an unknown one, with every method, cut at every kind of place."""
    body = json.dumps({"prompt": "p", "messages": [{"role": "user", "content": "c" * 1_000}]}).encode()
    found = []
    for method, path in [*routes(), ("GET", "/nowhere"), ("POST", "/v1/models"), ("OPTIONS", "/v1/completions")]:
        for key in (HOSTILE, "sk-none-0123456789"):
            whole = request(key, path, body, method)
            chunked = request(key, path, b"400\r\n" + body[:100], method, b"Transfer-Encoding: chunked")
            head = whole.index(b"\r\n\r\n")
            found += [whole[:1], whole[: head // 2], whole[:head], whole[: head + 4], whole[:-1], chunked]
    return found


def test_requests_that_are_never_whole_hold_nobody_up(served: ServerProcess) -> None:
    assert {path for _, path in routes()} >= {"/v1/completions", "/health", "/metrics"}
    with ExitStack() as cleanup, others_are_served(served):
        for beginning in half_sent() * 3:
            connection = cleanup.enter_context(closing(connect(served)))
            with suppress(ConnectionError):
                connection.sendall(beginning)


def kinds(described: dict[str, Any]) -> dict[str, str]:
    """Returns the name of the body's schema for each path that takes a body. Paths of branches name a branch that does
    not exist."""
    return {
        path.replace("{identity}", "branch_00"): operation["requestBody"]["content"]["application/json"]["schema"][
            "$ref"
        ].rpartition("/")[2]
        for path, operations in described["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }


def test_every_path_that_takes_a_body_has_one_here(described: dict[str, Any]) -> None:
    assert kinds(described).keys() == NEEDED.keys(), "the other tests make their bodies of these"


def fields(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns the path, name and schema of every field of every body."""
    schemas = described["components"]["schemas"]
    return [
        (path, name, schema)
        for path, kind in kinds(described).items()
        for name, schema in schemas[kind]["properties"].items()
    ]


def bodies(described: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yields bodies of the largest size for each field, filled with many copies of a wrong or right item."""
    for number, (path, name, _) in enumerate(fields(described)):
        item = json.dumps(ITEMS[number % len(ITEMS)]).encode()
        needed = {need: value for need, value in NEEDED[path].items() if need != name}
        base = b"".join(b"%b:%b," % (json.dumps(need).encode(), json.dumps(needed[need]).encode()) for need in needed)
        size = BODY_BYTES if number % 8 == 0 else BODY_BYTES >> 4
        values = b",".join([item] * ((size - 100) // (len(item) + 1)))
        yield path, b"{%b%b:[%b]}" % (base, json.dumps(name).encode(), values)
        if number % 8 == 1:
            pairs = b",".join(b'"%x":%b' % (index, item) for index in range(size // (len(item) + 9)))
            yield path, b"{%b%b:{%b}}" % (base, json.dumps(name).encode(), pairs)
    yield "/v1/completions", b'{"prompt":"p",%b}' % b",".join(b'"%x":1' % number for number in range(BODY_BYTES // 11))
    yield "/v1/completions", b"[" * (BODY_BYTES - 1)
    yield "/v1/completions", b'{"prompt":"' + b'\\"' * (BODY_BYTES // 2 - 20) + b'"}'


def post(served: ServerProcess, path: str, body: bytes) -> int:
    with closing(connect(served)) as connection:
        connection.sendall(request(HOSTILE, path, body))
        head = connection.recv(65_536)
    return int(head.split()[1])


def sent_by_several(served: ServerProcess, left: list[tuple[str, bytes]]) -> list[int]:
    """Sends bodies, four at a time, and returns the statuses of their answers."""
    statuses, lock = list[int](), threading.Lock()

    def send() -> None:
        while True:
            with lock:
                if not left:
                    return
                path, body = left.pop()
            statuses.append(post(served, path, body))

    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    return statuses


def test_bodies_of_millions_of_values_hold_nobody_up(served: ServerProcess, described: dict[str, Any]) -> None:
    with others_are_served(served):
        statuses = sent_by_several(served, list(bodies(described)))
    assert set(statuses) <= REFUSALS | {200}
    assert statuses.count(400) + statuses.count(413) > len(statuses) // 2


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the lists, and the objects with a limit, that a field may hold; does not descend into their items."""
    if schema.get("type") == "array" or "maxProperties" in schema:
        yield schema
    for part in schema.get("anyOf", ()):
        yield from lists(part)


def item_of(items: dict[str, Any]) -> object:
    """Returns a valid item of a list."""
    if "anyOf" in items:
        return item_of(items["anyOf"][0])
    if "$ref" in items:
        return {"role": "user", "content": ""}
    return {"string": "a", "integer": 1, "object": {}, "array": [1]}[items["type"]]


def test_every_list_has_a_limit_and_one_beyond_it_is_said(served: ServerProcess, described: dict[str, Any]) -> None:
    found = 0
    for path, name, schema in fields(described):
        for part in lists(schema):
            found += 1
            at: Any
            if part["type"] == "array":
                limit, item = part["maxItems"], item_of(part["items"])
                at, beyond = [item] * limit, [item] * (limit + 1)
            else:
                limit = part["maxProperties"]
                at = {str(number): "1" for number in range(limit)}
                beyond = {**at, str(limit): "1"}
            asked = curl_post(served, path, {**NEEDED[path], name: at})
            assert f"at most {limit:,} " not in asked.get("message", ""), name
            refused = curl_post(served, path, {**NEEDED[path], name: beyond})
            assert (refused["param"] or "").startswith(name), (path, name, refused)
    assert found >= 40, "the description has the limits"


# (path, field, value): inside the field, the value has a list that the API description does not limit.
WITHIN: list[tuple[str, str, Callable[[list[Any]], Any]]] = [
    ("/v1/chat/completions", "messages", lambda items: [{"role": "user", "content": items}]),
    ("/v1/chat/completions", "messages", lambda items: [{"role": "assistant", "tool_calls": items}]),
    ("/v1/chat/completions", "tools", lambda items: [{"type": "function", "function": {"name": items}}]),
    ("/v1/chat/completions", "tool_choice", lambda items: {"type": "allowed_tools", "allowed_tools": {"tools": items}}),
    ("/v1/chat/completions", "response_format", lambda items: {"type": "json_schema", "json_schema": items}),
    ("/v1/chat/completions", "chat_template_kwargs", lambda items: {"x": items}),
    ("/v1/completions", "structured_outputs", lambda items: {"choice": items}),
    ("/v1/completions", "guided_json", lambda items: {"anyOf": items}),
    ("/v1/completions", "prompt", lambda items: [items]),
    ("/v1/responses", "input", lambda items: [{"role": "user", "content": items}]),
    ("/v1/responses", "input", lambda items: [{"type": "reasoning", "summary": items}]),
    (
        "/v1/responses",
        "text",
        lambda items: {"format": {"type": "json_schema", "name": "n", "schema": {"enum": items}}},
    ),
    ("/v1/branches", "messages", lambda items: [{"role": "user", "content": items}]),
    ("/v1/branches/branch_00/score", "candidates", lambda items: [items]),
    ("/tokenize", "messages", lambda items: [{"role": "user", "content": items}]),
]


def wrong_lists(described: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields a path, a field and a list that repeats one wrong item: up to the limit, once more, or within objects as
    often as a body has room for."""
    for path, name, schema in fields(described):
        for part in (each for each in lists(schema) if each["type"] == "array"):
            for item in ITEMS:
                yield from ((path, name, [item] * count) for count in (part["maxItems"], part["maxItems"] + 1))
    for path, name, value in WITHIN:
        yield from ((path, name, value([item] * (1 << 16))) for item in ITEMS)


@pytest.mark.timeout(300)
def test_lists_of_wrong_items_are_refused_and_hold_nobody_up(served: ServerProcess, described: dict[str, Any]) -> None:
    tried = {(path, name) for path, name, _ in wrong_lists(described)}
    assert tried >= {(path, name) for path, name, _ in WITHIN}
    left = [(path, json.dumps({**NEEDED[path], name: value}).encode()) for path, name, value in wrong_lists(described)]
    with others_are_served(served):
        statuses = sent_by_several(served, left)
    assert set(statuses) <= REFUSALS | {200}
    assert statuses.count(400) > len(statuses) // 2


def curl_post(served: ServerProcess, path: str, body: object) -> dict[str, Any]:
    with closing(connect(served)) as connection:
        connection.sendall(request(HOSTILE, path, json.dumps(body).encode(), framing=None))
        found = b""
        while not found.endswith(b"}"):
            data = connection.recv(65_536)
            assert data, found
            found += data
    error: dict[str, Any] = json.loads(found.partition(b"\r\n\r\n")[2]).get("error") or {}
    return error


@pytest.mark.parametrize(
    ("path", "options"),
    [
        *(
            (path, {"stream": is_stream})
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
            for is_stream in (True, False)
        ),
        ("/v1/responses", {"background": True}),
    ],
    ids=str,
)
def test_places_and_bodies_of_one_are_not_those_of_another(
    served: ServerProcess, worker: ScriptedServer, path: str, options: dict[str, bool]
) -> None:
    """One caller takes as many answers as it gets without reading them, and keeps sending bodies for more."""
    body = json.dumps({**NEEDED[path], **options}).encode()
    begun, ended = threading.Semaphore(0), threading.Event()

    def held() -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(sample=0, token_ids=[1], text="a")
        begun.release()
        ended.wait(60)

    def answer(asked: Any, context: Any) -> Any:
        return held() if asked.namespace == "hostile" else as_many(asked, context)

    worker.answers["Generate"] = answer
    try:
        with ExitStack() as cleanup, others_are_served(served):
            for _ in range(6):  # Six of the scripted worker's eight threads are held, so two threads stay free.
                connection = cleanup.enter_context(closing(connect(served)))
                connection.sendall(request(HOSTILE, path, body))
            assert all(begun.acquire(timeout=60) for _ in range(6))
            for _ in range(40):
                connection = cleanup.enter_context(closing(connect(served)))
                connection.settimeout(0.2)
                with suppress(TimeoutError, ConnectionError):
                    connection.sendall(
                        request(
                            HOSTILE,
                            "/v1/completions",
                            b" " * (BODY_BYTES - 1),
                            framing=b"Content-Length: %d" % BODY_BYTES,
                        )
                    )
    finally:
        ended.set()
        worker.answers["Generate"] = as_many


def test_requests_whose_answers_nobody_reads_hold_nobody_up(served: ServerProcess) -> None:
    one = request(HOSTILE, "/openapi.json", b"", "GET", b"X: y")
    with ExitStack() as cleanup, others_are_served(served):
        for _ in range(8):
            connection = cleanup.enter_context(closing(connect(served)))
            connection.settimeout(0.5)
            with suppress(TimeoutError, ConnectionError):
                connection.sendall(one * 20_000)


def test_a_gateway_that_is_told_to_stop_ends_whatever_is_held(worker: ScriptedServer, tmp_path: Path) -> None:
    keys = f"{HONEST} honest,{HOSTILE} hostile"
    with (
        gateway(tmp_path, "--worker", worker.address, "--drain-timeout", "1", QUIRE_API_KEYS=keys) as other,
        ExitStack() as cleanup,
    ):
        held: list[Callable[[], bytes]] = [lambda each=each: each for each in half_sent()]  # type: ignore[misc]
        for beginning in held:
            connection = cleanup.enter_context(closing(connect(other)))
            with suppress(ConnectionError):
                connection.sendall(beginning())
        assert liveness_s(other) < 30
        other.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            other.process.wait(15)
        assert other.process.poll() == 0
