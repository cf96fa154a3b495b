"""A block report while it arrives: its chunks are checked and staged, and become a pool all at once.

Lifecycle:

    1. empty     no chunk has come yet; an empty report stays so until its end
    2. staged    chunks 0, 1, 2, ... have come; their published blocks have been read into a pool in the making
    3. finished  `finish` checked the end and made the pool, or refused the report

Each chunk is checked for bounds, so that a report that is too long is refused as it arrives and not at its end. As much
work as possible is done chunk by chunk, too: other pools are served between two chunks, and none is served while
`finish` runs.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

from quire.protocol.limits import REPORT_CHUNK_BYTES_MAX, REPORT_CHUNK_ENTRIES_MAX, STOPS_MAX
from quire.protocol.packing import unpack_uint32
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.pool import Pool
from quire_allocator.core.rebuild.rebuild import Rebuild
from quire_allocator.core.rebuild.report import Report, ReportedSequence, ReportedStretch
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import PoolSpec
from quire_allocator.session.caller_memory import report_bytes
from quire_allocator.wire import translate
from quire_allocator.wire.translate import require


def report_bytes_max(spec: PoolSpec) -> int:
    """Returns the maximum bytes of a report of such a pool: for all its blocks, the maximum number of sequences, and
    table entries of shared blocks."""
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
        self._prefix_count = 0
        self._sequences: list[ReportedSequence] = []
        self._rebuild: Rebuild | None = None
        self._freed = _Freed()

    @property
    def is_empty(self) -> bool:
        """Tells whether no chunk has come yet."""
        return not self._chunk_count

    @property
    def sequence_count(self) -> int:
        """Counts the live sequences reported so far."""
        return len(self._sequences)

    @property
    def byte_count(self) -> int:
        """Estimates the memory of the pool that the report makes."""
        return report_bytes(self._spec, self._prefix_count, self.block_count, self.sequence_count)

    @property
    def block_count(self) -> int:
        """Counts the blocks reported so far; once finished, also the sequences' own blocks."""
        return self._rebuild.use.block_count if self._rebuild is not None else 0

    def add(self, chunk: pb.ReportChunk) -> None:
        """Stages the next chunk.

        Raises:
            Refusal: MALFORMED or TOO_LARGE; the report is void.
        """
        size = chunk.ByteSize()
        self._bytes_left -= size
        require(
            chunk.number == self._chunk_count,
            lambda: f"number must be {self._chunk_count}, the next chunk of this report, not {chunk.number}",
        )
        require(
            size <= REPORT_CHUNK_BYTES_MAX,
            f"a chunk may have at most {REPORT_CHUNK_BYTES_MAX:,} bytes, not {size:,}: send several chunks",
            "TOO_LARGE",
        )
        require(
            self._bytes_left >= 0,
            lambda: (
                f"a report of {self._spec.block_count:,} blocks may have at most {report_bytes_max(self._spec):,} bytes"
            ),
            "TOO_LARGE",
        )
        freed = unpack_uint32(_words(chunk.freed_blocks, "freed_blocks"))
        published = sum(len(prefix.blocks) for prefix in chunk.prefixes) // 4
        entries = len(chunk.sequences) + published + len(freed)
        require(entries > 0, "the chunk is empty: send its entries, or ReportEnd")
        require(
            entries <= REPORT_CHUNK_ENTRIES_MAX,
            f"a chunk may have at most {REPORT_CHUNK_ENTRIES_MAX:,} entries, not {entries:,}: send several chunks",
            "TOO_LARGE",
        )
        self._chunk_count += 1
        names = [translate.namespace(name) for name in chunk.namespaces]
        for sequence in chunk.sequences:
            self._add_sequence(sequence, names)
        if self._rebuild is None:
            self._rebuild = Rebuild(self._spec)
        self._prefix_count += len(chunk.prefixes)
        for prefix in chunk.prefixes:
            self._rebuild.read(_prefix(prefix, names))
        counts = {len(freed), len(chunk.freed_steps), len(chunk.freed_operations), len(chunk.freed_positions)}
        require(
            len(counts) == 1,
            f"freed_blocks has {len(freed):,} entries, freed_steps {len(chunk.freed_steps):,}, freed_operations "
            f"{len(chunk.freed_operations):,} and freed_positions {len(chunk.freed_positions):,}; they must be equal",
        )
        freed_count = self._freed.count + len(freed)
        require(
            freed_count <= self._spec.block_count,
            f"the report has {freed_count:,} freed blocks, more than the pool's {self._spec.block_count:,} blocks",
        )
        self._freed.add(chunk.freed_steps[:], chunk.freed_operations[:], chunk.freed_positions[:], freed)

    def finish(self, end: pb.ReportEnd) -> Pool:
        """Returns the pool that was reported.

        Raises:
            Refusal: MALFORMED if the end does not fit the chunks, or the report contradicts itself.
        """
        require(
            end.chunk_count == self._chunk_count,
            f"chunk_count must be {self._chunk_count}, the number of chunks sent, not {end.chunk_count}",
        )
        for field, number in (("last_step", end.last_step), ("last_sequence_id", end.last_sequence_id)):
            require(
                number <= limits.LAST_STEP_MAX,
                f"{field} must be at most {limits.LAST_STEP_MAX}, not {number}",
                field=field,
            )
        released = self._freed.in_order()
        require(len(set(released)) == len(released), lambda: f"block {_repeated(released)} is freed twice")
        if self._rebuild is None:  # No chunk came: an empty pool needs no `Rebuild`.
            pool = Pool(self._spec)
            pool.last_sequence_id = end.last_sequence_id
            return pool
        return self._rebuild.finish(Report(self._sequences, [], released, end.last_sequence_id))

    def _add_sequence(self, message: pb.ReportedSequence, names: list[str]) -> None:
        groups = len(self._spec.groups)
        if len(message.tables) not in (groups, _tables_max(self._spec)):
            text = f"sequence {message.sequence_id} has {len(message.tables)} tables, but the pool has {groups} groups"
            raise Refusal("MALFORMED", text)
        if len(message.stops) > STOPS_MAX:
            raise Refusal("MALFORMED", f"a sequence may have at most {STOPS_MAX} stops, not {len(message.stops):,}")
        translate.priority(message.priority, f"priority of sequence {message.sequence_id}")
        tables = [unpack_uint32(_words(table.blocks, "blocks")) for table in message.tables]
        self._table_entries_left -= sum(map(len, tables))
        require(
            self._table_entries_left >= 0,
            f"tables may have at most {limits.REPORT_SHARED_ENTRIES_MAX:,} entries more than the pool has blocks",
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
            require(same, f"the parts of sequence {sequence.sequence_id} have different counts")
            for table, more in zip([*last.tables, *last.kept], tables, strict=True):
                table.extend(more)
            return
        require(
            len(self._sequences) < limits.SEQUENCES_MAX,
            f"the report has more than {limits.SEQUENCES_MAX:,} live sequences, the most in a pool",
            "TOO_LARGE",
        )
        self._sequences.append(sequence)


def _repeated(blocks: array[int]) -> int:
    """Returns a block that occurs twice."""
    ordered = sorted(blocks)
    return next(block for block, following in pairwise(ordered) if block == following)


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
    if index >= len(names):
        raise Refusal(
            "MALFORMED",
            f"namespace index {index} must be below {len(names):,}, the number of namespaces in its chunk",
        )
    return names[index]


def _words(data: bytes, name: str) -> bytes:
    if len(data) % 4:
        raise Refusal("MALFORMED", f"{name} must be a multiple of 4 bytes, not {len(data):,}")
    return data
