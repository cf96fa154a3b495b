"""The gateway as a process: `quire gateway`, `quire-gateway`, or `python -m quire_gateway`.

1. start     checks files and addresses, polls the workers, binds the port, writes the ready file
2. serving   until SIGTERM or SIGINT
3. draining  /readyz fails, new work is refused, running answers may continue for a while
4. stop      cancels the remaining answers, which frees their blocks at the workers
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import re
import resource
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import structlog
import uvicorn
import uvloop
from quire import AsyncAllocator, AsyncClient
from quire._distribution import VERSION
from quire._secret_files import read_token
from quire._serving import logs
from quire._serving.process import (
    allow_open_files,
    check_ready_file,
    collect_garbage_rarely,
    stop_event,
    write_ready_file,
)
from quire._serving.process_series import registry_of
from quire._serving.request_log import RequestLog
from quire._serving.tls import ServerTls
from quire._serving.tracing import tracing_of
from quire._transport.address import is_local, is_unix, require_free, resolve
from quire.errors import UsageError
from quire.tls import tls_of
from starlette.types import ASGIApp

from quire_gateway.app import make_app
from quire_gateway.bounded_http import BoundedHttp
from quire_gateway.connections import Connections
from quire_gateway.fleet import Fleet
from quire_gateway.gate import Gate, let_in
from quire_gateway.handshakes import TlsListener
from quire_gateway.hosts import Hosts
from quire_gateway.keys import ApiKeys, KeyFile, read_keys
from quire_gateway.metrics import GatewayCollector, Telemetry
from quire_gateway.options import named_notation, parse_arguments
from quire_gateway.responses.store import Store

log = structlog.get_logger()

BACKLOG: Final = 2_048
KEEP_ALIVE_S: Final = 75  # seconds that an idle connection stays open; clients and proxies close it earlier
WAITING_MAX: Final = 4_096  # the most idle connections
FILES_BESIDE: Final = 128  # open files that are reserved for everything but callers' connections
# An origin as browsers send it: the host name is in lower case, and a default port is left out.
ORIGIN: Final = re.compile(
    r"(?!https?://.*[A-Z])(?!http://.*:80$)(?!https://.*:443$)[a-z][a-z0-9+.-]*://[A-Za-z0-9._:\[\]-]+"
)
ANY_ORIGIN: Final = "*"
KEYS_LOOK_S: Final = 1.0  # seconds between two checks of the key file
LAST_S: Final = 2  # seconds that cancelled answers have to end
GONE_S: Final = 60  # seconds without an acknowledgement after which a caller counts as gone; at least STALLED_S
PROBE_S: Final = 20  # seconds of silence after which the kernel asks whether a caller is still there


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals to `serve`, and limits TLS handshakes.

    Uvicorn would stop listening at the first signal, while probes must still see that the gateway is draining.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on the sockets, as uvicorn does, but with a limit and a deadline for handshakes."""
        loop, config = asyncio.get_running_loop(), self.config
        protocol: Any = config.http_protocol_class
        make = functools.partial(protocol, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        servers: list[Any] = []
        for each in sockets or ():
            if config.ssl is None:
                servers.append(await loop.create_server(make, sock=each, backlog=config.backlog))
            else:
                each.listen(config.backlog)
                servers.append(TlsListener(each, make, config.ssl))
        self.servers = servers
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check(options: argparse.Namespace) -> tuple[str | None, ApiKeys | None, ServerTls | None]:
    """Returns the token, the API keys and TLS, or refuses options that are unsafe, before anything starts.

    If there are no API keys, callers must show the token.

    Raises:
        UsageError: the address is invalid or unsafe, or a file is unusable.
    """
    if is_unix(options.listen):
        raise UsageError(f"--listen {options.listen}: write host:port; the gateway cannot listen on a Unix socket")
    check_ready_file(options.ready_file)
    token = read_token(options.token_file)
    keys = read_keys(options.api_keys, os.environ)
    # Without API keys, callers must show the workers' token. Otherwise anyone could use workers that require the token.
    if keys is None and token is not None:
        keys = ApiKeys(token, f"token file {options.token_file}")
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("TLS needs both --tls-cert and --tls-key")
    tls = None if options.tls_key is None else ServerTls(options.tls_cert, options.tls_key, None)
    for origin in options.cors_origin:
        if origin != ANY_ORIGIN and ORIGIN.fullmatch(origin) is None:
            how = f"write an origin as browsers send it, such as https://app.example, or {ANY_ORIGIN} for all origins"
            raise UsageError(f"--cors-origin {origin}: {how}")
    if not is_local(options.listen):
        missing = [] if keys is not None else ["--api-keys or --token-file"]
        missing += [] if options.tls_cert or options.plain_http else ["--tls-cert and --tls-key (or --plain-http)"]
        if missing:
            raise UsageError(
                f"{options.listen} can be reached from other machines: give {', and '.join(missing)}; or listen on"
                " loopback"
            )
    return token, keys, tls


def bind(listen: str) -> socket.socket:
    """Binds the port. `[::]` is bound for IPv4, too, as in gRPC.

    Raises:
        UsageError: the port is taken, or needs permissions that the process lacks.
    """
    try:
        family, found = resolve(listen)
        is_for_both = found[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(found, family=family, backlog=BACKLOG, dualstack_ipv6=is_for_both)
    except OSError as error:
        require_free("--listen", listen)
        raise UsageError(f"cannot listen on {listen}: {error.strerror}") from None
    # Connections inherit these options, which detect callers that vanish without a FIN, for example because a NAT
    # forgot the connection. Without them, the answer of such a caller would be computed to the end.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", PROBE_S), ("KEEPINTVL", PROBE_S), ("USER_TIMEOUT", GONE_S * 1_000)):
        if hasattr(socket, f"TCP_{name}"):  # Systems other than Linux lack some options.
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    return listener


async def serve(options: argparse.Namespace) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises:
        UsageError: an address is unsafe or taken, or a file is unusable.
    """
    token, keys, tls = check(options)
    tracing = tracing_of(options, "gateway")
    key_file: KeyFile | None = None
    stop = stop_event(lambda: None if key_file is None else key_file.read())
    with bind(options.listen) as listener:
        fleet = _fleet_of(options, token)
        telemetry = Telemetry()
        request_log = RequestLog(options.log_requests, later=asyncio.get_running_loop().call_later)
        app = make_app(
            fleet,
            telemetry,
            Store(
                telemetry,
                bytes_max=options.max_responses_bytes,
                lifetime_s=options.responses_lifetime,
                are_several=keys is not None and keys.namespace_count > 1,
            ),
            version=VERSION,
            registry=registry_of(GatewayCollector(telemetry, fleet), options),
            request_timeout_s=options.request_timeout,
            is_draining=lambda: gate.is_draining,
            keep_alive_s=options.sse_keep_alive,
        )
        gate = Gate(
            app,
            telemetry,
            keys=keys,
            operator_token=token,
            names=Hosts(options.host) if options.host or is_local(options.listen) else None,
            body_bytes_max=options.max_body_bytes,
            in_flight_max=options.max_in_flight,
            request_log=request_log,
            tracing=tracing,
        )
        if options.api_keys is not None:
            key_file = KeyFile(options.api_keys, gate.take_keys)
        server = _Uvicorn(_configuration(options, let_in(gate, options.cors_origin), tls))
        await fleet.open()
        collect_garbage_rarely()
        serving = asyncio.create_task(server.serve([listener]))
        host, port = options.listen.rpartition(":")[0], listener.getsockname()[1]
        write_ready_file(options.ready_file, address=f"{host}:{port}")
        log.info("serving", address=f"{host}:{port}", workers=len(fleet.backends), keys=keys is not None)
        stopping, looking = asyncio.create_task(stop.wait()), asyncio.create_task(_look_again(key_file))
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        log.info("draining", in_flight=telemetry.in_flight)
        gate.is_draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gate.idle.wait(), options.drain_timeout)
        server.should_exit = True
        await serving
        await fleet.close()
        await asyncio.to_thread(tracing.close)
        stopping.cancel()
        looking.cancel()
        request_log.close()
        log.info("stopped")


def _fleet_of(options: argparse.Namespace, token: str | None) -> Fleet:
    """Returns the workers that options list, or else those that the allocators know."""
    tls = tls_of(options.worker_ca, options.worker_cert, options.worker_key, "--worker-ca")

    def connect(address: str) -> AsyncClient:
        return AsyncClient(address, token=token, tls=tls)

    return Fleet(
        [connect(address) for address in options.worker],
        [AsyncAllocator(address, token=token, tls=tls) for address in options.allocator],
        lambda model: named_notation(options, model),
        applies_defaults=options.generation_config == "auto",
        connect=None if options.worker else connect,
    )


async def _look_again(key_file: KeyFile | None) -> None:
    """Checks in a loop whether the key file was replaced."""
    while key_file is not None:
        await asyncio.sleep(KEYS_LOOK_S)
        key_file.check()


def waiting_max(in_flight_max: int) -> int:
    """Returns how many connections may be idle. Raises the process's limit of open files as far as allowed."""
    allowed = allow_open_files()
    left = WAITING_MAX if allowed == resource.RLIM_INFINITY else allowed - in_flight_max - FILES_BESIDE
    return max(1, min(WAITING_MAX, left))


def _configuration(options: argparse.Namespace, app: ASGIApp, tls: ServerTls | None) -> uvicorn.Config:
    connections = Connections(waiting_max(options.max_in_flight))
    configuration = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", functools.partial(BoundedHttp, connections=connections)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_S,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    configuration.load()

    def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Makes a handshake use the current certificate files."""
        assert tls is not None
        connection.context = tls.context()

    if configuration.ssl is not None:
        configuration.ssl.sni_callback = renew
    return configuration


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the gateway: the entry point of `quire-gateway`."""
    options = parse_arguments(arguments)
    logs.configure(log_format=options.log_format, level=options.log_level, role="gateway")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options))
    except UsageError as error:
        print(f"quire-gateway: {error}", file=sys.stderr)  # noqa: T201 - a usage error, as argparse prints its own
        sys.exit(2)
