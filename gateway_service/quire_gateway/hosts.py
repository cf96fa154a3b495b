"""Which names a gateway on loopback answers to: pure.

A page on the internet can have its own name point to 127.0.0.1 (DNS rebinding), and a browser then lets it read what a
server without keys answers there. Its name is in the Host header. An address cannot be
rebound, and neither can a name without a dot: nobody on the internet can register one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from quire_gateway.failures import ApiError


class Hosts:
    """The names that requests may be for.

    Args:
        names: beyond those of this machine.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._latest = b""  # header that was checked: most callers have the same

    def check(self, host: bytes) -> None:
        """Does nothing where the Host header is empty or of a name that may be asked.

        Raises:
            ApiError: it is of another one.
        """
        if host == self._latest:
            return
        name = _name_of(host.decode("latin-1"))
        if not (_is_of_this_machine(name) or name in self._names):
            shown = ascii(name[:128])
            what = f"this gateway does not answer to the name {shown}: ask for its address, or a name that it was given"
            raise ApiError(421, what, code="misdirected_request")
        self._latest = host


def check_count(hosts: int, version: str) -> None:
    """Refuses what HTTP/1.1 forbids: two Host headers, or none.

    Raises:
        ApiError: there are as many.
    """
    if hosts > 1 or (hosts == 0 and version != "1.0"):
        raise ApiError(400, f"a request has one Host header, not {hosts}")


def _name_of(host: str) -> str:
    """Returns a name without its port, and an address without its brackets."""
    if host.startswith("["):
        address, _, port = host[1:].partition("]")
        return address if not port or port.startswith(":") else host
    return host.partition(":")[0].lower().rstrip(".")


def _is_of_this_machine(name: str) -> bool:
    if not any(sign in name for sign in ".:[]"):
        return True  # also localhost
    if name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
