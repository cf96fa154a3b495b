"""A block report while it arrives: its chunks are checked and staged, and become a pool all at once.

Lifecycle:

    1. empty     no chunk has come yet; an empty report stays so until its end
    2. staged    chunks 0, 1, 2, ... have come; their published blocks have been read into a pool in the making
    3. finished  `finish` checked the end and made the pool, or refused the report

Bounds are checked chunk by chunk, so that a report that is too long is refused while it arrives and not at its end. As
much work as possible is done chunk by chunk, too: other pools are served between two chunks, and none is served while
`finish` runs.
"""

from __future__ import annotations

from array import array

from quire.protocol.limits import REPORT_CHUNK_BYTES_MAX, REPORT_CHUNK_ENTRIES_MAX, STOPS_MAX
from quire.protocol.packing import unpack_uint32
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.pool import Pool
from quire_allocator.core.rebuild.rebuild import Rebuild
from quire_allocator.core.rebuild.report import Report, ReportedSequence, ReportedStretch
from quire_allocator.core.spec import PoolSpec
from quire_allocator.wire import translate
from quire_allocator.wire.translate import require


def report_bytes_max(spec: PoolSpec) -> int:
    """Returns the most bytes that the report of such a pool may take: those of all its blocks, of as many sequences as
    a pool may have, and of table entries that share blocks."""
    sequence_bytes = limits.REPORT_SEQUENCE_BYTES_MAX + limits.REPORT_TABLE_BYTES_MAX * _tables_max(spec)
    return (
        limits.REPORT_BLOCK_BYTES_MAX * spec.block_count
        + sequence_bytes * limits.SEQUENCES_MAX
        + 4 * limits.REPORT_SHARED_ENTRIES_MAX
    )


def _tables_max(spec: PoolSpec) -> int:
    """Counts the tables of one sequence: one for each group, and one more for kept blocks."""
    return len(spec.groups) * (2 if spec.append_only else 1)


class StagedReport:
    """Takes the chunks of one report of a pool with specification `spec`, and makes the pool."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._chunk_count = 0
        self._bytes_left = report_bytes_max(spec)
        self._table_entries_left = spec.block_count + limits.REPORT_SHARED_ENTRIES_MAX
        self._sequences: list[ReportedSequence] = []
        self._rebuild: Rebuild | None = None
        self._freed = _Freed()

    @property
    def is_empty(self) -> bool:
        """Tells whether no chunk has come yet."""
        return not self._chunk_count

    def add(self, chunk: pb.ReportChunk) -> None:
        """Stages the next chunk.

        Raises:
            Refusal: MALFORMED or TOO_LARGE; the report is void.
        """
        size = chunk.ByteSize()
        self._bytes_left -= size
        require(chunk.number == self._chunk_count, f"chunk {chunk.number} of a report comes after {self._chunk_count}")
        require(
            size <= REPORT_CHUNK_BYTES_MAX,
            f"a chunk has at most {REPORT_CHUNK_BYTES_MAX} bytes",
            "TOO_LARGE",
        )
        require(
            self._bytes_left >= 0,
            lambda: f"a report of such a pool has at most {report_bytes_max(self._spec)} bytes",
            "TOO_LARGE",
        )
        freed = unpack_uint32(_words(chunk.freed_blocks, "freed_blocks"))
        published = sum(len(prefix.blocks) for prefix in chunk.prefixes) // 4
        require(
            len(chunk.sequences) + published + len(freed) > 0,
            "a chunk has at least one entry",
        )
        require(
            len(chunk.sequences) + published + len(freed) <= REPORT_CHUNK_ENTRIES_MAX,
            f"a chunk has at most {REPORT_CHUNK_ENTRIES_MAX} entries",
            "TOO_LARGE",
        )
        self._chunk_count += 1
        names = [translate.namespace(name) for name in chunk.namespaces]
        for sequence in chunk.sequences:
            self._add_sequence(sequence, names)
        if self._rebuild is None:
            self._rebuild = Rebuild(self._spec)
        for prefix in chunk.prefixes:
            self._rebuild.read(_prefix(prefix, names))
        counts = {len(freed), len(chunk.freed_steps), len(chunk.freed_operations), len(chunk.freed_positions)}
        require(len(counts) == 1, "one step, operation and position for each freed block")
        require(self._freed.count + len(freed) <= self._spec.block_count, "more blocks are freed than there are")
        self._freed.add(chunk.freed_steps[:], chunk.freed_operations[:], chunk.freed_positions[:], freed)

    def finish(self, end: pb.ReportEnd) -> Pool:
        """Returns the pool that was reported.

        Raises:
            Refusal: MALFORMED, the end does not fit the chunks, or the report contradicts itself.
        """
        require(end.chunk_count == self._chunk_count, "chunk_count differs from the chunks sent")
        require(end.last_step <= limits.LAST_STEP_MAX, f"last_step must be at most {limits.LAST_STEP_MAX}")
        require(
            end.last_sequence_id <= limits.LAST_STEP_MAX, f"last_sequence_id must be at most {limits.LAST_STEP_MAX}"
        )
        released = self._freed.in_order()
        require(len(set(released)) == len(released), "a block is freed twice")
        rebuild = self._rebuild or Rebuild(self._spec)
        return rebuild.finish(Report(self._sequences, [], released, end.last_sequence_id))

    def _add_sequence(self, message: pb.ReportedSequence, names: list[str]) -> None:
        groups = len(self._spec.groups)
        require(
            len(message.tables) in (groups, _tables_max(self._spec)),
            f"a sequence has one table for each of the {groups} groups",
        )
        require(len(message.stops) <= STOPS_MAX, f"a sequence has at most {STOPS_MAX} stops")
        tables = [unpack_uint32(_words(table.blocks, "blocks")) for table in message.tables]
        self._table_entries_left -= sum(map(len, tables))
        require(
            self._table_entries_left >= 0,
            f"the tables of a report have at most {limits.REPORT_SHARED_ENTRIES_MAX} entries beyond one for each block",
            "TOO_LARGE",
        )
        sequence = ReportedSequence(
            message.sequence_id,
            _name(names, message.namespace),
            message.token_count,
            message.committed_token_count,
            tables[:groups],
            message.priority,
            message.prompt_token_count,
            message.chunk_token_count,
            tuple(message.stops),
            tables[groups:],
        )
        last = self._sequences[-1] if self._sequences else None
        if last is not None and last.sequence_id == sequence.sequence_id:
            same = _counts(last) == _counts(sequence) and len(last.kept) == len(sequence.kept)
            require(same, f"sequence {sequence.sequence_id} goes on with other counts than it began with")
            for table, more in zip([*last.tables, *last.kept], tables, strict=True):
                table.extend(more)
            return
        require(
            len(self._sequences) < limits.SEQUENCES_MAX,
            f"a pool has at most {limits.SEQUENCES_MAX} live sequences",
            "TOO_LARGE",
        )
        self._sequences.append(sequence)


def _counts(sequence: ReportedSequence) -> ReportedSequence:
    return sequence._replace(tables=(), kept=())


class _Freed:
    """Freed blocks, each with the step, operation and rank of its free; owners may send them in any order."""

    def __init__(self) -> None:
        self._columns = (array("Q"), array("I"), array("I"), array("I"))
        self._last = (-1, 0, 0, 0)
        self._is_sorted = True

    @property
    def count(self) -> int:
        """Counts the blocks of a chunk."""
        return len(self._columns[-1])

    def add(self, steps: list[int], operations: list[int], ranks: list[int], blocks: array[int]) -> None:
        """Adds the freed blocks of one chunk; the four columns have one entry for each."""
        if not blocks:
            return
        rows = list(zip(steps, operations, ranks, blocks, strict=True))
        self._is_sorted = self._is_sorted and rows[0] > self._last and rows == sorted(rows)
        self._last = rows[-1]
        for column, values in zip(self._columns, (steps, operations, ranks, blocks), strict=True):
            column.extend(values)

    def in_order(self) -> array[int]:
        """Returns the blocks in the order of their frees, the earliest first."""
        if self._is_sorted:
            return self._columns[-1]
        return array("I", [row[-1] for row in sorted(zip(*self._columns, strict=True))])


def _prefix(message: pb.ReportedPrefix, names: list[str]) -> ReportedStretch:
    blocks: array[int] = unpack_uint32(_words(message.blocks, "blocks"))
    return ReportedStretch(
        _name(names, message.namespace),
        message.group,
        message.first_position,
        message.parent_digest,
        translate.digests(message.digests),
        blocks,
    )


def _name(names: list[str], index: int) -> str:
    require(index < len(names), "a namespace index is out of range")
    return names[index]


def _words(data: bytes, name: str) -> bytes:
    require(len(data) % 4 == 0, f"{name} must be a multiple of 4 bytes")
    return data
