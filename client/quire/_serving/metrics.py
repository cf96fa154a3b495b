"""Prometheus on the server's side: histograms of plain integers, and the HTTP endpoint."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from io import BufferedIOBase
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.samples import Exemplar

from quire._serving.bearer import is_bearer_of
from quire._serving.probes import Probes
from quire._serving.tls import ServerTls
from quire._transport.address import is_local, resolve, split
from quire.protocol.permissions import EVERYTHING, Permissions, permissions_of

log = structlog.get_logger()
REQUEST_S: Final = 10.0  # time for one connection, until the last byte of the answer
CONNECTIONS_MAX: Final = 32
HEAD_BYTES_MAX: Final = 16_384
FAILURES_TOLD_S: Final = 60.0  # least time between two log lines about failed connections
PERMISSIONS_KEY = "quire.permissions"  # key in a request's WSGI environment
_OPENMETRICS: Final = "application/openmetrics-text"
Wsgi = Callable[[dict[str, object], Callable[..., object]], Iterable[bytes]]


class Histogram:
    """Counts values in buckets. This class is cheaper than prometheus-client's: no lock, one bisection and two
    additions.

    `bounds` are upper bounds in rising order. A value above the last one counts only in +Inf.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # the latest exemplar of each bucket, by the bucket's index

    def observe(self, value: float) -> None:
        """Counts one value into its bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def exemplify(self, value: float, request_id: str, trace_id: str) -> None:
        """Names a request as the example of an observed value's bucket. OpenMetrics allows 128 characters."""
        labels = {"request_id": request_id[:64]} | ({"trace_id": trace_id} if trace_id else {})
        self.exemplars[bisect_left(self.bounds, value)] = Exemplar(labels, value, time.time())

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Returns cumulative counts in the form of prometheus-client's `add_metric`."""
        total = 0
        rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for place, (bound, count) in enumerate(zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True)):
            total += count
            exemplar = self.exemplars.get(place)
            rows.append((bound, total) if exemplar is None else (bound, total, exemplar))
        return rows


def keeping_colons(accept: str) -> str:
    """Returns an Accept header that makes prometheus-client write `vllm:` in OpenMetrics, instead of `vllm_`."""
    return accept.replace(_OPENMETRICS, f"{_OPENMETRICS};escaping=allow-utf-8")


class MetricsServer:
    """Serves GET /metrics from its own threads, over HTTPS if TLS is configured.

    If the server has a token, callers must send it. With client certificates, the caller's certificate must permit
    observing every pool. Probes need neither token nor permission.

    No caller can block others: each connection ends after `REQUEST_S` seconds, and a new connection beyond
    `CONNECTIONS_MAX` ends the oldest one.

    Lifecycle: the constructor listens on `bound_address`; `close` ends it.
    """

    def __init__(
        self, listen: str, registry: CollectorRegistry, *, token: str | None, tls: ServerTls | None, probes: Probes
    ) -> None:
        host, _ = split(listen)
        app = _guarded(make_wsgi_app(registry), token, probes)
        self._server = _MetricsHttp(listen, _of_known_hosts(app, host) if is_local(listen) else app, tls)
        self.bound_address = f"{listen.rpartition(':')[0]}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving, and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MetricsHttp(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False  # With True, closing would wait for a thread that is blocked on an idle peer.
    request_queue_size = 128

    def __init__(self, listen: str, app: Wsgi, tls: ServerTls | None) -> None:
        self.tls = tls
        self._started_s: dict[socket.socket, float] = {}  # start time of each connection, oldest first
        self._failures = threading.Lock()
        self._failed_count, self._told_s = 0, -FAILURES_TOLD_S
        self.address_family, address = resolve(listen)
        super().__init__(address, _QuietHandler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Binds without looking up this machine's name, because a slow name server would block."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "quire", self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection. The TLS handshake happens at the first read, in the connection's own thread."""
        connection, peer = super().get_request()
        if self.tls is not None:
            connection = self.tls.context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        while len(self._started_s) >= CONNECTIONS_MAX:
            if (oldest := next(iter(self._started_s), None)) is not None:
                self._hang_up(oldest)
        self._started_s[connection] = time.monotonic()
        return connection, peer

    def service_actions(self) -> None:
        """Ends connections older than `REQUEST_S`. The server calls this after each request, and twice a second."""
        until_s = time.monotonic() - REQUEST_S
        for connection, started_s in list(self._started_s.items()):
            if started_s < until_s:
                self._hang_up(connection)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection after its answer, or after a failure."""
        self._started_s.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs failed connections, at most one line per `FAILURES_TOLD_S`: peers cannot fill the log."""
        now_s = time.monotonic()
        with self._failures:
            self._failed_count += 1
            if now_s - self._told_s < FAILURES_TOLD_S:
                return
            count, self._failed_count, self._told_s = self._failed_count, 0, now_s
        log.info("scrape failed", error=str(sys.exception()), count=count)

    def _hang_up(self, connection: socket.socket) -> None:
        """Ends a connection. The thread that reads or writes it then gets an error."""
        self._started_s.pop(connection, None)
        with contextlib.suppress(OSError):
            # SSLSocket.shutdown would remove the TLS state that the connection's thread still uses.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Head:
    """Reads a request's headers. After `HEAD_BYTES_MAX` bytes it reports the end of the file."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._bytes_left = HEAD_BYTES_MAX

    def readline(self, size: int = -1) -> bytes:
        line = self._file.readline(min(size, self._bytes_left) if size >= 0 else self._bytes_left)
        self._bytes_left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()


class _QuietHandler(WSGIRequestHandler):
    timeout = REQUEST_S

    def setup(self) -> None:
        """Limits the bytes of a request's headers."""
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]  # only readline and close are used

    def get_environ(self) -> dict[str, Any]:
        """Returns the WSGI environment, with the caller's permissions added."""
        tls = getattr(self.server, "tls", None)
        permissions = EVERYTHING
        if tls is not None and tls.verifies_clients:
            assert isinstance(self.connection, ssl.SSLSocket)
            certificate: dict[str, Any] = self.connection.getpeercert() or {}
            permissions = permissions_of(name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI")
        return {**super().get_environ(), PERMISSIONS_KEY: permissions}

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing: scrapes every few seconds are not worth a log line."""


def _of_known_hosts(app: Wsgi, listen_host: str) -> Wsgi:
    """Refuses requests with a Host name other than localhost or `listen_host`. IP addresses are accepted.

    The check prevents DNS rebinding: a web page could point its own name at this server, and a browser would let it
    read the answer.
    """

    def serve(environ: dict[str, object], start_response: Callable[..., object]) -> Iterable[bytes]:
        try:
            parts = urlsplit(f"//{environ.get('HTTP_HOST', 'localhost')}")
            host = "" if parts.username is not None else parts.hostname or ""
        except ValueError:  # The text in brackets is not an IPv6 address.
            host = ""
        host = host.removesuffix(".")  # A fully qualified name may end in a dot.
        if host not in ("localhost", listen_host) and not _is_address(host):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [b"this address serves localhost alone\n"]
        return app(environ, start_response)

    return serve


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _guarded(app: Wsgi, token: str | None, probes: Probes) -> Wsgi:
    """Answers probes, and passes authorized requests for metrics to `app`, one at a time."""
    scraping = threading.Lock()

    def guard(environ: dict[str, object], start_response: Callable[..., object]) -> Iterable[bytes]:
        said = probes.answer(str(environ.get("PATH_INFO")))
        if said is not None:
            status = "200 OK" if said else "503 Service Unavailable"
            start_response(status, [("Content-Type", "text/plain")])
            return [b"" if said else b"no\n"]  # Prometheus accepts an empty body, so it can scrape a probe, too.
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode()
        if token is not None and not is_bearer_of(given, token):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"a bearer token is asked for\n"]
        permissions = environ[PERMISSIONS_KEY]
        if not (isinstance(permissions, Permissions) and permissions.may_observe_all):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"the certificate does not permit looking into every pool\n"]
        if environ.get("PATH_INFO") != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        environ["HTTP_ACCEPT"] = keeping_colons(str(environ.get("HTTP_ACCEPT", "")))
        with scraping:
            return app(environ, start_response)

    return guard
