"""The allocator as a process: addresses, tokens, health, metrics, signals."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from quire import Allocator
from quire._transport.address import canonical, is_local, split
from quire.errors import Reason, UsageError, from_rpc_error
from quire.protocol.steps import StepBuilder
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire_allocator.metrics.collector import METRIC_NAMES
from quire_allocator.server import parse_arguments

from tests.allocator.service.harness import d, spec

TOKEN = "correct-horse-battery-staple"
WAIT_S = 30.0


class Running:
    """An allocator's process that is ready."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, str]) -> None:
        self.process = process
        self.address = ready["address"]
        self.metrics_address = ready["metrics_address"]

    def terminate(self) -> int:
        """Sends SIGTERM, and returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Running]:
    """Runs an allocator on free ports."""
    ready = folder / "ready.json"
    listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
    metrics = () if "--metrics" in arguments else ("--metrics", "127.0.0.1:0")
    command = [sys.executable, "-m", "quire_allocator", *listen, *metrics, "--ready-file", str(ready), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    assert process.stderr is not None
    try:
        lines = []
        while '"serving"' not in (lines or [""])[-1]:
            readable, _, _ = select.select([process.stderr], [], [], WAIT_S)
            line = process.stderr.readline() if readable else ""
            assert line, f"the allocator did not start: {lines}"
            lines.append(line)
        yield Running(process, json.loads(ready.read_text()))
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stderr.close()


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}


def exit_of(*arguments: str) -> tuple[int, str]:
    """Returns the exit code and standard error of an allocator that must not start."""
    command = [sys.executable, "-m", "quire_allocator", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=WAIT_S, check=False)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Starts one allocator without a token, for tests that do not change it."""
    with started(tmp_path_factory.mktemp("plain"), "--log-format", "json") as running:
        yield running


def write_token(folder: Path, token: bytes = TOKEN.encode(), mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(token)
    path.chmod(mode)
    return path


def scrape(address: str, authorization: str | None = None, path: str = "/metrics") -> tuple[int, str]:
    """Returns the status and body of a GET."""
    headers = {"Authorization": authorization} if authorization else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:///run/quire.sock", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("allocator:1", False),
        ("localhost.example.org:1", False),
    ],
)
def test_only_unix_sockets_and_loopback_are_local(address: str, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize("address", ["", "7070", ":7070", "host:", "host:port", "host:65536", "host:-1", "host:²"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        split(address)


def test_a_port_in_use_is_said_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag, other, message in (
            ("--listen", "--metrics", f"cannot listen on {address}"),
            ("--metrics", "--listen", f"cannot serve metrics on {address}"),
        ):
            code, printed = exit_of(flag, address, other, "127.0.0.1:0")
            assert (code, message in printed, "Traceback" in printed) == (2, True, False), printed


def test_metrics_on_a_unix_socket_are_refused(tmp_path: Path) -> None:
    code, printed = exit_of("--listen", "127.0.0.1:0", "--metrics", f"unix://{tmp_path}/m")
    assert (code, "write host:port" in printed, "Traceback" in printed) == (2, True, False), printed


@pytest.mark.parametrize("lease", ["0", "-1", "0.099", "nan", "inf", "86401", "soon"])
def test_a_lease_that_makes_no_sense_is_refused(lease: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments([f"--lease={lease}"])
    assert caught.value.code == 2
    said = "--lease must be from 0.1 to 86,400 seconds" if lease != "soon" else "--lease: invalid float value"
    assert said in capsys.readouterr().err


def test_a_cpu_of_its_own_is_where_all_its_threads_run_without_interrupting_each_other(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    with started(tmp_path, "--cpu", str(cpu)) as running:
        pid = running.process.pid
        threads = {int(task.name): (task / "comm").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}
        own = [thread for thread, name in threads.items() if name == threads[pid]]  # leaves out gRPC's own threads
        assert len(own) >= 3  # the event loop, gRPC's completion thread, the metrics server
        assert {os.sched_getscheduler(thread) for thread in own} == {os.SCHED_BATCH}
        assert {frozenset(os.sched_getaffinity(thread)) for thread in own} == {frozenset({cpu})}


@pytest.mark.parametrize("cpu", ["-1", "1000000", "99999999999999999999"])
def test_a_cpu_that_is_not_to_be_had_is_refused(cpu: str) -> None:
    code, error = exit_of("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--cpu", cpu)
    assert code == 2
    assert f"CPU {cpu} is not available: this process may use" in error
    assert "Traceback" not in error


def test_an_allocator_serves_on_a_unix_socket(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    with started(tmp_path, "--listen", address, "--log-format", "json") as running:
        assert running.address == address
        with grpc.insecure_channel(address) as channel:
            listed = pb_grpc.AllocatorServiceStub(channel).ListPools(pb.ListPoolsRequest(), timeout=WAIT_S)
        assert list(listed.pools) == []


def test_a_unix_socket_in_use_is_said_so_and_stays_with_its_server_until_that_is_killed(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    (tmp_path / "second").mkdir()
    with started(tmp_path, "--listen", address) as running:
        code, printed = exit_of("--listen", address, "--metrics", "127.0.0.1:0")
        assert (code, "another server listens there" in printed, "Traceback" in printed) == (2, True, False), printed
        with grpc.insecure_channel(address) as channel:
            pb_grpc.AllocatorServiceStub(channel).ListPools(pb.ListPoolsRequest(), timeout=WAIT_S)
        running.process.kill()
        running.process.wait()
        with started(tmp_path / "second", "--listen", address), grpc.insecure_channel(address) as channel:
            pb_grpc.AllocatorServiceStub(channel).ListPools(pb.ListPoolsRequest(), timeout=WAIT_S)


@pytest.mark.parametrize("path", ["{}/none/s", "{}", ""])
def test_a_unix_socket_that_cannot_be_is_refused(path: str, tmp_path: Path) -> None:
    code, printed = exit_of("--listen", f"unix://{path.format(tmp_path)}", "--metrics", "127.0.0.1:0")
    assert (code, "cannot listen on" in printed, "Traceback" in printed) == (2, True, False), printed


@pytest.mark.parametrize("name", ["none/ready", "."])
def test_a_ready_file_that_cannot_be_written_is_said_so(name: str, tmp_path: Path) -> None:
    code, printed = exit_of("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--ready-file", str(tmp_path / name))
    assert (code, "cannot write the ready file" in printed, "Traceback" in printed) == (2, True, False), printed
    assert list(tmp_path.iterdir()) == []


def test_the_address_of_an_ipv6_server_can_be_dialled(tmp_path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with started(tmp_path, "--listen", "[::1]:0", "--log-format", "json") as running:
        assert running.address.startswith("[::1]:")
        with grpc.insecure_channel(running.address) as channel:
            pb_grpc.AllocatorServiceStub(channel).ListPools(pb.ListPoolsRequest(), timeout=WAIT_S)


@pytest.mark.parametrize("host", ["127.1", "LOCALHOST."])
def test_a_server_listens_at_every_way_to_write_loopback(host: str, tmp_path: Path) -> None:
    with started(tmp_path, "--listen", f"{host}:0", "--metrics", f"{host}:0", "--log-format", "json") as running:
        with Allocator(f"{host}:{split(running.address)[1]}") as allocator:
            assert allocator.list_pools() == ()
        assert scrape(canonical(running.metrics_address), path="/readyz")[0] == 200


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"short", 0o600, "at least 16 printable ASCII characters"),
        (b"", 0o600, "at least 16 printable ASCII characters"),
        (b"two words in one token", 0o600, "at least 16 printable ASCII characters"),
        ("schlüssel-schlüssel".encode(), 0o600, "at least 16 printable ASCII characters"),
        (TOKEN.encode(), 0o604, "its mode 0604 gives every user of this machine access"),
        (TOKEN.encode(), 0o602, "its mode 0602 gives every user of this machine access"),
        (None, 0, "No such file"),
    ],
)
def test_an_unusable_token_file_is_refused_without_showing_it(
    tmp_path: Path, content: bytes | None, mode: int, message: str
) -> None:
    path = tmp_path / "token" if content is None else write_token(tmp_path, content, mode)
    code, printed = exit_of("--token-file", str(path), "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    assert code == 2
    assert message in printed
    assert "Traceback" not in printed
    assert not content or content.decode() not in printed


def test_a_token_file_may_be_read_by_its_group(tmp_path: Path) -> None:
    with started(tmp_path, "--token-file", str(write_token(tmp_path, mode=0o440)), "--log-format", "json") as running:
        assert scrape(running.metrics_address)[0] == 401


def test_with_a_token_every_call_and_every_scrape_must_show_it(tmp_path: Path) -> None:
    token_file = write_token(tmp_path, f"  {TOKEN}\n".encode())
    with (
        started(tmp_path, "--token-file", str(token_file), "--log-format", "json") as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = pb_grpc.AllocatorServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        right = (("authorization", f"Bearer {TOKEN}"),)
        assert list(stub.ListPools(pb.ListPoolsRequest(), metadata=right, timeout=WAIT_S).pools) == []
        wrong = [None, (("authorization", TOKEN),), (("authorization", f"Bearer {TOKEN}x"),), right * 2]
        for metadata in wrong:
            for call in (
                lambda m: stub.ListPools(pb.ListPoolsRequest(), metadata=m, timeout=WAIT_S),
                lambda m: next(stub.Session(iter(()), metadata=m, timeout=WAIT_S)),
                lambda m: health.Check(health_pb2.HealthCheckRequest(), metadata=m, timeout=WAIT_S),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call(metadata)
                assert from_rpc_error(caught.value).reason is Reason.TOKEN
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert scrape(running.metrics_address, f"Bearer {TOKEN}")[0] == 200
        for authorization in (None, TOKEN, "Bearer wrong"):
            assert scrape(running.metrics_address, authorization)[0] == 401
        assert running.terminate() == 0


# -- health, metrics, signals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", "quire.v1.AllocatorService"])
def test_a_running_allocator_is_serving(plain: Running, service: str) -> None:
    with grpc.insecure_channel(plain.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_every_metric_is_exported_and_counts(plain: Running) -> None:
    with grpc.insecure_channel(plain.address) as channel:
        stub = pb_grpc.AllocatorServiceStub(channel)
        opened = stub.OpenSession(
            pb.OpenSessionRequest(version=3, request_id="open", pool="m", spec=spec()), timeout=WAIT_S
        )
        session = opened.session_id
        steps = [StepBuilder().allocate(1, 6), StepBuilder().commit(1, 6, d("a")).fork(1, 2)]
        steps += [StepBuilder().grow(1, 7).free(9), StepBuilder().allocate(3, 5, d("a"), is_return=True)]
        for number, operations in enumerate(steps, 1):
            step = pb.Step.FromString(operations.message.SerializeToString())
            step.session_id, step.number = session, number
            stub.Apply(step)
        status, body = scrape(plain.metrics_address)
        stub.CloseSession(pb.CloseSessionRequest(session_id=session))
    assert status == 200
    families = list(text_string_to_metric_families(body))
    exported = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert {name for name in exported if name.startswith("quire_allocator_")} == METRIC_NAMES
    samples = {
        (sample.name.removeprefix("quire_allocator_"), *(v for k, v in sorted(sample.labels.items()) if k != "pool")):
        sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("pool", "m") == "m"
    }  # fmt: skip
    assert [samples["blocks", state] for state in ("held", "empty")] == [4, 4]
    assert [samples["group_blocks", "full_attention 4", state] for state in ("held", "kept", "spare")] == [4, 0, 0]
    assert samples["sequences",] == 3
    assert samples["sessions", "unary"] == 1
    assert samples["copies_total",] == 1
    assert samples["granted_blocks_total",] == 4
    assert [samples["prefix_tokens_total", outcome] for outcome in ("queried", "hit", "returned_hit")] == [6, 0, 4]
    assert samples["operations_total", "OK", "grow"] == 3
    assert samples["operations_total", "NOT_FOUND", "free"] == 1
    assert samples["rpc_total", "OK", "Apply"] == samples["steps_total",] == 4


def test_only_the_metrics_path_is_served(plain: Running) -> None:
    assert scrape(plain.metrics_address, path="/")[0] == 404


def test_sigterm_ends_an_idle_allocator_with_zero(tmp_path: Path) -> None:
    with started(tmp_path, "--log-format", "json") as running:
        assert running.terminate() == 0


def test_a_signal_that_comes_as_soon_as_it_says_ready_ends_it_with_zero() -> None:
    script = (
        "import os, signal, quire._serving.server as serving, quire_allocator.server as server\n"
        "serving.write_ready_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "server.main(['--listen', '127.0.0.1:0', '--metrics', '127.0.0.1:0'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=clean_environment(), timeout=WAIT_S, check=False)
    assert done.returncode == 0


def test_an_allocator_that_cannot_watch_leases_ends_with_an_error() -> None:
    script = (
        "import quire_allocator.server as server\n"
        "def fail(self, until): raise ArithmeticError('a defect')\n"
        "server.AllocatorService.expire_leases = fail\n"
        "server.main(['--listen', '127.0.0.1:0', '--metrics', '127.0.0.1:0'])\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert "the watch of leases failed" in done.stderr


def test_sigterm_tells_an_open_stream_that_it_is_draining_and_does_not_wait_for_it(tmp_path: Path) -> None:
    with (
        started(tmp_path, "--log-format", "json", "--drain-timeout", f"{10 * WAIT_S}") as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        attach = pb.Attach(version=3, pool="a", incarnation=b"1" * 16, epoch=1, window=1, spec=spec())
        messages: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        messages.put(pb.SessionRequest(attach=attach))
        stream = pb_grpc.AllocatorServiceStub(channel).Session(iter(messages.get, None))
        assert next(stream).HasField("report_required")
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert from_rpc_error(caught.value).reason is Reason.DRAINING
        assert running.process.wait(WAIT_S) == 0
        messages.put(None)


# -- one vocabulary ----------------------------------------------------------------------------------------------------
