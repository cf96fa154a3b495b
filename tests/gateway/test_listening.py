"""Tests the addresses at which a gateway listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.client.servers import link_local
from tests.e2e.stack import eventually
from tests.gateway.scene import gateway

KEY = "sk-alpha-0123456789"


# The ids of these tests contain no address. Container engines add and remove interfaces, so an address could differ
# between two pytest processes.
@pytest.mark.parametrize("host", ["::", "::1", link_local()], ids=["any", "loopback", "of a link"])
def test_the_gateway_listens_wherever_grpc_does(host: str | None, tmp_path: Path) -> None:
    if host is None or not socket.has_dualstack_ipv6():
        pytest.skip("no such address here")
    arguments = ("--worker", "127.0.0.1:9", "--listen", f"[{host}]:0", "--plain-http")
    with gateway(tmp_path, *arguments, QUIRE_API_KEYS=KEY) as served:
        port = int(served.address.rpartition(":")[2])
        for caller in ("127.0.0.1", "::1") if host == "::" else (host,):
            with socket.create_connection((caller, port), timeout=30) as connection:
                connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert connection.recv(20).startswith(b"HTTP/1.1 200"), caller


def test_the_kernel_looks_whether_a_caller_that_waits_is_still_there(tmp_path: Path) -> None:
    """If a NAT forgets a caller's connection, no FIN arrives. Without a timer, the answer is computed to the end."""
    tables = Path("/proc/net/tcp")
    if not tables.exists():
        pytest.skip("this system does not tell the timers of its connections")
    with gateway(tmp_path, "--worker", "127.0.0.1:9") as served:
        host, _, port = served.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
            mine = f":{int(port):04X}", f":{connection.getsockname()[1]:04X}"

            def is_probed() -> bool:
                rows = [row.split() for row in tables.read_text().splitlines()]
                (timer,) = (row[5] for row in rows if (row[1][-5:], row[2][-5:]) == mine)
                return timer.startswith("02:")

            eventually(is_probed, "a keep-alive probe is due")
