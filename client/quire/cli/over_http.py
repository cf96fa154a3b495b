"""Requests over HTTP to gateways, to servers' metrics, and to Prometheus."""

from __future__ import annotations

import http.client
import ssl
from typing import Final

from quire._transport.address import split
from quire.errors import UnavailableError, UsageError
from quire.tls import Tls

BODY_BYTES_MAX: Final = 64 << 20  # a scrape of thousands of pools has some MiB


def get(
    address: str,
    path: str,
    *,
    timeout_s: float,
    tls: Tls | None = None,
    token: str | None = None,
    bytes_max: int = BODY_BYTES_MAX,
) -> tuple[int, bytes]:
    """Returns the status and the beginning of the body of an answer to GET.

    Args:
        address: http://host:port or https://host:port.
        path: the path and the query.
        timeout_s: how long connecting and each read may take.
        tls: certificates for HTTPS. Without them, the system's CA certificates are trusted.
        token: bearer token to send.
        bytes_max: length of the body, at most.

    Raises:
        UnavailableError: there is no answer.
        UsageError: the address or a certificate is unusable.
    """
    scheme, _, rest = address.rstrip("/").partition("://")
    if scheme not in ("http", "https") or not rest:
        raise UsageError(f"{address!r:.200} is not a URL: write http://host:port or https://host:port")
    host, port = split(rest)
    connection = (
        http.client.HTTPConnection(host, port, timeout=timeout_s)
        if scheme == "http"
        else http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=ssl.create_default_context() if tls is None else tls.http_context()
        )
    )
    try:
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read(bytes_max)
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"no answer from {address}: {error}") from None
    finally:
        connection.close()
