"""The most memory that a block takes: its owner publishes each block alone, in a separate prefix.

Counts of bytes that Python allocates, without what its allocators add.
"""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from quire.protocol.packing import pack_uint32
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result
from quire_allocator.session.staged_report import StagedReport

COUNT = 16_384
IN_CHUNK = 2_048
SPEC = PoolSpec(COUNT, (GroupSpec(GroupKind.FULL_ATTENTION, 16),))
DIGESTS = [hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(COUNT)]


@contextmanager
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def chunks() -> Iterator[pb.ReportChunk]:
    for number, first in enumerate(range(0, COUNT, IN_CHUNK)):
        blocks = range(first, first + IN_CHUNK)
        prefixes = [pb.ReportedPrefix(blocks=pack_uint32([block]), digests=DIGESTS[block]) for block in blocks]
        nothing = [0] * IN_CHUNK
        yield pb.ReportChunk(
            number=number,
            namespaces=["a"],
            prefixes=prefixes,
            freed_blocks=pack_uint32(blocks),
            freed_steps=blocks,
            freed_operations=nothing,
            freed_positions=nothing,
        )


def test_a_block_that_is_published_alone_takes_less_than_590_bytes() -> None:
    pool = Pool(SPEC)
    with traced():
        for number, digest in enumerate(DIGESTS, start=1):
            assert pool.allocate(number, 16, digest, "a").result is Result.OK
            pool.commit(number, 16, digest)
            pool.free(number)
            pool.log.discard()
        count, _ = tracemalloc.get_traced_memory()
    print(f"{count / COUNT:.0f} bytes")
    assert pool.blocks.cached_count == COUNT
    assert count < 590 * COUNT


def test_a_block_that_is_reported_alone_takes_less_than_1000_bytes() -> None:
    report = StagedReport(SPEC)
    messages = list(chunks())
    with traced():
        for message in messages:
            report.add(message)
        pool = report.finish(pb.ReportEnd(chunk_count=len(messages)))
        _, peak = tracemalloc.get_traced_memory()
    print(f"{peak / COUNT:.0f} bytes")
    assert pool.blocks.cached_count == COUNT
    assert peak < 1_000 * COUNT
