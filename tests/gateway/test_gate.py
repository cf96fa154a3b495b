"""Tests keys, limits and failures in front of scripted workers."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import structlog
from quire import AsyncClient
from quire._transport.messages import worker_status
from quire.cli.app import app as cli
from quire.errors import Reason, UnavailableError, UsageError
from quire.local import ServerFailedError
from quire.v1 import worker_pb2 as pb
from quire_gateway.backend import Backend
from quire_gateway.keys import ApiKeys
from typer.testing import CliRunner

from tests.client.servers import ScriptedServer, endless, refusing, scripted_server, secret_file, two_samples
from tests.e2e.stack import eventually
from tests.gateway.scene import STATUS, client, curl, events, gateway, script
from tests.security.certificates import quire_certs

KEY, OTHER_KEY, TOKEN = "sk-alpha-0123456789", "sk-beta-0123456789", "operators-token-0123456789"
ASK = {"model": "scripted", "prompt": "p", "n": 2}


@pytest.fixture
def worker() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield script(server)


def test_a_key_opens_its_namespace_and_nobody_else_is_let_in(worker: ScriptedServer, tmp_path: Path) -> None:
    keys = secret_file(tmp_path / "keys", f"# who may call\n{KEY}\n{OTHER_KEY} acme\n")
    token = secret_file(tmp_path / "token", TOKEN)
    arguments = ("--worker", worker.address, "--api-keys", str(keys), "--token-file", str(token))
    with gateway(tmp_path / "gateway", *arguments) as served:
        for key, namespace in ((KEY, ""), (OTHER_KEY, "acme")):
            answer = client(served, key).completions.create(**ASK)  # type: ignore[call-overload]
            assert [choice.text for choice in answer.choices] == ["ab", "xy"]
            assert worker.requests[-1].namespace == namespace
            assert worker.metadata["authorization"] == f"Bearer {TOKEN}"
        with pytest.raises(openai.AuthenticationError) as raised:
            client(served, "sk-guess-0123456789").models.list()
        assert raised.value.code == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            refused = curl(served, path)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer"), path
        assert curl(served, "/metrics", "-H", f"Authorization: Bearer {KEY}").status == 401
        assert curl(served, "/metrics", "-H", f"Authorization: Bearer {TOKEN}").status == 200
        assert curl(served, "/metrics", "-H", f"authorization: bearer {TOKEN}").status == 200
        assert curl(served, "/v1/models", "-H", f"Authorization: Bearer {TOKEN}").status == 401
        assert (curl(served, "/healthz").status, curl(served, "/readyz").status) == (200, 200)
    log = (tmp_path / "gateway" / "log").read_text()
    assert not any(secret in log for secret in (KEY, OTHER_KEY, TOKEN, "guess"))


def test_keys_come_from_the_environment_too_and_without_any_the_token_is_one(
    worker: ScriptedServer, tmp_path: Path
) -> None:
    with gateway(tmp_path / "a", "--worker", worker.address, QUIRE_API_KEYS=f"{KEY} acme,{OTHER_KEY}") as served:
        client(served, KEY).completions.create(**ASK)  # type: ignore[call-overload]
        assert worker.requests[-1].namespace == "acme"
        assert curl(served, "/v1/models").status == 401
    token = secret_file(tmp_path / "token", TOKEN)
    with gateway(tmp_path / "b", "--worker", worker.address, "--token-file", str(token)) as served:
        assert curl(served, "/v1/models").status == 401
        assert [model.id for model in client(served, TOKEN).models.list()] == ["scripted"]


def test_on_loopback_only_names_of_this_machine_are_answered(worker: ScriptedServer, tmp_path: Path) -> None:
    """A hostile page can point its own name to 127.0.0.1. The browser still sends that name."""
    with gateway(tmp_path, "--worker", worker.address, "--host", "Gateway.example") as served:
        for host in (
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:80",
            "[::1].evil.example",
            "a..b",
            "user@localhost",
            "localhost:80@evil.example",
            "[::1]:80@evil.example",
            "127.0.0.1%evil.example",
            "localhost/.evil.example",
            "localhost:evil",
        ):
            for path in ("/v1/models", "/metrics", "/nowhere", "/openapi.json"):
                answer = curl(served, path, "-H", f"Host: {host}")
                assert (answer.status, answer.error["code"]) == (421, "misdirected_request"), host
                assert "Host '." not in answer.error["message"], host
        assert curl(served, "/v1/completions", "-H", "Host: evil.example", body=ASK).status == 421
        own = "localhost LOCALHOST:8000 a.localhost 127.0.0.1:1 [::1]:80 [fe80::1%eth0]:80 127.0.0.1."
        for host in (*own.split(), "gateway.example.:80", "gateway.example.", "box"):
            assert curl(served, "/v1/models", "-H", f"Host: {host}").status == 200, host
        for target, status in (("http://evil.example/v1/models", 421), ("http://localhost/v1/models", 200)):
            for host in ("localhost", "evil.example"):  # The target's host decides, not the header.
                answer = curl(served, "/", "--request-target", target, "-H", f"Host: {host}")
                assert answer.status == status, (target, host)
        for name in ("X-Forwarded-Host: localhost", "Forwarded: host=localhost", "X-Original-Host: localhost"):
            assert curl(served, "/v1/models", "-H", "Host: evil.example", "-H", name).status == 421, name
            evil = name.replace("localhost", "evil.example")
            assert curl(served, "/v1/models", "-H", "Host: localhost", "-H", evil).status == 200, evil
        assert curl(served, "/healthz", "-H", "Host: evil.example").status == 200, "probes say yes or no to anybody"
    arguments = ("--worker", worker.address, "--listen", "0.0.0.0:0", "--plain-http")
    with gateway(tmp_path / "open", *arguments, QUIRE_API_KEYS=KEY) as served:
        local = served.address.replace("0.0.0.0", "127.0.0.1")
        headers = ("-H", f"Authorization: Bearer {KEY}", "-H", "Host: any.example")
        assert subprocess.run(["curl", "-sf", *headers, f"http://{local}/v1/models"], check=False).returncode == 0


def test_no_key_of_a_tenant_opens_the_metrics(worker: ScriptedServer, tmp_path: Path) -> None:
    with gateway(tmp_path, "--worker", worker.address, QUIRE_API_KEYS=f"{KEY} acme,{OTHER_KEY} beta") as served:
        answer = curl(served, "/metrics", "-H", f"Authorization: Bearer {KEY}")
        assert (answer.status, "the gateway's own token" in answer.error["message"]) == (403, True)
        assert curl(served, "/metrics").status == 401


def test_one_namespace_leaves_places_for_another(worker: ScriptedServer, tmp_path: Path) -> None:
    worker.answers["Generate"] = endless(worker)
    keys = f"{KEY} acme,{OTHER_KEY} beta"
    with gateway(tmp_path, "--worker", worker.address, "--max-in-flight", "4", QUIRE_API_KEYS=keys) as served:
        streams = [client(served, KEY).completions.create(**ASK, stream=True) for _ in range(2)]  # type: ignore[call-overload]
        for stream in streams:
            assert next(stream).choices[0].text == "a"
        with pytest.raises(openai.RateLimitError):
            client(served, KEY).completions.create(**ASK)  # type: ignore[call-overload]
        other = client(served, OTHER_KEY).completions.create(**ASK, stream=True)  # type: ignore[call-overload]
        assert next(other).choices[0].text == "a"
        for stream in (*streams, other):
            stream.close()


def test_a_priority_is_vllms_where_lower_is_sooner_at_every_endpoint(worker: ScriptedServer, tmp_path: Path) -> None:
    usage = pb.Usage(prompt_token_count=3, output_token_count=1)
    answer = pb.GenerateResponse(token_ids=[1], text="a", finish_reason=pb.FINISH_REASON_STOP, usage=usage)
    worker.answers["Generate"] = lambda *_: iter([answer])
    worker.answers["Detokenize"] = lambda asked, _: pb.DetokenizeResponse(texts=[b"a" for _ in asked.token_ids])
    worker.answers["Prefill"] = lambda *_: pb.PrefillResponse(branch_id=bytes(16), token_count=3, ttl_ms=60_000)
    message = {"role": "user", "content": "p"}
    with gateway(tmp_path, "--worker", worker.address) as served:
        branch = json.loads(curl(served, "/v1/branches", body={"model": "scripted", "prompt": "p"}).body)["id"]
        asks = {
            "/v1/completions": {"model": "scripted", "prompt": "p"},
            "/v1/chat/completions": {"model": "scripted", "messages": [message]},
            "/v1/responses": {"model": "scripted", "input": "p"},
            f"/v1/branches/{branch}/generate": {},
        }
        for path, ask in asks.items():
            for given, sent in ((-3, 3), (10, -10), (None, 0)):
                told = curl(served, path, body={**ask, "priority": given})
                assert told.status == 200, (path, told.body)
                asked = [request for request in worker.requests if isinstance(request, pb.GenerateRequest)]
                assert asked[-1].priority == sent, path
            assert curl(served, path, body={**ask, "priority": 11}).error["param"] == "priority", path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("short", "entry 1: write KEY or KEY NAMESPACE, and .*a key needs at least 16"),
        (f"{KEY}\n{KEY} acme", "entry 2: this key occurs twice"),
        (f"{KEY} a b", "entry 1"),
        (f"{KEY} " + "n" * 129, "a namespace may have at most 128 bytes"),
        ("# nobody\n", "must have 1 to .* keys, not 0"),
        (f"{KEY}\n{OTHER_KEY} acme\n{KEY}-2", "entries 1 and 3: only one key may lack a namespace"),
    ],
)
def test_keys_that_are_none_are_refused_without_being_shown(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        ApiKeys(text, "here")
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "0.0.0.0:0"], "give --api-keys or --token-file, and --tls-cert and --tls-key (or --plain-http)"),
        (["--listen", "0.0.0.0:0", "--plain-http"], "give --api-keys or --token-file;"),
        (["--listen", "unix:///tmp/x"], "write host:port; the gateway cannot listen on a Unix socket"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "x"], "TLS needs both --tls-cert and --tls-key"),
        (["--listen", "127.0.0.1:0", "--api-keys", "/nonexistent"], "key file /nonexistent: No such file"),
        (["--listen", "127.0.0.1:0", "--worker", "http://x:1"], "is a URL"),
        (["--listen", "203.0.113.1:80"], "can be reached from other machines"),
        (["--listen", "127.0.0.1:0", "--cors-origin", "app.example"], "--cors-origin app.example: write an origin as"),
        (["--listen", "127.0.0.1:0", "--cors-origin", "https://app.example/"], "write an origin as browsers send it"),
        (["--listen", "127.0.0.1:0", "--cors-origin", "https://App.example"], "write an origin as browsers send it"),
        (["--listen", "127.0.0.1:0", "--cors-origin", "https://a.example:443"], "write an origin as browsers send it"),
        (["--listen", "127.0.0.1:0", "--cors-origin", "https://*.example"], "write an origin as browsers send it"),
    ],
)
def test_what_is_unsafe_or_no_address_is_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ServerFailedError) as raised, gateway(tmp_path, *arguments):
        pass
    assert message in str(raised.value)
    assert "exit code 2" in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_a_full_queue_is_429_and_says_when_to_come_back(worker: ScriptedServer, tmp_path: Path) -> None:
    worker.answers["Generate"] = refusing(Reason.QUEUE_FULL)
    with gateway(tmp_path, "--worker", worker.address) as served:
        for is_streamed in (False, True):
            answer = curl(served, "/v1/completions", body={**ASK, "stream": is_streamed})
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "queue_full")
        with pytest.raises(openai.RateLimitError):
            client(served).completions.create(**ASK)  # type: ignore[call-overload]


def test_more_requests_than_the_gateway_takes_are_429(worker: ScriptedServer, tmp_path: Path) -> None:
    worker.answers["Generate"] = endless(worker)
    with gateway(tmp_path, "--worker", worker.address, "--max-in-flight", "1") as served:
        stream = client(served).completions.create(**ASK, stream=True)  # type: ignore[call-overload]
        assert next(stream).choices[0].text == "a"
        assert curl(served, "/v1/completions", body=ASK).status == 429
        assert curl(served, "/healthz").status == 200
        stream.close()
        assert worker.cancelled.wait(30)
        worker.answers["Generate"] = two_samples
        eventually(lambda: curl(served, "/v1/completions", body=ASK).status == 200, "there is room again")


def test_another_worker_is_asked_where_one_is_full_or_away(worker: ScriptedServer, tmp_path: Path) -> None:
    with scripted_server() as full:
        script(full).answers["Generate"] = refusing(Reason.QUEUE_FULL)
        with gateway(tmp_path, "--worker", full.address, "--worker", worker.address) as served:
            for _ in range(3):
                answer = client(served).completions.create(**ASK)  # type: ignore[call-overload]
                assert [choice.text for choice in answer.choices] == ["ab", "xy"]
            assert full.attempts["Generate"] == 3
            assert 'quire_gateway_retries_total{model="scripted"} 3.0' in curl(served, "/metrics").body.decode()
            full.server.stop(None).wait()
            eventually(lambda: "worker does not answer" in (tmp_path / "log").read_text(), "it is noticed")
            state = f'quire_gateway_worker_ready{{model="scripted",worker="{full.address}"}} 0.0'
            assert state in curl(served, "/metrics").body.decode()
            client(served).completions.create(**ASK)  # type: ignore[call-overload]


def test_without_a_worker_the_gateway_is_alive_and_not_ready(tmp_path: Path) -> None:
    with gateway(tmp_path, "--worker", "127.0.0.1:1") as served:
        assert curl(served, "/healthz").status == 200
        for path in ("/readyz", "/v1/models/scripted"):
            answer = curl(served, path)
            assert (answer.status, answer.error["message"]) == (503, "no worker answers")
        assert json.loads(curl(served, "/v1/models").body)["data"] == []


async def test_a_worker_that_is_away_is_said_once_until_it_is_there() -> None:
    backend, status = Backend(AsyncClient("127.0.0.1:1")), worker_status(STATUS)
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            backend.lost(UnavailableError("nobody"))
        backend.heard(status)
        backend.heard(status)
        backend.lost(UnavailableError("nobody"))
    assert [line["event"] for line in logged] == ["worker does not answer", "worker answers", "worker does not answer"]


def test_a_worker_without_its_allocator_is_asked_last_and_the_gateway_says_that_it_is_not_ready(
    worker: ScriptedServer, tmp_path: Path
) -> None:
    with scripted_server() as alone:
        script(alone).answers["GetStatus"] = lambda *_: pb.GetStatusResponse(model="scripted", sequence_tokens_max=100)
        with gateway(tmp_path, "--worker", alone.address, "--worker", worker.address) as served:
            for _ in range(3):
                assert curl(served, "/v1/completions", body=ASK).status == 200
            assert (alone.attempts["Generate"], worker.attempts["Generate"]) == (0, 3)
            assert curl(served, "/readyz").status == 200
            worker.server.stop(None).wait()
            eventually(lambda: curl(served, "/readyz").status == 503, "nobody with an allocator is left")
            answer = curl(served, "/readyz")
            assert answer.error["message"] == (
                "no worker is ready: the workers that answer have no session with their allocator"
            )
            assert answer.headers["retry-after"] == "1"
            assert curl(served, "/healthz").status == 200
            assert curl(served, "/v1/completions", body=ASK).status == 200
            asked = CliRunner().invoke(cli, ["health", f"http://{served.address}"])
            assert asked.exit_code == 1
            assert asked.output == f"server=NOT_SERVING (503: {answer.error['message']})\n"


def test_health_of_an_encrypted_gateway_is_asked_with_its_authority(worker: ScriptedServer, tmp_path: Path) -> None:
    quire_certs(tmp_path / "certs")
    files = {name: str(tmp_path / "certs" / name) for name in ("ca.pem", "server.pem", "server.key")}
    tls = ("--tls-cert", files["server.pem"], "--tls-key", files["server.key"])
    with gateway(tmp_path / "gateway", "--worker", worker.address, *tls) as served:
        address = f"https://{served.address}"
        for live in ([], ["--live"]):
            asked = CliRunner().invoke(cli, ["health", address, "--tls-ca", files["ca.pem"], *live])
            assert (asked.exit_code, asked.output) == (0, "server=SERVING\n")
        unknown = CliRunner().invoke(cli, ["health", address])
        assert isinstance(unknown.exception, UnavailableError)
        assert "CERTIFICATE_VERIFY_FAILED" in str(unknown.exception)
        wrong = CliRunner().invoke(cli, ["health", address, "--tls-ca", files["server.key"]])
        assert isinstance(wrong.exception, UsageError)
        assert isinstance(CliRunner().invoke(cli, ["health", address.replace("s:", ":")]).exception, UnavailableError)


def test_a_certificate_that_is_none_is_refused_and_one_that_is_replaced_is_shown_without_a_restart(
    worker: ScriptedServer, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        quire_certs(folder)
    pair = {name: str(old / f"server.{name}") for name in ("pem", "key")}
    for cert, key, said in (
        (pair["pem"], str(new / "server.key"), "key values mismatch"),
        (pair["key"], pair["key"], f"certificate {pair['key']} and key {pair['key']}: "),
        ("/nonexistent", pair["key"], "/nonexistent: No such file or directory"),
    ):
        with (
            pytest.raises(ServerFailedError) as raised,
            gateway(tmp_path / "none", "--tls-cert", cert, "--tls-key", key),
        ):
            pass
        assert said in str(raised.value)
        assert "Traceback" not in str(raised.value)
    tls = ("--tls-cert", pair["pem"], "--tls-key", pair["key"])
    with gateway(tmp_path / "gateway", "--worker", worker.address, *tls) as served:

        def is_trusted(folder: Path) -> bool:
            asked = CliRunner().invoke(cli, ["health", f"https://{served.address}", "--tls-ca", str(folder / "ca.pem")])
            return asked.exit_code == 0

        assert [is_trusted(old), is_trusted(new)] == [True, False]
        for name in ("pem", "key"):
            shutil.copy(new / f"server.{name}", old / f"server.{name}")
        assert [is_trusted(old), is_trusted(new)] == [False, True]


def test_what_fails_in_mid_stream_is_the_streams_last_word(worker: ScriptedServer, tmp_path: Path) -> None:
    def broken(request: object, context: object) -> Iterator[object]:
        answers = two_samples(request, context)  # type: ignore[arg-type]
        yield next(answers)
        refusing(Reason.MODEL_FAILED)(request, context)  # type: ignore[arg-type]

    worker.answers["Generate"] = broken
    with gateway(tmp_path, "--worker", worker.address) as served:
        told = events(curl(served, "/v1/completions", body={**ASK, "stream": True}).body)
        assert told[-1]["error"]["type"] == "server_error"
        stream = client(served).completions.create(**ASK, stream=True)  # type: ignore[call-overload]
        with pytest.raises(openai.APIError, match="as the script says"):
            list(stream)
        answer = curl(served, "/v1/completions", body=ASK)
        assert (answer.status, answer.error["code"]) == (500, "internal_error")


def test_an_answer_that_a_worker_breaks_off_is_not_called_whole(worker: ScriptedServer, tmp_path: Path) -> None:
    worker.answers["Generate"] = lambda request, context: iter(list(two_samples(request, context))[:2])
    with gateway(tmp_path, "--worker", worker.address) as served:
        answer = curl(served, "/v1/completions", body=ASK)
        assert (answer.status, answer.error["code"]) == (502, "incomplete")


def test_bodies_have_a_limit_whether_or_not_they_say_their_length(worker: ScriptedServer, tmp_path: Path) -> None:
    with gateway(tmp_path, "--worker", worker.address, "--max-body-bytes", "1000") as served:
        large = {**ASK, "prompt": "p" * 1_000}
        for arguments in ((), ("-H", "Transfer-Encoding: chunked")):
            answer = curl(served, "/v1/completions", *arguments, body=large)
            assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert curl(served, "/v1/completions", body=ASK).status == 200


def test_headers_have_a_limit_too(worker: ScriptedServer, tmp_path: Path) -> None:
    """The limit holds however small the pieces of the headers are. Pieces of a body do not count."""
    body = json.dumps({**ASK, "prompt": "p" * 100_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: quire\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with gateway(tmp_path, "--worker", worker.address) as served:
        host, port = served.address.rsplit(":", 1)
        for name, answer in (
            (b"X-Padding: ", b"HTTP/1.1 400"),
            (b"Content-Length: %d\r\n" % len(body), b"HTTP/1.1 200"),
        ):
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(head + name)
                with contextlib.suppress(ConnectionError):  # The server closes before all headers are sent.
                    if name.endswith(b"\n"):
                        connection.sendall(b"\r\n" + body)
                    else:
                        for _ in range(1_000):
                            connection.sendall(b"p" * 1_000)
                assert connection.recv(12) == answer
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 400"
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["event"] for line in lines if line["level"] == "warning"] == ["invalid HTTP"]
