"""The adapters of a worker, by name. A worker loads adapters at its start or by a call, and requests choose among them.

Lifecycle of a name:

    1. loading   a thread reads and checks its folder; requests do not know it yet
    2. loaded    requests can choose the adapter. Its digest is in the root of all their prefixes, so they hit no blocks
                 of requests with other adapters
    3. dropped   the name is unknown again. Dropping is refused while a request uses the adapter. Its requests' cached
                 blocks are hit again if the same weights are loaded again, under any name
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path

import structlog
from quire.errors import QuireError, Reason

from quire_worker.model.adapters.adapter import Adapter
from quire_worker.model.adapters.peft_folder import AdapterError, AdapterLimits, read_adapter
from quire_worker.model.paged_model import PagedModel
from quire_worker.scheduling.request import Request

LIMITS = AdapterLimits(count_max=16, rank_max=64, byte_count_max=1 << 30)  # the defaults
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

log = structlog.get_logger()


def request_count(adapter: Adapter, requests: Iterable[Request]) -> int:
    """Returns the number of requests that use an adapter and are not done."""
    return sum(request.adapter is adapter and not request.is_done for request in requests)


class Adapters:
    """All loaded adapters. For the event loop, except `read`, which is for the start."""

    def __init__(self, model: PagedModel, limits: AdapterLimits = LIMITS, root: Path | None = None) -> None:
        """Starts without adapters.

        Args:
            model: the model that the adapters change.
            limits: the limits for all adapters.
            root: folder below which calls may load adapters; None: no call may.
        """
        self.limits = limits
        self._model = model
        self._root = None if root is None else root.resolve()
        self._by_name: dict[str, Adapter] = {}
        self._loading = asyncio.Lock()

    @property
    def all(self) -> list[Adapter]:
        """Returns all loaded adapters, sorted by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def get(self, name: str) -> Adapter | None:
        """Returns the adapter of a request; None if the name is empty.

        Raises:
            QuireError: ADAPTER_UNKNOWN, no adapter has the name.
        """
        return self.named(name) if name else None

    def named(self, name: str) -> Adapter:
        """Returns the adapter with a name.

        Raises:
            QuireError: ADAPTER_UNKNOWN, no adapter has the name.
        """
        if name not in self._by_name:
            raise QuireError.of(Reason.ADAPTER_UNKNOWN, f"no adapter named {name[:64]!r} is loaded")
        return self._by_name[name]

    def read(self, name: str, folder: Path) -> Adapter:
        """Loads an adapter, and blocks until it is loaded.

        Raises:
            AdapterError: it cannot be served, or a limit is exceeded.
        """
        adapter = self._read(name, folder, None)
        self._keep(adapter)
        return adapter

    async def load(self, name: str, folder: str) -> Adapter:
        """Loads an adapter while requests run. Does nothing if the same adapter is already loaded under this name.

        Args:
            name: its name in requests.
            folder: its folder below the root; relative to the root, or absolute.

        Raises:
            QuireError: NOT_SUPPORTED, calls may not load adapters; ADAPTER_EXISTS, another adapter has the name;
                ADAPTER_UNUSABLE, the adapter cannot be served, or exceeds a limit.
        """
        path = self._below_root(folder)
        async with self._loading:
            try:
                adapter = await asyncio.to_thread(self._read, name, path, self._root)
            except AdapterError as error:
                raise QuireError.of(Reason.ADAPTER_UNUSABLE, str(error)) from None
            held = self._by_name.get(name)
            if held is not None and held.digest != adapter.digest:
                raise QuireError.of(
                    Reason.ADAPTER_EXISTS,
                    f"another adapter is already loaded as {name!r}; unload it first",
                )
            if held is None:
                self._keep(adapter)
            return held or adapter

    def drop(self, name: str, request_count: int) -> None:
        """Drops an adapter.

        Args:
            name: the name of a loaded adapter.
            request_count: number of open requests that use it.

        Raises:
            QuireError: ADAPTER_UNKNOWN, no adapter has the name; ADAPTER_IN_USE, requests use it.
        """
        self.named(name)
        if request_count:
            raise QuireError.of(
                Reason.ADAPTER_IN_USE, f"{request_count} requests use adapter {name!r}: wait until they have ended"
            )
        del self._by_name[name]
        log.info("adapter dropped", adapter=name)

    def _keep(self, adapter: Adapter) -> None:
        self._by_name[adapter.name] = adapter
        log.info(
            "adapter loaded",
            adapter=adapter.name, rank=adapter.rank, layers=len(adapter.factors), bytes=adapter.byte_count,
            digest=adapter.digest.hex(),
        )  # fmt: skip

    def _read(self, name: str, folder: Path, below: Path | None) -> Adapter:
        if not _NAME.fullmatch(name):
            raise AdapterError("the name of an adapter must have 1 to 64 letters, digits, '.', '_' and '-'")
        if self._model.sites is None:
            raise AdapterError(f"adapters are not supported with {self._model.rank_count} ranks")
        others = [adapter for adapter in self._by_name.values() if adapter.name != name]
        if len(others) >= self.limits.count_max:
            raise AdapterError(f"{len(others)} adapters are loaded, the most at this worker: unload one")
        left = self.limits.byte_count_max - sum(adapter.byte_count for adapter in others)
        limits = AdapterLimits(self.limits.count_max, self.limits.rank_max, left)
        return read_adapter(name, folder, self._model.sites.by_name, limits, self._model.device, below=below)

    def _below_root(self, folder: str) -> Path:
        if self._root is None:
            raise QuireError.of(
                Reason.NOT_SUPPORTED,
                "this worker does not load adapters by a call: its operator has set no folder for them",
            )
        path = (self._root / folder).resolve()
        if not path.is_relative_to(self._root) or not path.is_dir():
            raise QuireError.of(
                Reason.ADAPTER_UNUSABLE, f"{folder[:256]!r} is not a folder inside the worker's folder of adapters"
            )
        return path
