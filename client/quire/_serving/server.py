"""The gRPC server of every service: command line, limits, admission of callers, health, metrics, shutdown."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Final

import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client.registry import Collector

from quire._secret_files import read_token
from quire._serving.calls import HEALTH_CALLS_MAX, CallInterceptor
from quire._serving.listening import require_safe
from quire._serving.metrics import MetricsServer
from quire._serving.probes import Probes
from quire._serving.process import allow_open_files, check_ready_file, write_ready_file
from quire._serving.process_series import registry_of
from quire._serving.rpc import Authorize, permit_as_certified, permit_everything
from quire._serving.tls import ServerTls
from quire._serving.tracing import add_argument, tracing_of
from quire._serving.unix_socket import hold_socket
from quire._transport.address import canonical, is_unix, require_free
from quire._transport.channel import LIVENESS
from quire.errors import UsageError
from quire.protocol.limits import MESSAGE_BYTES_MAX

log = structlog.get_logger()

# Concurrent calls, streams included. One caller has at most half of these calls. The services' own limits are far lower
# (a worker's queue: 1,088) and refuse with a more specific reason.
CALLS_MAX: Final = 4_096
CONNECTIONS_MAX: Final = 1_024
HANDSHAKE_S: Final = 10.0
_TLS_OPTIONS: Final = {
    "tls-cert": "certificate of this server, followed by its chain",
    "tls-key": "private key of this server",
    "tls-client-ca": "certificate authorities: only callers with a certificate that one of them signed are accepted",
}
DRAIN_S_MAX: Final = 86_400.0
DRAIN_S: Final = 30.0  # A supervisor must wait longer than this before it kills the server, as `quire.local` does.


def add_arguments(parser: argparse.ArgumentParser, *, listen: str, metrics: str) -> None:
    """Adds the options that every server has."""
    parser.add_argument(
        "--listen", default=listen, help="host:port or unix:///path; port 0 takes any free port (default: %(default)s)"
    )
    parser.add_argument(
        "--metrics", default=metrics, help="host:port of /metrics for Prometheus (default: %(default)s)"
    )
    parser.add_argument(
        "--token-file",
        default=os.environ.get("QUIRE_TOKEN_FILE"),
        help="file with the bearer token that callers must show (default: $QUIRE_TOKEN_FILE)",
    )
    tls = parser.add_argument_group(
        "TLS, as PEM files; required unless the server listens on loopback, with --tls-client-ca or --token-file"
    )
    for option, text in _TLS_OPTIONS.items():
        variable = f"QUIRE_SERVER_{option.removeprefix('tls-').replace('-', '_').upper()}"
        default = os.environ.get(variable) or None
        tls.add_argument(f"--{option}", metavar="FILE", default=default, help=f"{text} (default: ${variable})")
    parser.add_argument(
        "--drain-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=DRAIN_S,
        help="how long running calls may continue after SIGTERM (default: %(default)g)",
    )
    parser.add_argument("--ready-file", help="once serving, write the addresses and the pid to this file as JSON")
    add_argument(parser)
    parser.add_argument(
        "--log-format", choices=["auto", "json", "console"], default="auto", help="auto: console on a terminal"
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="lowest level that is logged (default: %(default)s)",
    )


def check_options(options: argparse.Namespace) -> tuple[str | None, ServerTls | None]:
    """Checks a server's files and addresses, which is quick. Returns the server's token and TLS.

    Raises:
        UsageError: an address is unsafe with these options, or in use, or a file is unusable.
    """
    token, tls = read_token(options.token_file), read_tls(options)
    known = token is not None or (tls is not None and tls.verifies_clients)
    check_ready_file(options.ready_file)
    if is_unix(options.metrics):
        raise UsageError(f"--metrics {options.metrics}: Prometheus cannot scrape a Unix socket; write host:port")
    for option, address, what in (
        ("--listen", options.listen, "listen"),
        ("--metrics", options.metrics, "serve metrics"),
    ):
        require_safe(option, address, encrypted=tls is not None, authenticated=known)
        require_free(option, address, what)
    return token, tls


def _seconds(text: str) -> float:
    value = float(text)  # argparse reports a text that is not a number.
    if not 0 <= value <= DRAIN_S_MAX:
        raise argparse.ArgumentTypeError(f"must be from 0 to {DRAIN_S_MAX:g} seconds, not {text}")
    return value


def read_tls(options: argparse.Namespace) -> ServerTls | None:
    """Returns the TLS of the command line, or None without any.

    Raises:
        UsageError: an option needs another option, or a file is unusable.
    """
    if options.tls_cert is None and options.tls_key is None and options.tls_client_ca is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise UsageError("TLS needs both --tls-cert and --tls-key")
    return ServerTls(options.tls_cert, options.tls_key, options.tls_client_ca)


class Server:
    """Lifecycle: construct (checks addresses and files), add servicers to `grpc`, `start`, `announce`, `stop`.

    The server reports two states, over gRPC (grpc.health.v1) and at the metrics address. *Alive*: the event loop
    answers; if not, the process must be restarted. *Ready*: the server should get work. A worker that has lost its
    allocator is not ready, but continues its requests.

    Args:
        options: the parsed options of `add_arguments`.
        service_name: the service's name in health checks.
        calls_max: concurrent calls, not counting health. Far above the service's own limits.

    Attributes:
        token: the token that callers must send, and that this server sends to other servers; None without one.
        authorize: returns the permissions of a call's caller.
        tracing: records spans.

    Raises:
        UsageError: an address is unsafe with these options, or in use, or a file is unusable.
    """

    def __init__(self, options: argparse.Namespace, *, service_name: str, calls_max: int = CALLS_MAX) -> None:
        self.token, self._tls = check_options(options)
        verified = self._tls is not None and self._tls.verifies_clients
        self.authorize: Authorize = permit_as_certified if verified else permit_everything
        self._options = options
        self._service_name = service_name
        self.tracing = tracing_of(options, "worker" if "Worker" in service_name else "allocator")
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # The stubs lack aio.
        self._metrics: MetricsServer | None = None
        self._is_ready = False
        self._is_withdrawn = False
        self._address = ""
        self._socket_lock: int | None = None
        self.grpc = aio.server(
            interceptors=[CallInterceptor(self.token, calls_max, self.tracing)],
            # gRPC's own limit only bounds memory: gRPC counts health calls, too, and refuses without a reason.
            maximum_concurrent_rpcs=4 * calls_max,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
                # With gRPC's default, more than 1,000 simultaneous new calls make it cancel some at random.
                ("grpc.server.max_pending_requests", 4 * calls_max),
                ("grpc.server.max_pending_requests_hard_limit", 4 * calls_max),
                ("grpc.max_concurrent_streams", calls_max // 2 + HEALTH_CALLS_MAX),  # streams per connection
                # Probing would enlarge the flow-control windows to megabytes. In gRPC's default window of 64 KiB, the
                # digests of 2,048 blocks wait for an update, which takes a quarter of the step's CPU time.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", 256 << 10),
                ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
                ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1e3)),
                # A caller that vanishes silently is noticed after 15 s. The caller's calls then stop counting.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.ping_timeout_ms", 5_000),  # gRPC's default of one minute would override 5 s.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                # Callers ping at the same interval. By default, gRPC ends a connection that pings more than once in 5
                # minutes.
                ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
                ("grpc.so_reuseport", 0),  # A second server on the same port is a mistake, not load sharing.
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def start(self, collector: Collector, *, core: str = "") -> None:
        """Binds both addresses. The server is then alive, but not ready until `announce`.

        Args:
            collector: collects the server's own metrics.
            core: how the allocator's core runs, "compiled" or "python". Empty in other servers.

        Raises:
            UsageError: an address is in use.
        """
        allow_open_files()
        listen, metrics = canonical(self._options.listen), self._options.metrics
        if is_unix(listen):
            self._socket_lock = hold_socket(listen)
        try:
            if self._tls is None:
                port = self.grpc.add_insecure_port(listen)
            else:
                port = self.grpc.add_secure_port(listen, self._tls.server_credentials())
        except RuntimeError as error:
            require_free("--listen", listen)  # Another process may have taken the port while the model was loaded.
            raise UsageError(f"cannot listen on {listen}: {error}") from None
        try:
            probes = Probes(asyncio.get_running_loop(), lambda: self._is_ready)
            registry = registry_of(collector, self._options, core=core)
            self._metrics = MetricsServer(metrics, registry, token=self.token, tls=self._tls, probes=probes)
        except OSError as error:
            require_free("--metrics", metrics, "serve metrics")
            raise UsageError(f"cannot serve metrics on {metrics}: {error}") from None
        self._address = listen if is_unix(listen) else f"{listen.rpartition(':')[0]}:{port}"  # keeps IPv6 brackets
        await self._set_ready(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.grpc.start()

    @property
    def address(self) -> str:
        """Returns the address that the server listens on, once it is started."""
        return self._address

    async def announce(self) -> None:
        """Reports that the server is ready, and writes the ready file."""
        assert self._metrics is not None, "announce() was called before start()"
        await self._set_ready(True)
        metrics = self._metrics.bound_address
        write_ready_file(self._options.ready_file, address=self._address, metrics_address=metrics)
        log.info(
            "serving",
            address=self._address,
            metrics=metrics,
            token=self.token is not None,
            tls=self._tls is not None,
            client_certificates=self.authorize is permit_as_certified,
        )

    async def set_serving(self, serving: bool) -> None:
        """Sets whether health reports ready, between `announce` and `withdraw`."""
        await self._set_ready(serving)

    async def withdraw(self) -> None:
        """Reports not ready from now on, so that callers use other servers. The server stays alive until it ends."""
        await self._set_ready(False)
        self._is_withdrawn = True

    async def stop(self) -> None:
        """Stops the server. The method returns once every call has ended; calls that outlast the drain are canceled."""
        await self.grpc.stop(grace=self._options.drain_timeout)
        if self._metrics is not None:
            self._metrics.close()
        await asyncio.to_thread(self.tracing.close)
        if self._socket_lock is not None:
            os.close(self._socket_lock)
            self._socket_lock = None

    async def _set_ready(self, is_ready: bool) -> None:
        if self._is_withdrawn:
            return
        self._is_ready = is_ready
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if is_ready else states.NOT_SERVING
        for name in ("", self._service_name):
            await self._health.set(name, status)
