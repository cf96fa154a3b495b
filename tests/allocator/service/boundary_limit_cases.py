"""Requests that reach the limits on stops and passes; see `limit_cases.py`."""

from __future__ import annotations

from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import RunningAllocator, spec
from tests.allocator.service.limit_cases import open_pool, report_chunks, reported


async def reported_stops(allocator: RunningAllocator, number: int) -> None:
    sequence = reported(1, stops=range(1, number + 1))
    await report_chunks(allocator, pb.ReportChunk(namespaces=[""], sequences=[sequence]))


async def chunk_tokens(allocator: RunningAllocator, number: int) -> None:
    declared = spec()
    declared.chunk_token_count_max = number
    await open_pool(allocator, declared)


async def block_bytes(allocator: RunningAllocator, number: int) -> None:
    declared = spec()
    declared.block_bytes = number
    await open_pool(allocator, declared)
