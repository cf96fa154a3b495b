"""Addresses: what a client connects to and a server listens on."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from quire.errors import UsageError

_SCHEMES = ("http", "https", "grpc", "grpcs", "tcp")
_GRPC_FORMS = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:", "xds:")


def split(address: str) -> tuple[str, int]:
    """Returns the host and the port of `host:port` or `[ipv6]:port`.

    Raises:
        UsageError: it is neither; a URL is said to be one.
    """
    scheme, is_url, rest = address.partition("://")
    if is_url and scheme in _SCHEMES:
        raise UsageError(
            f"{address!r:.200} is a URL: write {rest.rstrip('/') or 'host:port'!r:.200}, without {scheme}://"
        )
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise UsageError(f"{address!r:.200} is no address; write host:port (port 0 to 65535) or unix:///path")
    return host.strip("[]"), int(port)


def check_target(address: str) -> None:
    """Refuses what a client cannot have meant; forms that only gRPC knows (`dns:///`, `ipv6:`) are its own to judge.

    Raises:
        UsageError: it is a URL, or host and port without a port, or with one that does not exist.
    """
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


def resolve(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Returns what a server binds for `host:port`: names, IPv4, and IPv6 in brackets, also with the scope of a
    link-local address (`[fe80::1%eth0]:9470`).

    Raises:
        UsageError: it is no address.
        OSError: the name is unknown.
    """
    host, port = split(address)
    family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, found


def require_free(option: str, address: str, what: str = "listen") -> None:
    """Refuses an address that a server could not have, before anything is loaded or started.

    Args:
        option: of the command line, that names it.
        address: host:port; a Unix socket is left to its lock.
        what: is to be done there.

    Raises:
        UsageError: it is none, the port is taken, or it is not ours to take.
    """
    if is_unix(address):
        return
    try:
        family, found = resolve(address)
        with socket.create_server(found, family=family):
            return
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = f"the port is in use; give another one with {option} (port 0 takes any free one)"
        raise UsageError(f"cannot {what} on {address}: {reason}") from None
