"""Parses and checks the addresses that clients connect to and servers listen on."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from typing import Any, Final

from quire.errors import UsageError

UNIX_PATH_BYTES_MAX: Final = 107
_SCHEMES = ("http", "https", "grpc", "grpcs", "tcp")
_GRPC_FORMS = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:", "xds:")
_IPV4: Final = re.compile(r"[0-9a-fA-FxX.]*[0-9][0-9a-fA-FxX.]*")  # every form that the C library accepts for IPv4


def split(address: str) -> tuple[str, int]:
    """Returns the host and the port of `host:port` or `[ipv6]:port`.

    Raises:
        UsageError: the address has neither form. For a URL, the message says so.
    """
    scheme, is_url, rest = address.partition("://")
    if is_url and scheme in _SCHEMES:
        raise UsageError(
            f"{address!r:.200} is a URL: write {rest.rstrip('/') or 'host:port'!r:.200}, without {scheme}://"
        )
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise UsageError(f"{address!r:.200} is not an address; write host:port (port 0 to 65535) or unix:///path")
    inside = host[1:-1] if host[0] + host[-1] == "[]" else host
    if (":" in inside) != (inside != host) or "[" in inside or "]" in inside:
        raise UsageError(f"{address!r:.200} is not an address; write IPv6 in brackets, such as [::1]:7070")
    return _canonical_host(inside), int(port)


def canonical(address: str) -> str:
    """Returns an address in the form that gRPC, the C library and certificates agree on. Forms that only gRPC knows
    (`dns:///`, `ipv6:`) stay unchanged.

    Raises:
        UsageError: the address is a URL, its port is missing or invalid, or its Unix socket's path is too long.
    """
    if is_unix(address) and len(os.fsencode(address.removeprefix("unix:").removeprefix("//"))) > UNIX_PATH_BYTES_MAX:
        raise UsageError(
            f"{address!r:.200} is too long: the path of a Unix socket has at most {UNIX_PATH_BYTES_MAX} bytes"
        )
    if address.startswith(_GRPC_FORMS):
        return address
    host, port = split(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _canonical_host(host: str) -> str:
    """Returns `localhost` for `LOCALHOST.`, `127.0.0.1` for `127.1`, and `::1` for `::1%lo`; other names unchanged.

    gRPC does not accept short IPv4 addresses. The C library accepts a scope only with a link-local address, and may ask
    a name server for `localhost.`.
    """
    if host.lower().removesuffix(".") == "localhost":
        return "localhost"
    try:
        if _IPV4.fullmatch(host):
            return socket.inet_ntoa(socket.inet_aton(host))
        if not ipaddress.IPv6Address(host).is_link_local:
            return host.partition("%")[0]
    except (OSError, ValueError):
        pass  # The host is a name.
    return host


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
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def resolve(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Returns the family and address that a server binds for `host:port`.

    The host is a name, IPv4, or IPv6 in brackets, also with a link-local scope (`[fe80::1%eth0]:9470`). If a name has
    several addresses, the result is the first one of this machine.

    Raises:
        UsageError: the text is not an address.
        OSError: the name is unknown.
    """
    host, port = split(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    every = [(family, address) for family, _, _, _, address in found]
    return next((each for each in every if len(every) == 1 or _is_ours(*each)), every[0])


def _is_ours(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    """Tells whether this machine can bind the address: it has the address, and the family is enabled."""
    try:
        with socket.create_server((address[0], 0, *address[2:]), family=family):
            return True
    except OSError:
        return False


def require_free(option: str, address: str, what: str = "listen") -> None:
    """Refuses an address that a server cannot bind, before anything is loaded or started.

    Args:
        option: the command-line option with the address.
        address: host:port. Unix sockets are not checked, because they have a lock.
        what: the server's purpose at this address, for the message.

    Raises:
        UsageError: the address is invalid, the port is in use, or this user may not bind it.
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
            reason = f"the port is in use; give another one with {option} (port 0 takes any free port)"
        raise UsageError(f"cannot {what} on {address}: {reason}") from None
