"""`quire status` and `quire health`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Final

import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.table import Table

from quire import Allocator, Client
from quire._transport.channel import LIVENESS, SyncLink
from quire.cli import options, output, over_http
from quire.errors import NotFoundError
from quire.tls import Tls
from quire.types import PoolMemory, WorkerStatus

STATUS_EXAMPLES = """Show the model, memory and load of a worker.

Examples:

    quire status
    quire status --worker 10.0.0.5:7071 --tls-ca ca.pem --token-file token
"""
HEALTH_EXAMPLES = """Ask an allocator, a worker or a gateway whether it serves. The exit code is 0 if it does.

Examples:

    quire health 127.0.0.1:7070
    quire health 127.0.0.1:7071 --live              (for liveness probes: 0 even without an allocator)
    quire health http://127.0.0.1:8000
    quire health https://gateway.internal:8000 --tls-ca ca.pem
    quire health unix:///run/quire/allocator.sock --timeout 2
"""


READY: Final = (("server", ""), ("allocator", Allocator.SERVICE), ("worker", Client.SERVICE))
LIVE: Final = (("server", LIVENESS),)
REASON_BYTES_MAX: Final = 65_536


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command(help=STATUS_EXAMPLES)(status)
    app.command(help=HEALTH_EXAMPLES)(health)


@options.connects
def status(
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    *,
    credentials: options.Credentials,
) -> None:
    """Prints a worker's status."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        found = client.status()
    if as_json:
        digests = {"model_fingerprint": found.model_fingerprint.hex(), "state_digest": found.state_digest.hex()}
        output.print_json({**asdict(found), **digests})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _rows(worker, found):
        table.add_row(f"[dim]{name}", value)
    output.console().print(table)


@options.connects
def health(
    address: Annotated[
        str,
        typer.Argument(
            help="host:port, unix:///path, or http(s)://host:port of a gateway or of a server's metrics",
            show_default=False,
        ),
    ],
    timeout: options.Timeout = 5.0,
    *,
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether the process is alive, not whether it is ready for requests.")
    ] = False,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Asks grpc.health.v1 for the health of the server and of each Quire service. Over HTTP it asks /readyz or
    /healthz."""
    if address.startswith(("http://", "https://")):
        state = _state_over_http(address, "/healthz" if live else "/readyz", timeout, credentials.tls)
        _end_with({"server": state}, as_json)
        return
    states = dict[str, str]()
    deadline = time.monotonic() + timeout
    link = SyncLink(address, credentials.token, credentials.tls, timeout)
    try:
        stub = health_pb2_grpc.HealthStub(link.channel)
        for name, service in LIVE if live else READY:
            try:
                request = health_pb2.HealthCheckRequest(service=service)
                reply = link.call(stub.Check, request, max(deadline - time.monotonic(), 0.0))
            except NotFoundError:
                continue
            states[name] = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    finally:
        link.close()
    _end_with(states, as_json)


def _end_with(states: dict[str, str], as_json: bool) -> None:
    """Prints the states, and exits with 1 unless all of them are serving."""
    if as_json:
        output.print_json(states)
    else:
        print(" ".join(f"{name}={state}" for name, state in states.items()) or "UNKNOWN")
    if not states or set(states.values()) != {"SERVING"}:
        sys.exit(1)


def _state_over_http(address: str, path: str, timeout: float, tls: Tls | None) -> str:
    status, body = over_http.get(address, path, timeout_s=timeout, tls=tls, bytes_max=REASON_BYTES_MAX)
    why = _reason(body)
    return "SERVING" if status == HTTPStatus.OK else f"NOT_SERVING ({status}{why})"


def _reason(body: bytes) -> str:
    """Returns a gateway's reason for its state, after a colon. Empty if the server is not a gateway."""
    try:
        return f": {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return ""


def _ranks(found: WorkerStatus) -> str:
    return f", {found.rank_count} ranks" if found.rank_count > 1 else ""


def _rows(address: str, found: WorkerStatus) -> list[tuple[str, str]]:
    connected = "connected" if found.allocator_connected else "[red]no session with the allocator[/]"
    also = f", also {', '.join(found.model_aliases)}" if found.model_aliases else ""
    cached = found.cached_token_count / found.prompt_token_count if found.prompt_token_count else 0.0
    return [
        ("worker", f"{address}, version {found.version}"),
        ("model", f"{found.model}{also} ({found.architecture}), {found.dtype} on {found.device}{_ranks(found)}"),
        ("pool", f"{found.pool}, {connected}"),
        (
            "blocks",
            f"{found.block_count:,} of {found.block_size} tokens, {found.block_bytes:,} bytes each; "
            f"at most {found.held_block_count_max:,} held at a time for {found.table_entry_count_max:,} table entries",
        ),
        ("memory", _memory(found.memory)),
        ("sequence", f"at most {found.sequence_tokens_max:,} tokens; vocabulary of {found.vocabulary_size:,}"),
        ("samples", f"{found.running_count} running, {found.waiting_count} waiting"),
        ("branches", f"{found.branch_count:,}; {found.held_branch_count:,} of them hold blocks"),
        (
            "tokens",
            f"{found.prompt_token_count:,} of prompts ({cached:.0%} cached), {found.output_token_count:,} "
            f"generated; {found.preemption_count:,} preemptions",
        ),
    ]


def _memory(found: PoolMemory) -> str:
    pages = f"pages of {found.pool_bytes / 1e9:,.2f} GB in {found.kv_cache_dtype}, {found.kv_head_count} KV heads of"
    pages += f" {found.head_dim}"
    if found.state_group_count:
        states = f"{found.state_group_count} of them for {found.state_bytes:,} bytes of states"
        pages += f", in {found.group_count} groups, {states}"
    if found.device is None:
        return f"{pages}; {found.budget_bytes / 1e9:,.2f} GB were requested"
    of = found.device
    parts = zip(
        ("total", "used", "peak", "current"),
        (of.total_bytes, of.used_bytes, of.peak_bytes, of.current_bytes),
        strict=True,
    )
    return f"{pages}; of the device {', '.join(f'{name} {count / 1e9:,.2f} GB' for name, count in parts)}"
