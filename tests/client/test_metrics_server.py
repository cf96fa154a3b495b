"""The listener of metrics and probes: a slow or broken connection does not delay the next one."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from prometheus_client import CollectorRegistry
from quire._serving import metrics
from quire._serving.metrics import MetricsServer
from quire._serving.probes import Probes
from quire._transport.address import canonical, split

from tests.client.servers import link_local

WAIT_S = 30.0


@contextlib.contextmanager
def serving(listen: str = "127.0.0.1:0") -> Iterator[MetricsServer]:
    probes = Probes(asyncio.new_event_loop(), lambda: True)
    server = MetricsServer(listen, CollectorRegistry(), token=None, tls=None, probes=probes)
    try:
        yield server
    finally:
        server.close()


def ask(server: MetricsServer, path: str = "/readyz", **headers: str) -> int:
    host, port = split(server.bound_address)
    connection = http.client.HTTPConnection(host, port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status


def half_a_request(server: MetricsServer) -> socket.socket:
    connection = socket.create_connection(split(server.bound_address), WAIT_S)
    connection.sendall(b"GET / HTTP/1.1\r\nX: ")
    return connection


def test_a_caller_that_never_ends_its_header_keeps_nobody_from_an_answer() -> None:
    with serving() as server, half_a_request(server):
        assert ask(server) == 200
        assert ask(server, "/metrics") == 200


def test_more_half_requests_than_connections_cost_the_oldest_their_place() -> None:
    with serving() as server, contextlib.ExitStack() as open_ones:
        held = [open_ones.enter_context(half_a_request(server)) for _ in range(metrics.CONNECTIONS_MAX + 5)]
        assert ask(server) == 200
        assert held[0].recv(100) == b""


def test_a_request_has_a_time_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 0.5)
    with serving() as server, half_a_request(server) as slow, contextlib.suppress(OSError):
        while True:  # Each byte arrives within the limit of a single read.
            slow.sendall(b"a")
            slow.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                assert slow.recv(100) == b""
                break


def test_a_head_is_no_longer_than_it_may_be() -> None:
    with serving() as server, socket.create_connection(split(server.bound_address), WAIT_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /readyz HTTP/1.1\r\n")
            for _ in range(64):
                connection.sendall(b"X: " + b"a" * 60_000 + b"\r\n")
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            connection.recv(100)
        assert ask(server) == 200


def test_a_server_is_closed_while_a_caller_holds_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((metrics, "REQUEST_S"), (metrics._QuietHandler, "timeout")):
        # A server that waited for the caller would take longer than a test may.
        monkeypatch.setattr(owner, name, 3_600.0)
    with serving() as server, half_a_request(server):
        # Connections are accepted in order, so the half request's connection has been accepted, too.
        assert ask(server) == 200
        server.close()
        server.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("127.0.0.1:9", 200), ("[::1]", 200),
                                              ("LOCALHOST.:9", 200),
                                              ("evil.example", 421), ("localhost.evil.example:80", 421),
                                              ("user@localhost", 421), ("localhost:80@evil.example", 421)])  # fmt: skip
def test_on_loopback_a_name_that_is_not_ours_is_refused(host: str, status: int) -> None:
    with serving() as server:
        assert ask(server, "/metrics", Host=host) == status


@pytest.mark.parametrize(
    ("listen", "callers"),
    [
        ("[::1]:0", ["::1"]),
        ("[::]:0", ["::1", "127.0.0.1"]),
        ("0.0.0.0:0", ["127.0.0.1"]),
        ("[::ffff:127.0.0.1]:0", ["127.0.0.1"]),
        ("127.1:0", ["127.0.0.1"]),
        ("localhost:0", ["localhost"]),
        ("[{of_a_link}]:0", ["{of_a_link}"]),
    ],
)
def test_metrics_listen_wherever_grpc_does(listen: str, callers: list[str]) -> None:
    of_a_link = link_local()
    if "of_a_link" in listen and of_a_link is None:
        pytest.skip("no interface here has such an address")
    if listen.startswith("[") and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    listen = listen.format(of_a_link=of_a_link)
    beside = grpc.server(ThreadPoolExecutor(1))
    grpc_port = beside.add_insecure_port(canonical(listen))
    beside.start()
    with serving(listen) as server:
        assert server.bound_address.startswith(listen.removesuffix("0"))
        port = int(server.bound_address.rpartition(":")[2])
        for host in (caller.format(of_a_link=of_a_link) for caller in callers):
            with socket.create_connection((host, port), WAIT_S) as connection:
                connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                assert connection.recv(20).split()[1] == b"200", host
            socket.create_connection((host, grpc_port), WAIT_S).close()
    beside.stop(None)


def test_callers_cannot_fill_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        for _ in range(5):
            assert ask(server, Host="[") == 421
        for _ in range(5):  # The server cannot read these requests: the client resets the connection.
            with socket.create_connection(split(server.bound_address), WAIT_S) as connection:
                connection.sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert ask(server) == 200
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said
    assert said.count("scrape failed") <= 1
