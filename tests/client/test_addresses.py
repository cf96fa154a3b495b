"""Every listener and every client accepts the same forms of addresses, and reads them in the same way."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from quire._transport.address import canonical, is_local, require_free, resolve
from quire._transport.channel import SyncLink
from quire.errors import UsageError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("localhost:1", "localhost:1"),
        ("LocalHost:1", "localhost:1"),
        ("localhost.:1", "localhost:1"),
        ("127.1:1", "127.0.0.1:1"),
        ("0x7f.1:1", "127.0.0.1:1"),
        ("2130706433:1", "127.0.0.1:1"),
        ("[::1%lo]:1", "[::1]:1"),
        ("[::1%1]:1", "[::1]:1"),
        ("[::ffff:127.0.0.1]:1", "[::ffff:127.0.0.1]:1"),
    ],
)
def test_every_way_to_write_loopback_is_this_machine_to_grpc_and_to_sockets(written: str, meant: str) -> None:
    assert canonical(written) == meant
    assert is_local(written)
    # A token without TLS is allowed on loopback.
    link = SyncLink(written, "a secret of 32 characters and more", None, 1.0)
    try:
        assert link.address == meant
    finally:
        link.close()


@pytest.mark.parametrize(
    "written", ["[fe80::1%Eth0]:1", "example.org.:1", "Host:1", "de.ad:1", "h:1", "unix:///tmp/q", "dns:///LOCALHOST:1"]
)
def test_other_addresses_stay_as_they_are(written: str) -> None:
    assert canonical(written) == written


@pytest.mark.parametrize("written", ["localhost.example.org:1", "127.1.example.org:1", "128.1:1", "[fe80::1%lo]:1"])
def test_what_only_looks_like_loopback_is_another_machine(written: str) -> None:
    assert not is_local(written)


def addresses_of_a_name(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Resolves every name to these addresses, as a name server with AAAA and A records would."""

    def found(host: str, port: int, **_: object) -> list[Any]:
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in hosts]
        ends: list[tuple[int, ...]] = [(0, 0) if ":" in each else () for each in hosts]
        return [
            (family, socket.SOCK_STREAM, 6, "", (each, port, *end))
            for family, each, end in zip(families, hosts, ends, strict=True)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_of_a_names_addresses_a_server_takes_the_first_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses_of_a_name(monkeypatch, "2001:db8::1", "127.0.0.1")
    assert resolve("name:0") == (socket.AF_INET, ("127.0.0.1", 0))
    require_free("--listen", "name:0")


def test_a_port_in_use_is_not_passed_over_for_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        addresses_of_a_name(monkeypatch, "2001:db8::1", "127.0.0.1", "127.0.0.2")
        with pytest.raises(UsageError, match="the port is in use"):
            require_free("--listen", f"name:{port}")


def test_a_name_of_other_machines_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses_of_a_name(monkeypatch, "2001:db8::1", "192.0.2.1")
    with pytest.raises(UsageError, match="cannot listen on name:1: Cannot assign requested address"):
        require_free("--listen", "name:1")


@pytest.mark.parametrize("form", ["unix:", "unix://"])
def test_the_path_of_a_unix_socket_is_as_long_as_systems_allow(form: str) -> None:
    longest = f"{form}/{'a' * 106}"
    assert canonical(longest) == longest
    with pytest.raises(UsageError, match="at most 107 bytes"):
        canonical(f"{longest}a")
