"""Tests the gateway's keys: names, limits, expiry, and rereading their file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from quire.errors import UsageError
from quire.v1 import worker_pb2 as pb
from quire_gateway.keys import ApiKey, ApiKeys
from quire_gateway.limits import KeyLimits, Refusal

from tests.client.servers import ScriptedServer, endless, scripted_server, secret_file, two_samples
from tests.e2e.stack import eventually
from tests.gateway.scene import client, curl, gateway, script

KEY, OTHER_KEY, TOKEN = "sk-alpha-0123456789", "sk-beta-0123456789", "operators-token-0123456789"
ASK = {"model": "scripted", "prompt": "p", "n": 2}


@pytest.fixture
def worker() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield script(server)


def shown(key: str) -> tuple[str, str]:
    return "-H", f"Authorization: Bearer {key}"


# -- the file of keys --------------------------------------------------------------------------------------------------


def test_a_line_has_a_name_limits_and_an_end() -> None:
    line = f"{KEY} acme name=web requests=600 tokens=100000 concurrent=8 expires=2027-01-31T12:00Z special_tokens=text"
    now_s = 1_801_396_799.0  # one second before the key expires
    keys = ApiKeys(f"{line}\n{OTHER_KEY} beta", "here", clock=lambda: now_s)
    key = keys.named(f"Bearer {KEY}".encode())
    assert key is not None
    assert (key.namespace, key.name) == ("acme", "web")
    assert (key.requests_per_minute, key.tokens_per_minute, key.concurrent_max) == (600, 100_000, 8)
    assert key.split_special_tokens is True
    other = keys.named(f"Bearer {OTHER_KEY}".encode())
    assert other is not None
    assert other.split_special_tokens is None
    assert (other.name, other.requests_per_minute, other.expires_s) == ("beta", None, None)
    now_s += 1
    assert keys.named(f"Bearer {KEY}".encode()) is None
    assert keys.named(f"Bearer {OTHER_KEY}".encode()) is not None


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("acme requests=0", "requests= takes a whole number from 1"),
        ("acme tokens=-1", "tokens= takes a whole number"),
        ("acme request=5", "write KEY or KEY NAMESPACE, and after these name="),
        ("acme name=a,b", "entry 2"),
        ("acme name=" + "n" * 65, "a name needs 1 to 64"),
        ("acme expires=soon", "expires= takes a date"),
        ("acme special_tokens=yes", "special_tokens= takes text or tokens"),
        ("acme concurrent=1 concurrent=2", "an option occurs twice"),
        ("acme beta", "write KEY"),
    ],
)
def test_a_line_that_is_wrong_is_refused_without_its_key(rest: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        ApiKeys(f"{KEY} {rest}", "here")
    assert KEY not in str(raised.value)


# -- limits ------------------------------------------------------------------------------------------------------------


def key_with(**limits: int) -> ApiKey:
    return ApiKey(b"k" * 32, "acme", "web", **limits)


def test_requests_a_minute_come_back_steadily() -> None:
    limits, key = KeyLimits(), key_with(requests_per_minute=6)
    assert [limits.begin(key, 0.0) for _ in range(6)] == [None] * 6
    assert limits.begin(key, 0.0) == Refusal("requests", 6, 10.0)
    assert limits.begin(key, 4.0) == Refusal("requests", 6, pytest.approx(6.0))
    assert limits.begin(key, 10.0) is None
    assert limits.begin(key, 10.0) is not None
    assert [limits.begin(key, 1_000.0) for _ in range(7)][-2:] == [None, Refusal("requests", 6, 10.0)], "never more"


def test_tokens_are_counted_when_a_request_ends_and_made_up_for() -> None:
    limits, key = KeyLimits(), key_with(tokens_per_minute=60)
    assert limits.begin(key, 0.0) is None
    limits.end(key, 90)
    assert limits.begin(key, 0.0) == Refusal("tokens", 60, pytest.approx(31.0))
    assert limits.begin(key, 30.0) is not None
    assert limits.begin(key, 31.0) is None


def test_requests_at_a_time_are_places() -> None:
    limits, key = KeyLimits(), key_with(concurrent_max=2)
    assert [limits.begin(key, 0.0) for _ in range(3)] == [None, None, Refusal("concurrent", 2, 1.0)]
    limits.end(key, 0)
    assert limits.begin(key, 0.0) is None


def test_a_key_keeps_its_counts_when_the_file_is_read_again_unless_its_limit_is_another() -> None:
    limits = KeyLimits()
    assert limits.begin(key_with(requests_per_minute=1), 0.0) is None
    limits.keep(frozenset({b"k" * 32}))
    assert limits.begin(key_with(requests_per_minute=1), 0.0) is not None
    assert limits.begin(key_with(requests_per_minute=2), 0.0) is None
    limits.keep(frozenset())
    assert limits.begin(key_with(concurrent_max=1), 0.0) is not None, "two of its requests are still answered"


def test_a_limit_is_429_with_its_name_and_when_to_come_back(worker: ScriptedServer, tmp_path: Path) -> None:
    keys = f"{KEY} acme requests=1,{OTHER_KEY} beta concurrent=1"
    with gateway(tmp_path, "--worker", worker.address, QUIRE_API_KEYS=keys) as served:
        assert curl(served, "/v1/completions", *shown(KEY), body=ASK).status == 200
        refused = curl(served, "/v1/completions", *shown(KEY), body=ASK)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert "'requests'" in refused.error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        worker.answers["Generate"] = endless(worker)
        stream = client(served, OTHER_KEY).completions.create(**ASK, stream=True)  # type: ignore[call-overload]
        next(stream)
        refused = curl(served, "/v1/completions", *shown(OTHER_KEY), body=ASK)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "'concurrent'" in refused.error["message"]
        stream.close()
        worker.answers["Generate"] = two_samples
        eventually(
            lambda: curl(served, "/v1/completions", *shown(OTHER_KEY), body=ASK).status == 200, "its place is free"
        )


# -- rereading the file ------------------------------------------------------------------------------------------------


def test_a_replaced_file_and_a_hang_up_put_new_keys_in_force_and_kill_nothing(
    worker: ScriptedServer, tmp_path: Path
) -> None:
    path = secret_file(tmp_path / "keys", f"{KEY} acme\n")
    with gateway(tmp_path / "gateway", "--worker", worker.address, "--api-keys", str(path)) as served:
        worker.answers["Generate"] = endless(worker)
        stream = client(served, KEY).completions.create(**ASK, stream=True)  # type: ignore[call-overload]
        next(stream)
        assert curl(served, "/v1/models", *shown(OTHER_KEY)).status == 401
        replacement = secret_file(tmp_path / "new", f"{OTHER_KEY} beta\n")
        os.replace(replacement, path)
        eventually(lambda: curl(served, "/v1/models", *shown(OTHER_KEY)).status == 200, "the new key opens")
        assert curl(served, "/v1/models", *shown(KEY)).status == 401
        assert not worker.cancelled.is_set(), "what the former key had begun is answered"
        path.write_text("no key\n")
        log = tmp_path / "gateway" / "log"
        eventually(lambda: "the file of API keys is unusable" in log.read_text(), "a bad file is noticed")
        os.kill(served._ready["pid"], signal.SIGHUP)
        eventually(lambda: log.read_text().count("the file of API keys is unusable") >= 2, "it is read again")
        assert curl(served, "/v1/models", *shown(OTHER_KEY)).status == 200
        stream.close()
    assert not any(secret in log.read_text() for secret in (KEY, OTHER_KEY))


# -- metrics and requests for operators --------------------------------------------------------------------------------


def test_operators_see_requests_with_the_names_of_their_keys_and_why_they_wait(
    worker: ScriptedServer, tmp_path: Path
) -> None:
    worker.answers["Generate"] = endless(worker)
    worker.answers["ListRequests"] = lambda *_: pb.ListRequestsResponse(
        requests=[
            pb.RequestInfo(
                request_id="chat-7", state=pb.REQUEST_STATE_WAITING, wait_reason=pb.WAIT_REASON_PLACES, sequence_ids=[9]
            )
        ]
    )
    token = secret_file(tmp_path / "token", TOKEN)
    keys = f"{KEY} acme name=web"
    arguments = ("--worker", worker.address, "--token-file", str(token))
    with gateway(tmp_path / "gateway", *arguments, QUIRE_API_KEYS=keys) as served:
        headers = {"X-Request-Id": "chat-7"}
        stream = client(served, KEY).completions.create(**ASK, stream=True, extra_headers=headers)  # type: ignore[call-overload]
        next(stream)
        assert curl(served, "/requests", *shown(KEY)).status == 401
        (found,) = json.loads(curl(served, "/requests", *shown(TOKEN)).body)["requests"]
        assert (found["request_id"], found["key"], found["namespace"]) == ("chat-7", "web", "acme")
        assert (found["model"], found["workers"]) == ("scripted", [worker.address])
        (at_worker,) = found["at_workers"]
        assert (at_worker["waits_for"], at_worker["sequences"]) == ("PLACES", [9])
        stream.close()
        assert worker.cancelled.wait(30)
        worker.answers["Generate"] = two_samples
        client(served, KEY).completions.create(**ASK)  # type: ignore[call-overload]
        ended = 'quire_gateway_key_requests_total{key="web",model="scripted"}'
        while f"{ended} 1.0" in (metrics := curl(served, "/metrics", *shown(TOKEN)).body.decode()):
            pass  # The gateway may count the request only after the worker has noticed the cancellation.
        assert f"{ended} 2.0" in metrics
        assert 'quire_gateway_key_tokens_total{key="web",kind="output",model="scripted"} 5.0' in metrics


def test_errors_are_counted_by_name_of_the_key_so_that_it_is_known_who_gets_the_429(
    worker: ScriptedServer, tmp_path: Path
) -> None:
    token = secret_file(tmp_path / "token", TOKEN)
    arguments = ("--worker", worker.address, "--token-file", str(token))
    with gateway(tmp_path / "gateway", *arguments, QUIRE_API_KEYS=f"{KEY} acme name=web requests=1") as served:
        impatient = client(served, KEY)
        with pytest.raises(openai.BadRequestError):
            impatient.completions.create(**ASK, top_p=7)  # type: ignore[call-overload]
        for _ in range(2):
            with pytest.raises(openai.RateLimitError):
                impatient.completions.create(**ASK)  # type: ignore[call-overload]
        metrics = curl(served, "/metrics", *shown(TOKEN)).body.decode()
    assert 'quire_gateway_key_errors_total{error="rate_limit_exceeded",key="web"} 2.0' in metrics
    assert 'quire_gateway_key_errors_total{error="invalid_request_error",key="web"} 1.0' in metrics


def test_each_request_is_a_line_in_the_log_with_its_key_and_without_its_text(
    worker: ScriptedServer, tmp_path: Path
) -> None:
    keys = f"{KEY} acme name=web"
    arguments = ("--worker", worker.address, "--log-format", "json")
    with gateway(tmp_path, *arguments, QUIRE_API_KEYS=keys) as served:
        ask = {**ASK, "prompt": "a secret recipe"}
        client(served, KEY).completions.create(**ask, extra_headers={"X-Request-Id": "one"})  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError):
            client(served, KEY).completions.create(**ask, top_p=7, extra_headers={"X-Request-Id": "two"})  # type: ignore[call-overload]
    text = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    one, two = (line for line in lines if line["event"] == "request ended")
    assert (one["request_id"], one["key"], one["namespace"], one["status"]) == ("one", "web", "acme", 200)
    assert (one["prompt_tokens"], one["cached_tokens"], one["output_tokens"]) == (3, 2, 4)
    assert sorted(one["finish"]) == ["length", "stop"]
    assert 0 < one["first_token_s"] <= one["total_s"]
    assert "error" not in one
    assert (two["request_id"], two["status"], two["error"]) == ("two", 400, "invalid_request_error")
    assert "secret" not in text
    with gateway(tmp_path / "quiet", *arguments, "--log-requests", "none", QUIRE_API_KEYS=keys) as served:
        client(served, KEY).completions.create(**ASK)  # type: ignore[call-overload]
    assert "request ended" not in (tmp_path / "quiet" / "log").read_text()
