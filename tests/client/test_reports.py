"""An owner's block report keeps every limit of a chunk, and contains all of the ledger."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire.protocol.limits import NAMESPACE_BYTES_MAX, PRIORITY_MAX, REPORT_CHUNK_BYTES_MAX, REPORT_CHUNK_ENTRIES_MAX
from quire.protocol.packing import unpack_uint32
from quire.session import block_report
from quire.session.block_report import report_chunks
from quire.session.ledger import Ledger, LedgerSequence
from quire.session.pages import DigestSpace
from quire.v1 import allocator_pb2 as pb

LARGEST = 0xFFFFFFFF


class Shape(NamedTuple):
    """The size of each part of a ledger."""

    group_count: int
    sequence_count: int
    long_entries: int  # entries in the first tables of the first sequences
    short_entries: int  # entries in all other tables
    namespace_bytes: int
    namespace_count: int
    long_stretch_blocks: int  # blocks of the first stretch
    stretch_count: int
    stretch_blocks: int  # most blocks of each other stretch


SHAPES = st.builds(
    Shape,
    group_count=st.sampled_from([1, 1, 1, 2, 7, 1024]),
    sequence_count=st.sampled_from([0, 300, 490, 511, 700]),
    long_entries=st.sampled_from([0, 31, 31, 127, 4_096, 70_000]),
    short_entries=st.sampled_from([0, 1, 24, 28, 31]),
    namespace_bytes=st.sampled_from([0, 127, 128]),
    namespace_count=st.sampled_from([1, 5_000]),
    long_stretch_blocks=st.sampled_from([1, 3_600, 9_000]),
    stretch_count=st.integers(1, 1_100),
    stretch_blocks=st.sampled_from([1, 2, 9, 50]),
)


def ledger_of(shape: Shape) -> Ledger:
    """Makes a ledger of this shape. Numbers are as large as possible, because large ones take the most bytes."""
    group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=1)
    ledger = Ledger(pb.PoolSpec(block_count=1 << 24, groups=[group] * shape.group_count))
    names = [f"{number:x}".rjust(shape.namespace_bytes, "n")[:NAMESPACE_BYTES_MAX] for number in range(5_000)]
    names = names[: shape.namespace_count]
    groups = range(shape.group_count)
    for number in range(shape.sequence_count if shape.group_count < 1_024 else shape.sequence_count % 47):
        sequence = LedgerSequence(names[-1 - number % len(names)], LARGEST, LARGEST, -PRIORITY_MAX)
        sequence.prompt_token_count = sequence.chunk_token_count = LARGEST
        lengths = [shape.long_entries if number < 3 and table < 3 else shape.short_entries for table in groups]
        sequence.tables = [array("I", range(length + table % 2)) for table, length in enumerate(lengths)]
        ledger.sequences[(1 << 64) - 5_000 + number] = sequence
    block = 1 << 24
    for number in range(shape.stretch_count):
        size = 1 + number % shape.stretch_blocks if number else shape.long_stretch_blocks
        block -= size
        blocks = array("I", range(block, block + size))
        scope = DigestSpace(names[number % len(names)], number % shape.group_count)
        digests = b"".join(own.to_bytes(32, "little") for own in blocks)
        ledger.pages.publish(scope, 1 << 30, None, digests, blocks)
        if number % 3:
            ledger.pages.release((1 << 62) + number, LARGEST, 1 << 30, blocks[::-1], begin=0, end=len(blocks))
    return ledger


def check_bounds(chunks: list[pb.ReportChunk]) -> None:
    for number, chunk in enumerate(chunks):
        published = sum(len(prefix.blocks) // 4 for prefix in chunk.prefixes)
        assert chunk.number == number
        assert 1 <= len(chunk.sequences) + published + len(chunk.freed_steps) <= REPORT_CHUNK_ENTRIES_MAX
        assert len(chunk.SerializeToString()) <= REPORT_CHUNK_BYTES_MAX


def check_whole(chunks: list[pb.ReportChunk], ledger: Ledger) -> None:
    """Reads the chunks back, and compares them with the ledger."""
    tables: dict[int, list[array[int]]] = {}
    carried: dict[int, tuple[Any, ...]] = {}
    freed = list[tuple[int, ...]]()
    for chunk in chunks:
        names = chunk.namespaces
        for message in chunk.sequences:
            own = ledger.sequences[message.sequence_id]
            counts = (message.token_count, message.committed_token_count, message.priority)
            assert counts == (own.token_count, own.committed_token_count, own.priority)
            assert names[message.namespace] == own.namespace
            parts = [unpack_uint32(table.blocks) for table in message.tables]
            found = tables.setdefault(message.sequence_id, [array("I") for _ in parts])
            for table, part in zip(found, parts, strict=True):
                table.extend(part)
        for prefix in chunk.prefixes:
            parent = prefix.parent_digest
            for index, block in enumerate(unpack_uint32(prefix.blocks)):
                digest = prefix.digests[32 * index : 32 * index + 32]
                place = prefix.group, prefix.first_position + index, names[prefix.namespace]
                carried[block] = (digest, parent, *place)
                parent = digest
        stamps = (chunk.freed_steps, chunk.freed_operations, chunk.freed_positions)
        freed += zip(*stamps, unpack_uint32(chunk.freed_blocks), strict=True)
    assert tables == {number: sequence.tables for number, sequence in ledger.sequences.items()}
    assert list(tables) == list(ledger.sequences), "by rising id"
    pages = ledger.pages
    assert carried == pages.carried()
    released = {block for each in pages.releases() for block in each.blocks}
    assert {row[-1] for row in freed} == released - ledger.held_blocks()
    assert all(earlier < later for earlier, later in pairwise(freed))


@given(shape=SHAPES)
@example(shape=Shape(1, 511, 31, 31, 128, 600, 4_000, 1, 1))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_no_chunk_of_any_ledger_is_above_a_bound_and_nothing_is_missing(shape: Shape) -> None:
    ledger = ledger_of(shape)
    chunks = report_chunks(ledger)
    check_bounds(chunks)
    check_whole(chunks, ledger)


@pytest.mark.parametrize("limit", range(260, 420, 7))
def test_whatever_the_bound_a_chunk_is_filled_up_to_it(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_report, "REPORT_CHUNK_BYTES_MAX", limit)
    ledger = ledger_of(Shape(3, 9, 100, 2, 60, 5, 45, 20, 9))
    chunks = report_chunks(ledger)
    assert max(chunk.ByteSize() for chunk in chunks) <= limit
    check_whole(chunks, ledger)


def test_chunks_of_a_sequence_with_long_tables_are_nearly_full() -> None:
    ledger = ledger_of(Shape(2, 1, 300_000, 0, 0, 1, 1, 0, 1))
    *chunks, last = report_chunks(ledger)
    assert len(chunks) == 9
    assert all(len(chunk.sequences) == 1 and chunk.ByteSize() > REPORT_CHUNK_BYTES_MAX - 100 for chunk in chunks)
    check_whole([*chunks, last], ledger)
