"""Checks the bearer token of a call."""

from __future__ import annotations

import hmac


def is_bearer_of(authorization: bytes, token: str) -> bool:
    """Tells whether an `authorization` header contains the token. The word `Bearer` may have any case (RFC 9110)."""
    scheme, _, given = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())
