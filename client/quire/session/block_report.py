"""Makes a pool's block report from its owner's ledger, in chunks that every allocator accepts.

    for chunk in report_chunks(ledger):    # then `ReportEnd`, see `report_end`
        ...

Published blocks are sent as stretches: consecutive blocks of one prefix, each with its digest. If two blocks have the
same digest, only the later published one is reported: the allocator has evicted the earlier one. An earlier block that
a sequence holds is reported, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from typing import Final

from quire.hashing import DIGEST_BYTES
from quire.protocol.limits import REPORT_CHUNK_BYTES_MAX, REPORT_CHUNK_ENTRIES_MAX
from quire.protocol.outcomes import NULL_BLOCK
from quire.protocol.packing import pack_uint32
from quire.session.ledger import Ledger, LedgerSequence
from quire.session.pages import DigestSpace, Pages, PublishedStretch
from quire.v1 import allocator_pb2 as pb

# Most sequences and stretches in a chunk. A sequence costs an allocator as much time as many blocks, and the allocator
# serves other owners only between chunks.
HEADS_MAX: Final = 512

# Upper bounds of a chunk's encoded parts, in bytes. A tag takes one byte. A length takes three bytes, because no chunk
# reaches 2 MiB.
FRAME_BYTES: Final = 1 + 3  # tag and length of a message, a string, or an array of numbers
NUMBER_BYTES: Final = 1 + 5  # a single uint32
SEQUENCE_BYTES: Final = 3 * FRAME_BYTES + 9 + 7 * NUMBER_BYTES  # bytes of the id and seven numbers, without stops
STOP_BYTES: Final = 4
TABLE_BYTES: Final = 2 * FRAME_BYTES  # a message around an array
TABLE_ENTRY_BYTES: Final = 4
STRETCH_BYTES: Final = FRAME_BYTES + 3 * NUMBER_BYTES + (2 + DIGEST_BYTES) + 2 * FRAME_BYTES
STRETCH_ENTRY_BYTES: Final = DIGEST_BYTES + 4
FREED_BYTES: Final = 4 * FRAME_BYTES  # the four columns of a chunk's freed blocks, without entries
FREED_ENTRY_BYTES: Final = 4 + 8 + 4 + 4  # four numbers: block, step, operation, rank


class _Chunker:
    """Fills chunks one after the other.

    Attributes:
        chunk: the current chunk.
        entries_left, bytes_left, heads_left: what the current chunk can still hold.
    """

    def __init__(self) -> None:
        self.done: list[pb.ReportChunk] = []
        self._start()

    def _start(self) -> None:
        self.chunk = pb.ReportChunk(number=len(self.done))
        self.entries_left, self.heads_left = REPORT_CHUNK_ENTRIES_MAX, HEADS_MAX
        self.bytes_left = REPORT_CHUNK_BYTES_MAX - NUMBER_BYTES
        self._names: dict[str, int] = {}

    def make_room(self, size: int) -> None:
        """Begins a new chunk unless one more entry and `size` bytes fit the current one."""
        if not self.entries_left or not self.heads_left or size > self.bytes_left:
            self.finish()

    def add_head(self, namespace: str, size: int, entry_size: int) -> int:
        """Makes room for the fixed bytes of a sequence or stretch and for one of its entries. The method counts the
        fixed bytes, and returns the index of the namespace."""
        self.make_room(self._name_bytes(namespace) + size + entry_size)
        self.bytes_left -= self._name_bytes(namespace) + size
        self.heads_left -= 1
        return self._names.setdefault(namespace, len(self._names))

    def finish(self) -> None:
        """Ends the current chunk, unless it is empty."""
        if self.entries_left < REPORT_CHUNK_ENTRIES_MAX:
            self.chunk.namespaces.extend(self._names)
            self.done.append(self.chunk)
            self._start()

    def _name_bytes(self, namespace: str) -> int:
        return 0 if namespace in self._names else FRAME_BYTES + len(namespace.encode())


def report_chunks(ledger: Ledger) -> list[pb.ReportChunk]:
    """Returns all chunks of the report, none for an empty pool."""
    chunker = _Chunker()
    for sequence_id, sequence in ledger.sequences.items():
        _add_sequence(chunker, sequence_id, sequence)
    held, pages = ledger.held_blocks(), ledger.pages
    stretches = pages.stretches()
    parts = [part for stretch in stretches for part in pages.parts(stretch)]
    outdated = _outdated(pages, held) if _may_repeat(parts) else set[int]()
    if outdated:
        parts = [part for stretch in stretches for part in pages.parts(stretch, outdated)]
    for part in parts:
        _add_stretch(chunker, part)
    _add_freed(chunker, pages, held | outdated)
    chunker.finish()
    return chunker.done


def report_end(chunks: Sequence[pb.ReportChunk], *, last_step: int, last_sequence_id: int) -> pb.ReportEnd:
    """Returns the message that ends the report."""
    return pb.ReportEnd(chunk_count=len(chunks), last_step=last_step, last_sequence_id=last_sequence_id)


def _add_sequence(chunker: _Chunker, sequence_id: int, sequence: LedgerSequence) -> None:
    """Adds a sequence to as many chunks as its tables need."""
    tables = _reported_tables(sequence)
    done = [0] * len(tables)
    size = SEQUENCE_BYTES + STOP_BYTES * len(sequence.stops) + TABLE_BYTES * len(tables)
    while True:
        namespace = chunker.add_head(sequence.namespace, size, TABLE_ENTRY_BYTES)
        message = chunker.chunk.sequences.add(
            sequence_id=sequence_id,
            namespace=namespace,
            token_count=sequence.token_count,
            committed_token_count=sequence.committed_token_count,
            priority=sequence.priority,
            prompt_token_count=sequence.prompt_token_count,
            chunk_token_count=sequence.chunk_token_count,
            stops=sequence.stops,
        )
        chunker.entries_left -= 1
        for group, table in enumerate(tables):
            part = table[done[group] : done[group] + chunker.bytes_left // TABLE_ENTRY_BYTES]
            message.tables.add(blocks=pack_uint32(part))
            done[group] += len(part)
            chunker.bytes_left -= TABLE_ENTRY_BYTES * len(part)
        if all(count == len(table) for count, table in zip(done, tables, strict=True)):
            return


def _reported_tables(sequence: LedgerSequence) -> list[array[int]]:
    """Returns one table per group. If the sequence has twins, the twins replace its own blocks in these tables. Further
    tables then list the replaced blocks."""
    if not sequence.twins:
        return sequence.tables
    kept = [array("I", [NULL_BLOCK]) * len(table) for table in sequence.tables]
    for group, position in sequence.twins:
        kept[group][position] = sequence.tables[group][position]
    return [*map(sequence.path, range(len(kept))), *kept]


def _may_repeat(parts: Sequence[PublishedStretch]) -> bool:
    """Tells whether two blocks of one group and namespace might carry the same digest. The search compares only the
    first 8 bytes of each digest, which is quick, but may give a false positive."""
    words: dict[DigestSpace, list[int]] = {}
    for part in parts:
        first_words = memoryview(part.digests).cast("Q")[:: DIGEST_BYTES // 8]
        words.setdefault(part.scope, []).extend(first_words.tolist())
    return any(len(set(own)) != len(own) for own in words.values())


def _outdated(pages: Pages, held: Set[int]) -> set[int]:
    """Returns the blocks that have the same digest as a later block."""
    carriers: dict[tuple[int, str, bytes], int] = {}
    outdated = set()
    for block, carried in pages.carried().items():
        key = (carried.group, carried.namespace, carried.digest)
        other = carriers.setdefault(key, block)
        if other == block:
            continue
        if other in held:
            outdated.add(block)
        else:
            outdated.add(other)
            carriers[key] = block
    return outdated


def _add_freed(chunker: _Chunker, pages: Pages, others: Set[int]) -> None:
    """Adds the released blocks, in the order of their releases, except the blocks in `others`."""
    blocks, steps, operations, ranks = array("I"), list[int](), list[int](), list[int]()
    for each in pages.releases():
        own, own_ranks = each.blocks, each.ranks
        if not others.isdisjoint(own):
            rows = [row for row in zip(own, own_ranks, strict=True) if row[0] not in others]
            own, own_ranks = [row[0] for row in rows], [row[1] for row in rows]
        blocks.extend(own)
        steps += [each.step] * len(own)
        operations += [each.operation] * len(own)
        ranks += own_ranks
    done = 0
    while done < len(blocks):
        chunker.make_room(FREED_BYTES + FREED_ENTRY_BYTES)
        chunker.bytes_left -= FREED_BYTES
        end = min(len(blocks), done + min(chunker.entries_left, chunker.bytes_left // FREED_ENTRY_BYTES))
        chunk = chunker.chunk
        chunk.freed_blocks += pack_uint32(blocks[done:end])
        chunk.freed_steps.extend(steps[done:end])
        chunk.freed_operations.extend(operations[done:end])
        chunk.freed_positions.extend(ranks[done:end])
        chunker.entries_left -= end - done
        chunker.bytes_left -= FREED_ENTRY_BYTES * (end - done)
        done = end


def _add_stretch(chunker: _Chunker, stretch: PublishedStretch) -> None:
    done, count = 0, len(stretch.blocks)
    while done < count:
        namespace = chunker.add_head(stretch.scope.namespace, STRETCH_BYTES, STRETCH_ENTRY_BYTES)
        end = min(count, done + min(chunker.entries_left, chunker.bytes_left // STRETCH_ENTRY_BYTES))
        chunker.chunk.prefixes.add(
            namespace=namespace,
            group=stretch.scope.group,
            first_position=stretch.first_position + done,
            parent_digest=stretch.digest_at(done - 1) if done else stretch.parent,
            digests=bytes(stretch.digests[done * DIGEST_BYTES : end * DIGEST_BYTES]),
            blocks=pack_uint32(stretch.blocks[done:end]),
        )
        chunker.entries_left -= end - done
        chunker.bytes_left -= STRETCH_ENTRY_BYTES * (end - done)
        done = end
