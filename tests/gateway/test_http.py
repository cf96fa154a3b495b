"""Tests HTTP as clients and proxies speak it, in front of a scripted worker."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from quire.local import ServerProcess

from tests.client.servers import ScriptedServer, endless, scripted_server, silent, two_samples
from tests.e2e.stack import eventually
from tests.gateway.scene import curl, gateway, script
from tests.security.certificates import quire_certs

ASK = json.dumps({"model": "scripted", "prompt": "p", "n": 2}).encode()
STREAM = json.dumps({"model": "scripted", "prompt": "p", "n": 2, "stream": True}).encode()
LINE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = LINE + b"Content-Length: %d\r\n" % len(ASK)
HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
OTHER = b"connection: upgrade\r\nupgrade: anything, else\r\n"


@pytest.fixture(scope="module")
def worker() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield script(server)


@pytest.fixture(scope="module")
def served(worker: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with gateway(tmp_path_factory.mktemp("gateway"), "--worker", worker.address) as process:
        yield process


def connect(served: ServerProcess) -> socket.socket:
    host, _, port = served.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def heard(connection: socket.socket, until: bytes | None = None) -> bytes:
    """Returns the received bytes, up to the end or up to `until`."""
    found = b""
    while (until is None or until not in found) and (data := connection.recv(65_536)):
        found += data
    return found


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET, OTHER], ids=["h2c", "websocket", "other"])
@pytest.mark.parametrize("comes", ["at once", "later", "byte by byte", "in chunks"])
def test_a_request_that_offers_an_upgrade_is_answered_as_if_it_did_not(
    served: ServerProcess, upgrade: bytes, comes: str
) -> None:
    framing = (
        b"Transfer-Encoding: chunked\r\n\r\n" if comes == "in chunks" else b"Content-Length: %d\r\n\r\n" % len(ASK)
    )
    head = LINE + upgrade + framing
    with closing(connect(served)) as connection:
        if comes == "at once":
            connection.sendall(head + ASK)
        elif comes == "later":
            connection.sendall(head)
            connection.sendall(ASK)
        elif comes == "in chunks":
            connection.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in ASK) + b"0\r\n\r\n")
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in head + ASK:
                connection.sendall(bytes([byte]))
        answer = heard(connection, b'"usage"')
        assert answer.startswith(b"HTTP/1.1 200")
        connection.sendall(HIDDEN)  # The connection still speaks HTTP/1.1.
        assert heard(connection).count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET, OTHER], ids=["h2c", "websocket", "other"])
def test_a_body_that_looks_like_a_request_is_none(served: ServerProcess, upgrade: bytes) -> None:
    for method in (b"POST", b"GET"):
        head = method + LINE.removeprefix(b"POST") + upgrade + b"Content-Length: %d\r\n\r\n" % len(HIDDEN)
        with closing(connect(served)) as connection:
            connection.sendall(head + HIDDEN + WHOLE + b"Connection: close\r\n\r\n" + ASK)
            answers = heard(connection)
            assert answers.count(b"HTTP/1.1 ") == 2, "one of it, one of what follows"
            assert answers.count(b'"object":"list"') == 0


def test_a_tunnel_is_refused_and_what_follows_is_not_read(served: ServerProcess) -> None:
    with closing(connect(served)) as connection:
        connection.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN)
        answers = heard(connection)
        assert (answers.count(b"HTTP/1.1 "), answers[:12]) == (1, b"HTTP/1.1 400")


def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_its_connection(served: ServerProcess) -> None:
    for body, keeps in ((ASK, b""), (STREAM, b""), (STREAM, b"Connection: keep-alive\r\n")):
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n" + keeps
        with closing(connect(served)) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            head, _, rest = heard(connection).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert rest.startswith(b"data: {" if body is STREAM else b"{")
        assert rest.endswith(b"data: [DONE]\n\n" if body is STREAM else b"}")


def test_a_body_that_is_too_large_is_413_for_callers_that_send_all_of_it(served: ServerProcess) -> None:
    """urllib announces that it closes, and reads no answer before it has sent everything."""
    large = b'{"prompt": "' + b"a" * (20 << 20) + b'"}'
    request = urllib.request.Request(
        f"http://{served.address}/v1/completions", large, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=30)
    with raised.value as answer:
        assert (answer.code, json.load(answer)["error"]["code"]) == (413, "request_too_large")
    with closing(connect(served)) as connection:
        connection.sendall(LINE + b"Content-Length: %d\r\n\r\n" % len(large) + large)
        answers = heard(connection)
        assert (answers.count(b"HTTP/1.1 "), answers[:12]) == (1, b"HTTP/1.1 413")
        assert b"connection: close" in answers


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/healthz", "/metrics"])
def test_a_body_that_nobody_reads_is_no_next_request(served: ServerProcess, path: str) -> None:
    with closing(connect(served)) as connection:
        connection.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" % path.encode())
        answer = heard(connection, b"\r\n\r\n")
        assert b"connection: close" in answer
        connection.sendall(HIDDEN * 30)
        assert b"HTTP/1.1" not in heard(connection)


def test_a_caller_that_has_shut_down_its_side_is_answered(served: ServerProcess) -> None:
    for body in (ASK, STREAM):
        with closing(connect(served)) as connection:
            connection.sendall(LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connection.shutdown(socket.SHUT_WR)
            assert b" 200 OK" in heard(connection)
    with closing(connect(served)) as connection:
        connection.sendall(WHOLE + b"\r\n" + ASK[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert heard(connection) == b"", "a request that is not whole is none"


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_caller_that_has_left_before_its_answer_is_noticed(
    served: ServerProcess, worker: ScriptedServer, version: str
) -> None:
    worker.answers["Generate"] = silent(worker)
    worker.cancelled.clear()
    before = worker.attempts["Generate"]
    try:
        with closing(connect(served)) as connection:
            connection.sendall((WHOLE + b"\r\n" + ASK).replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
            eventually(lambda: worker.attempts["Generate"] > before, "a worker is asked")
        assert worker.cancelled.wait(30)
    finally:
        worker.answers["Generate"] = two_samples


def test_a_body_is_asked_for_before_it_comes_and_refused_before(served: ServerProcess) -> None:
    with closing(connect(served)) as connection:
        connection.sendall(WHOLE + b"Expect: 100-continue\r\n\r\n")
        assert heard(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(ASK)
        assert heard(connection, b'"usage"').startswith(b"HTTP/1.1 200")
    with closing(connect(served)) as connection:
        connection.sendall(LINE + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n")
        assert heard(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_requests_behind_one_another_are_answered_in_their_order(served: ServerProcess) -> None:
    with closing(connect(served)) as connection:
        more = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + WHOLE + b"\r\n" + ASK
        connection.sendall(more * 10 + b"this is no HTTP\r\n\r\n")
        answers = heard(connection)
    assert answers.count(b"HTTP/1.1 200") == 20, "what is broken takes nothing from those before it"
    kinds = [answer[:4] for answer in answers.split(b"\r\n\r\n")[1:]]
    assert kinds == [b"HTTP", b'{"id'] * 10, "what says that it lives has no body"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n",
        WHOLE + b"Content-Length: 5\r\n",
        WHOLE + b"Transfer-Encoding: chunked\r\n",
        LINE + b"Transfer-Encoding: chunked, identity\r\n",
        LINE + b"Content-Length: -1\r\n",
        LINE + b"Content-Length : 5\r\n",
        LINE + b"X\x00: 5\r\n",
        b"GET /v1/models HTTP/2.0\r\nHost: x\r\n",
        b"GET /v1/models HTTP/0.9\r\nHost: x\r\n",
    ],
)
def test_heads_that_two_servers_could_read_differently_are_refused(served: ServerProcess, head: bytes) -> None:
    with closing(connect(served)) as connection:
        connection.sendall(head + b"\r\n" + HIDDEN)
        answers = heard(connection)
        assert answers.startswith(b"HTTP/1.1 400")
        error = json.loads(answers.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1")[0])["error"]
        assert sorted(error) == ["code", "message", "param", "type"]


@pytest.mark.parametrize(
    "beginning",
    [
        LINE + b"X-Padding: ",
        LINE + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ",
        LINE + b"Transfer-Encoding: chunked\r\n\r\n5;extension=",
        b"\r\n",
    ],
    ids=["header", "trailer", "extension", "empty lines"],
)
def test_nothing_that_is_no_body_goes_on_for_ever(served: ServerProcess, beginning: bytes) -> None:
    filler = beginning if beginning == b"\r\n" else b"p" * 1_000
    with closing(connect(served)) as connection:
        connection.sendall(beginning)
        with suppress(ConnectionError):
            for _ in range(200_000_000 // len(filler)):
                connection.sendall(filler)
            pytest.fail("it is never ended")


def test_a_stream_is_one_answer_however_slowly_its_caller_reads(served: ServerProcess, worker: ScriptedServer) -> None:
    worker.answers["Generate"] = endless(worker)
    try:
        with closing(connect(served)) as connection:
            connection.sendall(LINE + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
            assert heard(connection, b'"text":"a"').count(b"HTTP/1.1 200") == 1
            assert curl(served, "/healthz").status == 200
    finally:
        worker.answers["Generate"] = two_samples


def test_a_stream_begins_before_its_first_piece(served: ServerProcess, worker: ScriptedServer) -> None:
    """A long prompt computes for longer than many clients and proxies wait for a head."""
    worker.answers["Generate"] = silent(worker)
    worker.cancelled.clear()
    try:
        with closing(connect(served)) as connection:
            connection.sendall(LINE + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
            head = heard(connection, b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"text/event-stream" in head
        assert worker.cancelled.wait(30)
    finally:
        worker.answers["Generate"] = two_samples


@pytest.mark.parametrize("upgrade", [b"", H2C], ids=["plain", "h2c"])
def test_of_very_many_requests_behind_one_another_the_first_are_answered_and_none_twice(
    served: ServerProcess, upgrade: bytes
) -> None:
    one = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + upgrade + b"X-Request-Id: %d\r\n\r\n"
    with closing(connect(served)) as connection:
        connection.sendall(b"".join(one % number for number in range(1_000)))
        answers = heard(connection)
    ids = [int(line.split(b" ")[1]) for line in answers.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    assert ids == list(range(len(ids)))
    assert 10 < len(ids) < 1_000


def test_callers_cannot_fill_the_log(worker: ScriptedServer, tmp_path: Path) -> None:
    with gateway(tmp_path, "--worker", worker.address, QUIRE_API_KEYS="sk-alpha-0123456789") as served:
        before = (tmp_path / "log").read_text()
        for _ in range(50):
            with closing(connect(served)) as connection:
                connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
                assert connection.recv(12) == b"HTTP/1.1 400"
            assert curl(served, "/v1/models").status == 401
    lines = (tmp_path / "log").read_text().removeprefix(before).splitlines()
    # On a busy machine two things may add lines: the worker seems silent for a moment, or a second minute begins.
    assert len([line for line in lines if '"event": "worker ' not in line]) <= 6


def test_an_id_that_cannot_be_one_is_replaced_and_the_answer_says_by_which(served: ServerProcess) -> None:
    """Proxies write ids of their own, some of them long. That is no reason to refuse a request."""
    for given in ("a b", "x" * 65, "Root=1-67891233-abcdef012345678912345678;Parent=53995c3f42cd8ad8;Sampled=1"):
        answer = curl(served, "/v1/completions", "-H", f"X-Request-Id: {given}", body=json.loads(ASK))
        assert (answer.status, len(answer.headers["x-request-id"])) == (200, 32)


def test_a_handshake_has_a_deadline_and_holds_nobody_up(worker: ScriptedServer, tmp_path: Path) -> None:
    quire_certs(tmp_path / "certs")
    files = [str(tmp_path / "certs" / name) for name in ("server.pem", "server.key", "ca.pem")]
    tls = ("--tls-cert", files[0], "--tls-key", files[1])
    with (
        gateway(tmp_path / "gateway", "--worker", worker.address, *tls) as served,
        closing(connect(served)) as silent_one,
    ):
        command = ["curl", "-sS", "--cacert", files[2], "--json", STREAM, f"https://{served.address}/v1/completions"]
        done = subprocess.run(command, capture_output=True, timeout=60, check=True)
        assert done.stdout.endswith(b"data: [DONE]\n\n")
        assert silent_one.recv(1) == b"", "it is ended"


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        (b"Content-Encoding: gzip\r\n", "content-encoding 'gzip'"),
        (b"Content-Encoding: identity, br\r\n", "content-encoding 'identity, br'"),
        (b"Transfer-Encoding: gzip, chunked\r\n", "transfer-encoding 'gzip, chunked'"),
        (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", "transfer-encoding 'gzip'"),
    ],
)
def test_a_body_in_a_coding_that_is_not_read_is_refused_by_its_name(
    served: ServerProcess, headers: bytes, shown: str
) -> None:
    is_chunked = headers.startswith(b"Transfer")
    length = b"" if is_chunked else b"Content-Length: %d\r\n" % len(ASK)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(ASK), ASK) if is_chunked else ASK
    with closing(connect(served)) as connection:
        connection.sendall(LINE + headers + length + b"Connection: close\r\n\r\n" + body)
        answer = heard(connection)
    assert answer.startswith(b"HTTP/1.1 415")
    assert shown in answer.decode()


@pytest.mark.parametrize("headers", [b"Content-Encoding: Identity\r\n", b"Content-Encoding:\r\n"])
def test_a_body_as_it_is_may_say_so(served: ServerProcess, headers: bytes) -> None:
    with closing(connect(served)) as connection:
        connection.sendall(WHOLE + headers + b"Connection: close\r\n\r\n" + ASK)
        assert heard(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "trailer",
    [b"X-Request-Id: smuggled", b"Host: another", b"Content-Encoding: gzip", b"Content-Type: text/plain"],
)
def test_what_follows_a_body_is_no_header(served: ServerProcess, trailer: bytes) -> None:
    """A proxy that removes headers of callers passes such trailers on."""
    chunks = b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(ASK), ASK, trailer)
    with closing(connect(served)) as connection:
        connection.sendall(LINE + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
        answer = heard(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"smuggled" not in answer


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        (b"http://x", 200, b""),
        (b"http://x?a=b", 200, b""),
        (b"http://x/v1/models", 200, b""),
        (b"http://[::1/", 400, b"the request's target is not a URL"),
        (b"http://x:99999/", 400, b"the request's target is not a URL"),
        (b"/" + b"a" * 65_600, 400, b"at most 65,536 bytes"),
    ],
)
def test_a_target_is_a_path_or_a_url(served: ServerProcess, target: bytes, status: int, said: bytes) -> None:
    for upgrade in (b"", H2C):
        with closing(connect(served)) as connection:
            connection.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
            answer = heard(connection, b'":[' if status == 200 else None)
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert said in answer


def test_callers_of_http_1_0_get_one_answer_whatever_they_expect(served: ServerProcess) -> None:
    with closing(connect(served)) as connection:
        connection.sendall(WHOLE.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\n\r\n" + ASK[:1])
        connection.sendall(ASK[1:])
        answer = heard(connection)
    assert (answer.count(b"HTTP/1.1 "), answer[:12]) == (1, b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("/", "GET, HEAD, OPTIONS"),
        ("/readyz", "GET, HEAD, OPTIONS"),
        ("/v1/chat/completions", "POST, OPTIONS"),
        ("/v1/responses/resp_1", "DELETE, GET, HEAD, OPTIONS"),
        ("*", "DELETE, GET, HEAD, POST, OPTIONS"),
    ],
)
def test_options_names_the_methods_of_a_path(served: ServerProcess, target: str, allowed: str) -> None:
    answer = curl(served, "/", "-X", "OPTIONS", "--request-target", target)
    assert (answer.status, answer.headers["allow"], answer.body) == (204, allowed, b"")
    wrong = curl(served, "/", "-X", "PUT", "--request-target", target)
    expected = (404, None) if target == "*" else (405, allowed)
    assert (wrong.status, wrong.headers.get("allow")) == expected
