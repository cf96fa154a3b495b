"""The bearer token of a call."""

from __future__ import annotations

import hmac


def is_bearer_of(authorization: bytes, token: str) -> bool:
    """Tells whether this `authorization` shows the token. As RFC 9110 has it, the word `Bearer` has any case."""
    scheme, _, given = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode())
