"""Tests the whole deployment from outside, as Docker Compose starts it.

Lifecycle: the first test builds the images and starts a project with a name of its own on free ports, all by one
command. The tests share the project. At the end the deployment is removed with its volumes, and nothing may remain.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.composed import ROOT, Deployment, eventually

LASTING_SERVICES = ("allocator", "worker", "worker2", "gateway", "prometheus", "alertmanager", "grafana")
PROFILED_SERVICES = ("vllm",)
# Values for Grafana's variables. `$pool` and `$worker` match everything. The shortest range covers four scrapes.
DASHBOARD_VARIABLES = {"$pool": ".*", "$worker": ".*", "$__rate_interval": "20s"}
CREDENTIALS = ("/run/quire/client.pem", "/run/quire/server.pem")
KILLED = 128 + 9
# In the text's first 1,400 tokens, the two best candidates always differ by at least 0.002. Later, two candidates tie
# within rounding, so a recomputation may swap them.
CLEAR_TOKENS = 1400
# The first build downloads torch. All later steps take seconds.
pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


def docker_compose_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    commands = (["docker", "info"], ["docker", "compose", "version"])
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def free_ports(names: tuple[str, ...]) -> dict[str, int]:
    """Returns a free port for each name. All ports are bound at once, so no two ports are the same."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {name: listener.getsockname()[1] for name, listener in zip(names, sockets, strict=True)}
    for listener in sockets:
        listener.close()
    return ports


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    if not docker_compose_answers():
        pytest.skip("no Docker engine with Compose v2 answers here")
    ports = free_ports(LASTING_SERVICES + PROFILED_SERVICES)
    environment = {f"QUIRE_{name.upper()}_PORT": str(port) for name, port in ports.items()}
    environment["COMPOSE_PROJECT_NAME"] = f"quire-test-{uuid.uuid4().hex[:8]}"
    deployment = Deployment({**os.environ, **environment}, ports)
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.compose("--profile", "*", "down", "--volumes", "--timeout", "20")
    assert deployment.remains() == []


def generate(deployment: Deployment, prompt: str) -> str:
    return deployment.execute("worker", "quire", "generate", prompt)


def is_connected(deployment: Deployment) -> bool:
    """Returns whether the worker has its session. The reported health may be older than the stop."""
    with contextlib.suppress(AssertionError):  # `quire status` fails if a service does not serve.
        return ", connected" in deployment.execute("worker", "quire", "status")
    return False


def long_text(token_count: int) -> tuple[str, ...]:
    return ("quire", "generate", "The for statement", "--max-tokens", str(token_count), "--ignore-eos")


def empty_queries(deployment: Deployment, board: dict[str, Any]) -> list[str]:
    """Returns the queries of a dashboard that draw nothing now. A query that Prometheus refuses fails the test."""
    empty = []
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in DASHBOARD_VARIABLES.items():
                expression = expression.replace(name, value)
            if all(math.isnan(value) for value in deployment.query_all(expression)):
                empty.append(f"{panel['title']}: {expression}")
    return empty


def test_text_is_generated_by_one_command(deployment: Deployment) -> None:
    assert len(generate(deployment, "The for statement")) > 20


def ask(deployment: Deployment, **options: Any) -> Any:
    """Asks the gateway's published port with OpenAI's client and the deployment's API key; returns the answer."""
    key = deployment.execute("gateway", "cat", "/run/quire/api-keys").strip()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{deployment.ports['gateway']}/v1", api_key=key) as ai:
        answer = ai.completions.create(
            model="demo", prompt="The for statement", temperature=0, max_tokens=40, **options
        )
        return list(answer) if options.get("stream") else answer


def test_text_through_the_gateway_is_the_workers(deployment: Deployment) -> None:
    text = deployment.execute("worker", "quire", "generate", "The for statement", "--max-tokens", "40").rstrip("\n")
    answer = ask(deployment)
    assert answer.choices[0].text.rstrip("\n") == text
    pieces = ask(deployment, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
    assert len(pieces) > 1
    url = f"http://127.0.0.1:{deployment.ports['gateway']}/v1/models"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=10)
    assert refused.value.code == 401


def test_text_comes_out_of_the_container_as_it_is_made(deployment: Deployment) -> None:
    with deployment.start("worker", *long_text(300)) as process:
        assert process.stdout is not None
        output = process.stdout.fileno()
        pieces = list(iter(lambda: os.read(output, 1 << 16), b""))
    assert process.returncode == 0
    assert len(pieces) > 1


def test_up_again_builds_nothing_new_and_changes_nothing(deployment: Deployment) -> None:
    before = [deployment.inspect(service)["Id"] for service in LASTING_SERVICES]
    made = [deployment.execute("worker", "cat", path) for path in CREDENTIALS]
    deployment.up()
    assert [deployment.inspect(service)["Id"] for service in LASTING_SERVICES] == before
    assert [deployment.execute("worker", "cat", path) for path in CREDENTIALS] == made


def test_prometheus_scrapes_all_services_and_itself(deployment: Deployment) -> None:
    def healths() -> list[tuple[str, str]]:
        targets = deployment.get_json("prometheus", "/api/v1/targets")["data"]["activeTargets"]
        return sorted((target["labels"]["job"], target["health"]) for target in targets)

    jobs = [
        "alertmanager",
        "prometheus",
        *["quire-alive"] * 4,
        "quire-allocator",
        "quire-gateway",
        *["quire-worker"] * 2,
    ]
    eventually(lambda: healths() == [(job, "up") for job in jobs], "every target is up")


def test_every_series_that_an_alert_needs_exists(deployment: Deployment) -> None:
    generate(deployment, "The for statement")
    ask(deployment)
    groups = deployment.get_json("prometheus", "/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, "unknown: not evaluated yet"
    named = {name for rule in rules for name in re.findall(r"\bquire_\w+", rule["query"])}
    assert len(named) > 10
    eventually(lambda: all(deployment.query_all(name) for name in named), f"all of {sorted(named)}")


def test_a_dead_gateway_is_told_of_within_a_minute(deployment: Deployment) -> None:
    def firing() -> set[tuple[str, str]]:
        labels = [alert["labels"] for alert in deployment.get_json("alertmanager", "/api/v2/alerts")]
        return {(label["alertname"], label["instance"]) for label in labels}

    deployment.compose("stop", "gateway")
    eventually(lambda: ("QuireProcessDown", "gateway:8000") in firing(), "the alert is at Alertmanager", timeout_s=60)
    deployment.up()
    eventually(lambda: not deployment.query('up{job="quire-gateway"} == 0'), "it is back")


def test_what_was_generated_shows_up_in_prometheus(deployment: Deployment) -> None:
    before = deployment.query('sum(quire_worker_tokens_total{kind="output"})') or 0.0
    generate(deployment, "Return the")
    eventually(
        lambda: (deployment.query('sum(quire_worker_tokens_total{kind="output"})') or 0.0) > before,
        "the worker counts output tokens",
    )
    eventually(
        lambda: (deployment.query('sum(quire_allocator_operations_total{op="grow", code="OK"})') or 0.0) > 0,
        "the allocator counts the operations behind them",
    )
    blocks = deployment.query("sum(quire_allocator_blocks)")
    assert blocks is not None
    assert blocks == deployment.query("sum(quire_worker_blocks)")


def test_grafana_has_every_dashboard_and_prometheus_takes_each_of_their_queries(deployment: Deployment) -> None:
    health = deployment.get_json("grafana", "/api/health")
    assert health["database"] == "ok"
    # Without a registry a stand-in image replaces Grafana. The image's version is not a number.
    if re.match(r"\d", health["version"]):
        assert deployment.get_json("grafana", "/api/datasources/uid/prometheus/health")["status"] == "OK"
    uids = {board["uid"] for board in deployment.get_json("grafana", "/api/search?type=dash-db")}
    assert uids == {f"quire-{path.stem}" for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")}
    for uid in uids:
        empty_queries(deployment, deployment.get_json("grafana", f"/api/dashboards/uid/{uid}")["dashboard"])
    board = deployment.get_json("grafana", "/api/dashboards/uid/quire-now")["dashboard"]
    empty: list[str] = []

    def nothing_is_empty() -> bool:
        generate(deployment, "The import statement")  # Rates and ratios need recent requests.
        ask(deployment)
        # Only ended calls are counted. The worker's session is a call that never ends, so another call is needed.
        deployment.operate("pool", "list")
        empty[:] = empty_queries(deployment, board)
        return not empty

    try:
        eventually(nothing_is_empty, "every query finds a series")
    except AssertionError:
        raise AssertionError("these find nothing:\n" + "\n".join(empty)) from None


def test_nothing_runs_as_root_or_can_write_to_its_image(deployment: Deployment) -> None:
    for service in LASTING_SERVICES:
        assert int(deployment.execute(service, "id", "-u")) > 0, service
        assert deployment.inspect(service)["HostConfig"]["ReadonlyRootfs"], service
    maker = deployment.inspect("certs")
    assert maker["Config"]["User"] == "10001:10001"
    assert maker["HostConfig"]["ReadonlyRootfs"]
    assert maker["State"]["ExitCode"] == 0


def test_ports_are_bound_to_the_loopback_address_only(deployment: Deployment) -> None:
    for service in LASTING_SERVICES:
        published = deployment.inspect(service)["NetworkSettings"]["Ports"]
        bindings = [binding for binding_list in published.values() for binding in binding_list or []]
        assert [binding["HostIp"] for binding in bindings] == ["127.0.0.1"], service


@pytest.mark.parametrize("url", ["https://allocator:9470/metrics", "https://worker:9471/metrics"])
def test_a_scrape_with_the_certificate_of_another_service_is_refused(deployment: Deployment, url: str) -> None:
    script = (
        "import sys, urllib.request, urllib.error\nimport quire.tls\n"
        "context = quire.tls.resolve_tls(None).http_context()\n"
        "try:\n    print(urllib.request.urlopen(sys.argv[1], timeout=5, context=context).status)\n"
        "except urllib.error.HTTPError as error:\n    print(error.code)\n"
    )
    assert deployment.execute("worker", "python", "-c", script, url).strip() == "403"


@pytest.mark.parametrize("service", ["allocator", "worker"])
def test_a_call_without_a_certificate_is_refused_and_one_with_it_is_served(
    deployment: Deployment, service: str
) -> None:
    def own(name: str) -> bytes:
        return deployment.execute(service, "cat", f"/run/quire/{name}").encode()

    authority = own("ca.pem")
    strangers = grpc.ssl_channel_credentials(authority)
    known = grpc.ssl_channel_credentials(authority, own("client.key"), own("client.pem"))
    request, address = health_pb2.HealthCheckRequest(), f"127.0.0.1:{deployment.ports[service]}"
    key = deployment.execute("gateway", "cat", "/run/quire/api-keys").strip()
    with grpc.secure_channel(address, strangers) as channel:
        for metadata in ((), (("authorization", f"Bearer {key}"),)):
            with pytest.raises(grpc.RpcError) as refused:
                health_pb2_grpc.HealthStub(channel).Check(request, timeout=10, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    with grpc.secure_channel(address, known) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_killed_allocator_comes_back_and_a_text_that_was_under_way_goes_on(deployment: Deployment) -> None:
    calm = deployment.execute("worker", *long_text(CLEAR_TOKENS)).encode()
    with deployment.start("worker", *long_text(CLEAR_TOKENS)) as process:
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 1)
        deployment.kill("allocator")
        assert process.poll() is None
        text += process.stdout.read()
    assert process.returncode == 0
    assert text == calm
    eventually(lambda: deployment.inspect("allocator")["RestartCount"] == 1, "the engine restarted the allocator")
    deployment.up()
    assert deployment.inspect("allocator")["RestartCount"] == 1
    eventually(lambda: is_connected(deployment), "the worker has a session again")


def test_a_killed_worker_comes_back(deployment: Deployment) -> None:
    deployment.kill("worker")
    eventually(lambda: deployment.inspect("worker")["RestartCount"] == 1, "the engine restarted the worker")
    deployment.up()
    eventually(lambda: is_connected(deployment), "the worker has a session")
    assert len(generate(deployment, "The for statement")) > 20


def test_a_worker_that_is_still_loading_stops_when_it_is_told(deployment: Deployment) -> None:
    deployment.compose("stop", "worker")
    deployment.compose("start", "worker")
    deployment.compose("stop", "worker")
    assert deployment.inspect("worker")["State"]["ExitCode"] != KILLED
    deployment.up()


@pytest.mark.parametrize("service", ["gateway", "worker", "allocator"])
def test_a_stopped_service_leaves_cleanly_and_comes_back(deployment: Deployment, service: str) -> None:
    deployment.compose("stop", service)
    assert deployment.inspect(service)["State"]["ExitCode"] == 0
    deployment.up()
    eventually(lambda: is_connected(deployment), "the worker has a session")
    assert len(generate(deployment, "The for statement")) > 20


def test_an_engine_of_vllm_has_its_blocks_from_the_same_allocator(deployment: Deployment) -> None:
    deployment.compose("--profile", "vllm", "up", "--detach", "--build", "--wait", "vllm", timeout_s=1500)
    prompt = list(range(1, 81))
    with openai.OpenAI(base_url=f"http://127.0.0.1:{deployment.ports['vllm']}/v1", api_key="none") as ai:
        first, again = (
            ai.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=8) for _ in range(2)
        )
    assert first.usage is not None
    assert again.usage is not None
    assert again.choices[0].text == first.choices[0].text
    hits = [usage.prompt_tokens_details for usage in (first.usage, again.usage)]
    assert [each and each.cached_tokens for each in hits] == [0, 64], "two blocks of 32 tokens"
    eventually(lambda: deployment.query('quire_allocator_blocks{pool="vllm",state="cached"}') == 2, "it is scraped")
    forgotten = deployment.operate("cache", "drop", "vllm")
    assert forgotten.startswith("2 blocks dropped")
    deployment.compose("--profile", "vllm", "rm", "--stop", "--force", "vllm")
