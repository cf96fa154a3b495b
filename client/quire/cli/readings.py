"""Reads an allocator and workers for `quire top`, and computes rates since the previous reading."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from quire import Allocator, Client
from quire.errors import NotFoundError, QuireError
from quire.types import WorkerStatus
from quire.views import PoolUsage, RequestInfo, RequestState

From = TypeVar("From")
Read = TypeVar("Read")
POOLS_MAX: Final = 16  # Only the first pools by name are read.


class Rates(NamedTuple):
    """Tokens per second that a worker generated and admitted. `cached` is the cached share of prompt tokens."""

    output: float
    prompt: float
    cached: float | None


class WorkerReading(NamedTuple):
    """One worker's status and requests, or the reason why it did not answer."""

    address: str
    status: WorkerStatus | None
    requests: tuple[RequestInfo, ...]
    rates: Rates | None
    error: str = ""


class PoolReading(NamedTuple):
    """One pool, and the blocks evicted from it per second."""

    usage: PoolUsage
    evicted: float | None


class Tenant(NamedTuple):
    """One namespace, summed over all workers and pools in the reading."""

    namespace: str
    running: int
    waiting: int
    held_block_count: int
    cached_block_count: int


class Reading(NamedTuple):
    """All servers' answers at one time."""

    at_s: float
    workers: tuple[WorkerReading, ...]
    pools: tuple[PoolReading, ...]
    allocator_error: str = ""

    def tenants(self) -> list[Tenant]:
        """Returns the namespaces, most blocks first."""
        requests = [request for worker in self.workers for request in worker.requests]
        uses = [use for pool in self.pools for use in pool.usage.namespaces]
        found = [
            Tenant(
                name,
                sum(each.namespace == name and each.state is RequestState.RUNNING for each in requests),
                sum(each.namespace == name and each.state is RequestState.WAITING for each in requests),
                sum(use.held_block_count for use in uses if use.namespace == name),
                sum(use.cached_block_count for use in uses if use.namespace == name),
            )
            for name in {each.namespace for each in requests} | {each.namespace for each in uses}
        ]
        return sorted(found, key=lambda each: (-each.held_block_count, -each.cached_block_count, each.namespace))


class Reader:
    """Reads all servers in parallel, so that a silent server delays the others by at most the clients' timeout."""

    def __init__(self, allocator: Allocator, workers: Sequence[tuple[str, Client]]) -> None:
        self._allocator = allocator
        self._workers = workers
        self._pool = ThreadPoolExecutor(len(workers) + 1, thread_name_prefix="quire-top")

    def read(self, before: Reading | None = None) -> Reading:
        """Returns the servers' current answers, with rates since `before`."""
        asked = [(address, self._pool.submit(_tried, _worker, client)) for address, client in self._workers]
        pools, error = self._pool.submit(_tried, _pools, self._allocator).result()
        answered = [(address, *future.result()) for address, future in asked]
        now_s = time.monotonic()
        seconds = now_s - before.at_s if before else 0.0
        former_workers = {each.address: each.status for each in before.workers} if before else {}
        former_pools = {each.usage.summary.pool: each.usage for each in before.pools} if before else {}
        return Reading(
            now_s,
            tuple(
                WorkerReading(address, found[0], found[1], _rates(former_workers.get(address), found[0], seconds))
                if found
                else WorkerReading(address, None, (), None, why)
                for address, found, why in answered
            ),
            tuple(
                PoolReading(each, _evicted(former_pools.get(each.summary.pool), each, seconds)) for each in pools or ()
            ),
            error,
        )

    def close(self) -> None:
        """Ends the threads that read servers."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _tried(read: Callable[[From], Read], server: From) -> tuple[Read | None, str]:
    """Returns a server's answer, or the reason why there is none."""
    try:
        return read(server), ""
    except QuireError as error:
        return None, str(error)


def _worker(client: Client) -> tuple[WorkerStatus, tuple[RequestInfo, ...]]:
    return client.status(), client.requests()


def _pools(allocator: Allocator) -> list[PoolUsage]:
    found = []
    for pool in allocator.list_pools()[:POOLS_MAX]:
        with contextlib.suppress(NotFoundError):  # The pool may have been dropped since it was listed.
            found.append(allocator.get_pool_usage(pool.pool))
    return found


def _rates(before: WorkerStatus | None, now: WorkerStatus, seconds: float) -> Rates | None:
    """Returns the rates between two readings, or None if the worker is new or was restarted."""
    if before is None or seconds <= 0 or now.output_token_count < before.output_token_count:
        return None
    prompt = now.prompt_token_count - before.prompt_token_count
    cached = now.cached_token_count - before.cached_token_count
    output = now.output_token_count - before.output_token_count
    return Rates(output / seconds, prompt / seconds, cached / prompt if prompt > 0 else None)


def _evicted(before: PoolUsage | None, now: PoolUsage, seconds: float) -> float | None:
    if before is None or seconds <= 0 or now.summary.evicted_block_count < before.summary.evicted_block_count:
        return None
    return (now.summary.evicted_block_count - before.summary.evicted_block_count) / seconds
