"""Addresses: what a client connects to and a server listens on."""

from __future__ import annotations

import ipaddress

from quire.errors import UsageError

_GRPC_FORMS = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:", "xds:")


def split(address: str) -> tuple[str, int]:
    """Returns the host and the port of `host:port` or `[ipv6]:port`.

    Raises:
        UsageError: it is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise UsageError(f"{address!r} is no address; write host:port or unix:///path")
    return host.strip("[]"), int(port)


def check_target(address: str) -> None:
    """Refuses what a client cannot have meant; forms that only gRPC knows (`dns:///`, `ipv6:`) are its own to judge.

    Raises:
        UsageError: it is a URL, or host and port without a port, or with one that does not exist.
    """
    scheme, is_url, rest = address.partition("://")
    if is_url and scheme in ("http", "https", "grpc", "grpcs", "tcp"):
        raise UsageError(f"{address!r} is a URL: write {rest.rstrip('/') or 'host:port'!r}, without {scheme}://")
    if not address.startswith(_GRPC_FORMS):
        split(address)


def is_unix(address: str) -> bool:
    """Tells whether the address is a Unix socket."""
    return address.startswith("unix:")


def is_local(address: str) -> bool:
    """Tells whether only this machine can reach the address: a Unix socket or loopback."""
    if is_unix(address):
        return True
    host, _ = split(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
