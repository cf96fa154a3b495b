"""`quire_*` metrics of the engine's process, served at an address of their own.

vLLM's own `/metrics` is in the process of the API server, which has no pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from quire._serving.listening import require_safe
from quire._transport.address import is_unix, split
from quire.errors import UsageError
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.metrics.collector import AllocatorCollector
from quire_allocator.metrics.counters import Counters

from quire_vllm.embedded import EmbeddedPool
from quire_vllm.options import Options
from quire_vllm.releases import UnsupportedError

if TYPE_CHECKING:
    from quire_vllm.remote import RemotePool

# Names of the allocator's metric families that also describe a pool without steps and sessions.
OF_POOLS: Final = frozenset(
    {
        "quire_allocator_blocks",
        "quire_allocator_group_blocks",
        "quire_allocator_sequences",
        "quire_allocator_saved_blocks",
        "quire_allocator_prefix_tokens",
        "quire_allocator_granted_blocks",
        "quire_allocator_dropped_blocks",
        "quire_allocator_evictions",
    }
)


class EngineCollector(Collector):
    """Reads the pool of an engine at scrape. The method runs in the metrics server's thread.

    A pool in this process has the allocator's metrics. A pool at an allocator has them there.
    """

    def __init__(self, pool: EmbeddedPool | RemotePool, name: str) -> None:
        self._pool, self._name = pool, name
        self._of_pool: AllocatorCollector | None = None
        if isinstance(pool, EmbeddedPool):
            directory, inner = Directory(lease_s=0.0, pools_max=1), pool.pool
            owner, _, _ = directory.attach(
                name=name,
                spec=inner.spec,
                incarnation=b"vllm",
                epoch=1,
                window=1,
                resume_session=b"",
                stream=None,
                now=0.0,
            )
            directory.open(owner, spec=inner.spec, session_id=b"vllm", last_step=0, make_pool=lambda _spec: inner)
            self._of_pool = AllocatorCollector(directory, Counters())

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, as Prometheus' client asks for them at a scrape."""
        info = GaugeMetricFamily("quire_vllm_info", "1: Quire's manager is in use.", labels=["pool", "core"])
        info.add_metric([self._name, self._pool.core], 1)
        yield info
        if self._of_pool is not None:
            yield from (family for family in self._of_pool.collect() if family.name in OF_POOLS)
        elif not isinstance(self._pool, EmbeddedPool):
            silent = GaugeMetricFamily(
                "quire_vllm_allocator_silent", "1 while the allocator does not answer, else 0.", labels=["pool"]
            )
            silent.add_metric([self._name], self._pool.is_silent)
            yield silent


def serve_metrics(pool: EmbeddedPool | RemotePool, options: Options) -> None:
    """Serves /metrics at `options.metrics` from a thread of its own, until this process ends.

    Raises:
        UnsupportedError: the address is invalid, in use, or other machines can reach it.
    """
    address = options.metrics
    try:
        if is_unix(address):
            raise UsageError(f"metrics: {address} is a socket; give host:port")
        require_safe("metrics", address, encrypted=False, authenticated=False)
        host, port = split(address)
    except UsageError as error:
        raise UnsupportedError(str(error)) from None
    registry = CollectorRegistry()
    registry.register(EngineCollector(pool, options.pool))
    try:
        start_http_server(int(port), host, registry)
    except OSError as error:
        raise UnsupportedError(f"cannot serve metrics on {address}: {error}") from None
