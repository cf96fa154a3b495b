"""Checks a server's addresses: only local ones are allowed unless the server encrypts and authenticates."""

from __future__ import annotations

from quire._transport.address import is_local
from quire.errors import UsageError


def require_safe(option: str, address: str, *, encrypted: bool, authenticated: bool) -> None:
    """Refuses an address that other machines can reach, unless the server encrypts and authenticates its callers.

    Raises:
        UsageError: the address is invalid, or it is not local and encryption or authentication is missing.
    """
    try:
        if is_local(address) or (encrypted and authenticated):
            return
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    missing = [] if encrypted else ["--tls-cert and --tls-key"]
    missing += [] if authenticated else ["--tls-client-ca or --token-file"]
    raise UsageError(
        f"{address} can be reached from other machines: give {', and '.join(missing)}; "
        "or listen on loopback or unix:///path"
    )
