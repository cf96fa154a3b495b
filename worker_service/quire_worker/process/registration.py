"""Registers the worker: sends the allocator what routers may know of this worker.

1. begin   before the session attaches; each attach repeats the registration
2. serve   sends adapters and the measured rate again, at most a second after they have changed
3. drain   reports that the worker takes no further requests
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from quire._transport.address import canonical, is_unix, split
from quire.errors import UsageError
from quire.types import RoutedWorker

if TYPE_CHECKING:
    from quire_worker.engine import Engine  # This module loads torch; options are read before.

LOOK_S: Final = 1.0
PASS_TOKENS_MIN: Final = 64  # smallest pass that shows a rate: smaller passes take as long as reading the weights
RATE_CHANGE: Final = 0.2  # The worker reports a rate only if it differs by more than this share from the last one.
RATE_MAX: Final = 1 << 24
ADAPTERS_MAX: Final = 1_024  # the most adapters that an allocator takes
ADDRESS_BYTES_MAX: Final = 256
_EVERYWHERE: Final = ("0.0.0.0", "::")


def add_registration(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the address that gateways get."""
    parser.add_argument(
        "--advertise",
        type=_address,
        metavar="ADDRESS",
        help="address at which gateways reach this worker; the allocator tells it to them (default: that of --listen, "
        "with this machine's name if it listens on all addresses)",
    )


def _address(text: str) -> str:
    try:
        found = canonical(text)
        is_named = is_unix(found) or split(found)[1] > 0
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not is_named or len(found.encode()) > ADDRESS_BYTES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must have a port, and at most {ADDRESS_BYTES_MAX} bytes")
    return found


def reachable(listen: str) -> str:
    """Returns the address of a server for other processes: with this machine's name instead of all addresses."""
    if is_unix(listen):
        return listen
    host, port = split(listen)
    return f"{socket.gethostname()}:{port}" if host in _EVERYWHERE else listen


class Registration:
    """One worker's registration. Lifecycle: see the module.

    Args:
        engine: its session sends the registration, with the engine's adapters and pace.
        model: the name of the model in answers.
        advertised: the address that gateways get; None: the server's own.
    """

    def __init__(self, engine: Engine, model: str, advertised: str | None) -> None:
        self._engine, self._told, self._advertised = engine, RoutedWorker("", model), advertised
        self._looking: asyncio.Task[None] | None = None

    def begin(self, listen: str) -> None:
        """Registers the worker, whose server listens at this address, and keeps the registration up to date."""
        self._told = replace(self._told, address=self._advertised or reachable(listen))
        self._tell(self._now())
        self._looking = asyncio.create_task(self._look())

    def drain(self) -> None:
        """Reports that the worker takes no further requests."""
        if self._looking is not None:  # `begin` was called
            self._looking.cancel()
            self._tell(replace(self._told, draining=True))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._now()
            if now != self._told:
                self._tell(now)

    def _now(self) -> RoutedWorker:
        adapters = [adapter.name for adapter in self._engine.adapters.all]
        adapters = [name for name in adapters if len(name.encode()) <= ADDRESS_BYTES_MAX][:ADAPTERS_MAX]
        rate = known = self._told.prefill_tokens_per_s
        measured = self._engine.scheduler.roster.pace.tokens_per_s(PASS_TOKENS_MIN)
        if measured is not None and abs(measured - known) > RATE_CHANGE * known:
            rate = min(max(1, round(measured)), RATE_MAX)
        return replace(self._told, adapters=tuple(adapters), prefill_tokens_per_s=rate)

    def _tell(self, worker: RoutedWorker) -> None:
        self._told = worker
        self._engine.session.register(worker)
