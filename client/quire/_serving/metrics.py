"""Prometheus on the server's side: histograms of plain integers, and the HTTP endpoint."""

from __future__ import annotations

import hmac
import socket
import ssl
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from quire._serving.probes import Probes
from quire._serving.tls import ServerTls
from quire._transport import address
from quire.protocol.permissions import EVERYTHING, Permissions, permissions_of

log = structlog.get_logger()
PERMISSIONS_KEY = "quire.permissions"  # in a request's environment
Wsgi = Callable[[dict[str, object], Callable[..., object]], Iterable[bytes]]


class Histogram:
    """Own buckets, because observing costs a bisection and two additions instead of a microsecond and a lock.

    `bounds` are upper bounds in rising order; what lies above the last one is counted in +Inf alone.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value into its bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Returns cumulative counts as prometheus-client's `add_metric` takes them."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows


class MetricsServer:
    """Serves GET /metrics from a thread of its own, over HTTPS where there is TLS; with a token only to callers that
    show it, with client certificates only to those that may look into every pool. Probes need neither.

    Lifecycle: constructed listening on `bound_address`, then `close`.
    """

    def __init__(
        self, listen: str, collector: Collector, *, token: str | None, tls: ServerTls | None, probes: Probes
    ) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        host, port = address.split(listen)
        app: Wsgi = make_wsgi_app(registry)
        self._server = make_server(
            host, port, _guarded(app, token, probes), server_class=_MetricsHttp, handler_class=_QuietHandler
        )
        self._server.tls = tls
        self.bound_address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MetricsHttp(WSGIServer):
    tls: ServerTls | None = None

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection; its handshake is the first read's, which is the handler's and has its time limit."""
        connection, peer = super().get_request()
        if self.tls is not None:
            connection = self.tls.context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, peer

    def handle_error(self, request: object, client_address: object) -> None:
        """A peer that is refused, or gone, is no defect."""
        log.info("scrape failed", error=str(sys.exception()))


class _QuietHandler(WSGIRequestHandler):
    timeout = 10  # seconds; a peer that sends nothing must not hold the one thread

    def get_environ(self) -> dict[str, Any]:
        """Returns what WSGI has, and what the caller may do."""
        tls = getattr(self.server, "tls", None)
        permissions = EVERYTHING
        if tls is not None and tls.verifies_clients:
            assert isinstance(self.connection, ssl.SSLSocket)
            certificate: dict[str, Any] = self.connection.getpeercert() or {}
            permissions = permissions_of(name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI")
        return {**super().get_environ(), PERMISSIONS_KEY: permissions}

    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no news."""


def _guarded(app: Wsgi, token: str | None, probes: Probes) -> Wsgi:
    def guard(environ: dict[str, object], start_response: Callable[..., object]) -> Iterable[bytes]:
        said = probes.answer(str(environ.get("PATH_INFO")))
        if said is not None:
            status = "200 OK" if said else "503 Service Unavailable"
            start_response(status, [("Content-Type", "text/plain")])
            return [b"yes\n" if said else b"no\n"]
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode()
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"a bearer token is asked for\n"]
        permissions = environ[PERMISSIONS_KEY]
        if not (isinstance(permissions, Permissions) and permissions.may_observe_all):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"the certificate does not permit looking into every pool\n"]
        if environ.get("PATH_INFO") != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        return app(environ, start_response)

    return guard
