"""The allocator as a process: `quire-allocator`, or `python -m quire_allocator`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog
import uvloop
from quire._serving import logs
from quire._serving.command_line import Parser
from quire._serving.process import collect_garbage_rarely, stop_event, take_cpu
from quire._serving.server import Server, add_arguments
from quire.errors import UsageError

from quire_allocator import limits
from quire_allocator.core.blocks import KEPT_SHARE
from quire_allocator.core.ownership.directory import BLOCKS_OF_CALLER_MAX, Directory
from quire_allocator.metrics.collector import AllocatorCollector
from quire_allocator.metrics.counters import Counters
from quire_allocator.service import CORE, AllocatorService, add_to_server
from quire_allocator.session.lease_watch import LeaseWatch

log = structlog.get_logger()

LEASE_CHECK_S = 0.5
# Most blocks in all pools of one caller. A GPU of 141 GB has so many if a block of 16 tokens takes 32 KiB.
BLOCKS_DEFAULT: Final = 1 << 22


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the allocator's command line."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not limits.LEASE_S_MIN <= options.lease <= limits.LEASE_S_MAX:
        parser.error(
            f"--lease must be from {limits.LEASE_S_MIN:g} to {limits.LEASE_S_MAX:,.0f} seconds, not {options.lease:g}"
        )
    return options


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(prog="quire-allocator", description="Serve block tables of paged KV caches over gRPC.")
    add_arguments(parser, listen="127.0.0.1:7070", metrics="127.0.0.1:9470")
    parser.add_argument(
        "--lease",
        type=float,
        default=limits.LEASE_S,
        metavar="SECONDS",
        help=f"seconds of silence before a pool is dropped, {limits.LEASE_S_MIN:g} to {limits.LEASE_S_MAX:g}"
        " (default: %(default)g)",
    )
    parser.add_argument(
        "--kept-share",
        type=_share,
        default=KEPT_SHARE,
        metavar="SHARE",
        help="share of each pool that the requests of one namespace may ask to keep, 0 to 1 (default: %(default)g)",
    )
    parser.add_argument(
        "--metrics-namespaces",
        type=_names,
        default=(),
        metavar="NAME,...",
        help=f"namespaces with their own label in metrics, at most {limits.METRIC_NAMESPACES_MAX}; others are `other`",
    )
    parser.add_argument(
        "--streams-per-caller",
        type=_up_to(limits.STREAMS_OF_ALL_MAX // 2),
        default=limits.STREAMS_MAX,
        metavar="COUNT",
        help=f"most owners' streams of one client certificate, or of one connection without a certificate, 1 to"
        f" {limits.STREAMS_OF_ALL_MAX // 2}; each may take 2 MiB (default: %(default)d)",
    )
    parser.add_argument(
        "--blocks-per-caller",
        type=_up_to(BLOCKS_OF_CALLER_MAX),
        default=BLOCKS_DEFAULT,
        metavar="COUNT",
        help=f"blocks of all pools of one caller, 1 to {BLOCKS_OF_CALLER_MAX}; each takes 4 bytes here, and 44 when"
        " it is published in a long prefix; --memory-per-caller bounds the rest (default: %(default)d)",
    )
    parser.add_argument(
        "--memory-per-caller",
        type=_up_to(1 << 20),
        default=limits.MEMORY_OF_CALLER_MAX >> 20,
        metavar="MIB",
        help="MiB that all pools of one caller may take here, by estimate. Beyond it, the pool that grows loses cached"
        " blocks; without any, its step is refused (default: %(default)d)",
    )
    parser.add_argument(
        "--cpu", type=int, help="run only on this CPU: under load a message then costs a third less CPU time"
    )
    parser.add_argument(
        "--check-invariants", action="store_true", help="check every pool after every step; slow, for debugging"
    )
    return parser


def _share(text: str) -> float:
    """Returns a share of a pool."""
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be a share from 0 to 1, not {text}")
    return share


def _up_to(most: int) -> Callable[[str], int]:
    """Returns a parser for a count from 1 to `most`."""

    def count(text: str) -> int:
        number = int(text)
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"must be from 1 to {most}, not {number}")
        return number

    return count


def _names(text: str) -> frozenset[str]:
    """Returns the names in a comma-separated list."""
    names = frozenset(text.split(","))
    if "" in names or len(names) > limits.METRIC_NAMESPACES_MAX:
        raise argparse.ArgumentTypeError(
            f"must have 1 to {limits.METRIC_NAMESPACES_MAX} names, none of them empty, not {len(names)}"
        )
    return names


async def serve(options: argparse.Namespace) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises:
        UsageError: an address is unsafe or taken, or the token file is unusable.
        Exception: the server could not continue to check leases. Without these checks it would never take a pool from a
        dead owner.
    """
    stop = stop_event()
    server = Server(options, service_name="quire.v1.AllocatorService")
    directory = Directory(
        lease_s=options.lease,
        pools_max=limits.POOLS_MAX,
        blocks_max=options.blocks_per_caller,
        kept_share=options.kept_share,
    )
    counters = Counters(options.metrics_namespaces)
    service = AllocatorService(
        directory,
        counters,
        check_invariants=options.check_invariants,
        authorize=server.authorize,
        streams_max=options.streams_per_caller,
        memory_max=options.memory_per_caller << 20,
    )
    add_to_server(service, server.grpc)
    await server.start(AllocatorCollector(directory, counters), core=CORE)
    collect_garbage_rarely()
    await server.announce()
    leases, stopping = asyncio.create_task(_watch_leases(service)), asyncio.create_task(stop.wait())

    await asyncio.wait({leases, stopping}, return_when=asyncio.FIRST_COMPLETED)
    failure = leases.exception() if leases.done() else None
    if failure is not None:
        log.error("the watch of leases failed, so the allocator stops", exc_info=failure)
    log.info("draining")
    leases.cancel()
    stopping.cancel()
    await server.withdraw()
    service.drain()
    await server.stop()
    log.info("stopped")
    if failure is not None:
        raise failure


async def _watch_leases(service: AllocatorService) -> None:
    """Checks all leases every `LEASE_CHECK_S` seconds, forever."""
    watch = LeaseWatch(service.directory, service.expire_leases, LEASE_CHECK_S, time.monotonic())
    while True:
        await asyncio.sleep(LEASE_CHECK_S)
        watch.check(time.monotonic())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `quire-allocator` with a command line, by default the process's own."""
    options = parse_arguments(arguments)
    logs.configure(log_format=options.log_format, level=options.log_level, role="allocator")
    try:
        if options.cpu is not None:
            take_cpu(options.cpu)
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(options))
    except UsageError as error:
        print(f"quire-allocator: {error}", file=sys.stderr)  # noqa: T201 - a usage error, as argparse prints its own
        sys.exit(2)
