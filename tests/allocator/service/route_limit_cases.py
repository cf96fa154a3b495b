"""Requests that reach the limits of routing; see `limit_cases.py`."""

from __future__ import annotations

from typing import Any

from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import RunningAllocator, spec
from tests.allocator.service.limit_cases import last, name_of


async def _register(allocator: RunningAllocator, **fields: Any) -> None:
    """Opens a pool whose worker has these fields."""
    worker = pb.RoutedWorker(**{"address": "here:1", "model": "m", **fields})
    request = pb.OpenSessionRequest(version=3, request_id="routed", pool="routed", spec=spec(), worker=worker)
    await allocator.stub.OpenSession(request)


async def _route(allocator: RunningAllocator, **fields: Any) -> None:
    """Routes a prompt to the only worker."""
    await _register(allocator)
    last()
    await allocator.stub.Route(pb.RouteRequest(**{"model": "m", "prompt_token_count": 1, **fields}))


async def address(allocator: RunningAllocator, number: int) -> None:
    await _register(allocator, address=name_of(number))


async def model(allocator: RunningAllocator, number: int) -> None:
    await _register(allocator, model=name_of(number))


async def adapter(allocator: RunningAllocator, number: int) -> None:
    await _register(allocator, adapters=[name_of(number)])


async def adapters(allocator: RunningAllocator, number: int) -> None:
    await _register(allocator, adapters=[f"a{place}" for place in range(number)])


async def prefill_rate(allocator: RunningAllocator, number: int) -> None:
    await _register(allocator, prefill_tokens_per_s=number)


async def prompt_tokens(allocator: RunningAllocator, number: int) -> None:
    await _route(allocator, prompt_token_count=number)


async def excluded_pools(allocator: RunningAllocator, number: int) -> None:
    await _route(allocator, excluded_pools=[f"p{place}" for place in range(number)])


async def reservation_ms(allocator: RunningAllocator, number: int) -> None:
    await _route(allocator, reservation_ms=number)


async def namespace(allocator: RunningAllocator, number: int) -> None:
    await _route(allocator, namespace=name_of(number))
