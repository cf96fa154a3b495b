"""The host names that a gateway on loopback answers to. Pure.

A page on the internet can make its own name point to 127.0.0.1 (DNS rebinding). A browser then lets the page read the
answers of a server without keys. The page's name is in the Host header of such requests. IP addresses cannot be
rebound, and neither can names without a dot, because no one can register such a name on the internet.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from quire_gateway.failures import ApiError


class Hosts:
    """The names that requests may name as their host.

    Args:
        names: further names beyond those of this machine.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._latest = b""  # the last accepted header; most callers send the same header again

    def check(self, host: bytes) -> None:
        """Accepts a Host header that is empty or has an allowed name.

        Raises:
            ApiError: the header has another name.
        """
        if host == self._latest:
            return
        name = _name_of(host.decode("latin-1"))
        if not (_is_of_this_machine(name) or name in self._names):
            shown = ascii(name.removeprefix(".")[:128])
            what = (
                f"this gateway does not accept the Host {shown}: use its address, or a name that its operator allowed"
            )
            raise ApiError(421, what, code="misdirected_request")
        self._latest = host


def check_count(hosts: int, version: str) -> None:
    """Refuses a number of Host headers that HTTP/1.1 forbids: two, or none.

    Raises:
        ApiError: HTTP/1.1 forbids this number.
    """
    if hosts > 1 or (hosts == 0 and version != "1.0"):
        raise ApiError(400, f"a request must have exactly one Host header, not {hosts}")


_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)(?:%[\w.~-]+)?\]|([^][:@/%\s]*))(?::\d*)?")


def _name_of(host: str) -> str:
    """Returns a name without its port, and an address without its brackets and zone. Anything else, such as a name with
    user information, is returned whole with a dot before it, so it equals no host's name."""
    found = _HOST.fullmatch(host)
    if found is None:
        return "." + host
    return found[1] or found[2].lower().rstrip(".")


def _is_of_this_machine(name: str) -> bool:
    if not any(sign in name for sign in ".:[]"):
        return True  # The name has no dot, like `localhost`.
    if name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
