"""Addresses that a server may listen on: those of this machine alone, unless it encrypts and authenticates."""

from __future__ import annotations

from quire._transport.address import is_local
from quire.errors import UsageError


def require_safe(option: str, address: str, *, encrypted: bool, authenticated: bool) -> None:
    """Refuses to serve other machines without encryption, or without authentication of the callers.

    Raises:
        UsageError: the address is not local and something is missing, or it is no address.
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
