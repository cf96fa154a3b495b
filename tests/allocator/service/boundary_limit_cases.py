"""What reaches the limits on boundaries, ends of turns and passes; see `limit_cases.py`."""

from __future__ import annotations

from quire.protocol.packing import pack_uint32
from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import Allocator, StreamOwner, UnaryOwner, grows, spec
from tests.allocator.service.limit_cases import last, open_pool, report_chunks, reported


async def turn_ends_of_a_step(allocator: Allocator, number: int) -> None:
    owner = await StreamOwner.ready(allocator)
    phase = grows((1, 1, b""))
    phase.turn_end_counts, phase.turn_ends = pack_uint32([number]), pack_uint32(range(1, number + 1))
    last()
    await owner.step(grows=phase)


async def turn_ends_of_a_unary_session(allocator: Allocator, number: int) -> None:
    owner = await UnaryOwner.open(allocator)
    last()
    await owner.call("Allocate", sequence_id=1, token_count=1, turn_ends=range(1, number + 1))


async def reported_boundaries(allocator: Allocator, number: int) -> None:
    sequence = reported(1, boundaries=range(1, number + 1))
    await report_chunks(allocator, pb.ReportChunk(namespaces=[""], sequences=[sequence]))


async def reported_answer_ends(allocator: Allocator, number: int) -> None:
    sequence = reported(1, answer_ends=range(1, number + 1))
    await report_chunks(allocator, pb.ReportChunk(namespaces=[""], sequences=[sequence]))


async def chunk_tokens(allocator: Allocator, number: int) -> None:
    declared = spec()
    declared.chunk_token_count_max = number
    await open_pool(allocator, declared)
