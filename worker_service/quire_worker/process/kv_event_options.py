"""Options for KV events, their checks, and the publisher that they start."""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING

from quire import AsyncAllocator
from quire._distribution import how_to_install
from quire._transport.address import is_local, require_free
from quire.errors import UsageError

if TYPE_CHECKING:
    from quire_worker.engine import Engine
    from quire_worker.kv_events.pool_follower import Follower

PACKAGES = ("msgspec", "zmq")
SCHEME = "tcp://"


def add_kv_events(parser: argparse.ArgumentParser) -> None:
    """Adds the options of KV events."""
    events = parser.add_argument_group(
        "KV events in vLLM's format, for routers; every subscriber reads the tokens of all callers, unencrypted and "
        "without authentication"
    )
    events.add_argument(
        "--kv-events", metavar="tcp://HOST:PORT", help="publish blocks stored, removed and cleared here (default: no)"
    )
    events.add_argument(
        "--kv-events-replay",
        metavar="tcp://HOST:PORT",
        help="answer subscribers that missed messages here (default: no)",
    )
    events.add_argument(
        "--kv-events-topic", default="", metavar="TOPIC", help="topic of the messages; llm-d expects kv@POD@MODEL"
    )
    events.add_argument(
        "--trusted-kv-events-network",
        action="store_true",
        help="allow addresses that other machines can reach; every subscriber reads all tokens",
    )


def check_kv_events(options: argparse.Namespace) -> None:
    """Checks addresses and packages.

    Raises:
        UsageError: an address is invalid or can be reached from other machines, or a package is missing.
    """
    if options.kv_events is None:
        if options.kv_events_replay is not None:
            raise UsageError("--kv-events-replay needs --kv-events")
        return
    for option, address in (("--kv-events", options.kv_events), ("--kv-events-replay", options.kv_events_replay)):
        if address is not None:
            _check_address(option, address, is_trusted=options.trusted_kv_events_network)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        what = f"--kv-events needs packages that are not installed ({', '.join(missing)})"
        raise UsageError(f"{what}: {how_to_install('kv-events')}")


def _check_address(option: str, address: str, *, is_trusted: bool) -> None:
    if not address.startswith(SCHEME):
        raise UsageError(f"{option} {address}: write tcp://host:port, for example tcp://127.0.0.1:5557")
    try:
        is_safe = is_local(address.removeprefix(SCHEME)) or is_trusted
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    if not is_safe:
        raise UsageError(
            f"{option} {address} can be reached from other machines, and its subscribers read the tokens of all "
            "callers: listen on loopback, or give --trusted-kv-events-network if only routers can reach it"
        )
    require_free(option, address.removeprefix(SCHEME).replace("*", "0.0.0.0"), "publish")


def kv_events_of(options: argparse.Namespace, engine: Engine, allocator: AsyncAllocator) -> Follower | None:
    """Returns the publisher of an engine's KV events, not started yet; None if the options ask for none.

    Raises:
        UsageError: an address is taken, or the model has no full attention.
    """
    if options.kv_events is None:
        return None
    from quire_worker.kv_events.pool_follower import Follower, index_of
    from quire_worker.kv_events.publisher import Publisher

    publisher = Publisher(
        index_of(engine.cache.spec.groups, engine.cache.block_count),
        options.kv_events,
        options.kv_events_replay,
        topic=options.kv_events_topic,
        counts=engine.telemetry.kv_events,
    )
    follower = Follower(allocator, options.pool, publisher, engine.scheduler.roster)
    engine.telemetry.kv_event_lag_s = follower.lag_s
    return follower
