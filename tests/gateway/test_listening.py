"""Tests the addresses at which a gateway listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.client.servers import link_local
from tests.gateway.scene import gateway

KEY = "sk-alpha-0123456789"


# Container engines add and remove interfaces. With an address in its id, a test could differ between pytest processes.
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
