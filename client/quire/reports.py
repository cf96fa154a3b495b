"""A pool's block report, made of its owner's ledger, in chunks that every allocator takes.

    for chunk in report_chunks(ledger, now):    # then `ReportEnd`, see `report_end`
        ...

Published blocks go as stretches: consecutive ones of one prefix, each with its digest. Of two blocks with one digest
only the later published one is reported, unless the earlier one is held: the other has been evicted long ago.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from quire.ledger import Ledger, LedgerSequence, Published, Stamp
from quire.v1 import allocator_pb2 as pb

ENTRIES_MAX: Final = 4096  # of one chunk: sequences, published blocks, freed blocks
TABLE_ENTRIES_MAX: Final = 16_384  # of all tables in one chunk: 64 KiB
HEADS_MAX: Final = 512  # sequences and stretches of one chunk, with what they have beside their entries
_MILLISECONDS: Final = 1000


_Scope = tuple[int, str]  # group, namespace: inside one, a digest names one block


class _Chunker:
    """Fills chunks one after the other."""

    def __init__(self) -> None:
        self.done: list[pb.ReportChunk] = []
        self._start()

    def _start(self) -> None:
        self.chunk = pb.ReportChunk(number=len(self.done))
        self.entries = self.table_entries = self.heads = 0
        self._names: dict[str, int] = {}

    def room(self) -> int:
        """Entries that fit the current chunk; a new one is begun where none does."""
        if self.entries >= ENTRIES_MAX or self.table_entries >= TABLE_ENTRIES_MAX or self.heads >= HEADS_MAX:
            self.finish()
        return ENTRIES_MAX - self.entries

    def finish(self) -> None:
        """Ends the current chunk, if there is anything in it."""
        if self.entries:
            self.chunk.namespaces.extend(self._names)
            self.done.append(self.chunk)
            self._start()

    def name(self, namespace: str) -> int:
        """Index of a namespace in the current chunk."""
        return self._names.setdefault(namespace, len(self._names))


def report_chunks(ledger: Ledger, now: float) -> list[pb.ReportChunk]:
    """The whole report; empty for an empty pool. `now` is in seconds, for what is left of holds."""
    chunker = _Chunker()
    for sequence_id, sequence in ledger.sequences.items():
        _add_sequence(chunker, sequence_id, sequence, now)
    held = ledger.held_blocks()
    current = _current(ledger.published, held)
    for carriers in current.values():
        for stretch in _stretches(ledger.published, carriers):
            _add_stretch(chunker, ledger.published[stretch[0]], stretch, ledger.published)
    blocks = {block for carriers in current.values() for block in carriers.values()} - held
    freed = [(block, stamp) for block, stamp in ledger.released.items() if block in blocks]
    _add_freed(chunker, freed)
    chunker.finish()
    return chunker.done


def report_end(chunks: Sequence[pb.ReportChunk], *, last_step: int, last_sequence_id: int) -> pb.ReportEnd:
    """What closes the report."""
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk.SerializeToString(deterministic=True))
    return pb.ReportEnd(
        chunk_count=len(chunks), last_step=last_step, sha256=sha256.digest(), last_sequence_id=last_sequence_id
    )


def pack(blocks: Iterable[int]) -> bytes:
    """Block ids as uint32 little-endian."""
    data = array("I", blocks)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def _add_sequence(chunker: _Chunker, sequence_id: int, sequence: LedgerSequence, now: float) -> None:
    """In one chunk or, with long tables, in several."""
    done = [0] * len(sequence.tables)
    while True:
        chunker.room()
        message = chunker.chunk.sequences.add(
            sequence_id=sequence_id,
            namespace=chunker.name(sequence.namespace),
            token_count=sequence.token_count,
            committed_token_count=sequence.committed_token_count,
            priority=sequence.priority,
            prompt_token_count=sequence.prompt_token_count,
            chunk_token_count=sequence.chunk_token_count,
        )
        if sequence.hold_until is not None:
            message.hold_remaining_ms = max(0, int((sequence.hold_until - now) * _MILLISECONDS))
        chunker.entries += 1
        chunker.heads += 1
        for group, table in enumerate(sequence.tables):
            part = table[done[group] : done[group] + max(0, TABLE_ENTRIES_MAX - chunker.table_entries)]
            message.tables.add(blocks=pack(part))
            done[group] += len(part)
            chunker.table_entries += len(part) + 1
        if all(count == len(table) for count, table in zip(done, sequence.tables, strict=True)):
            return


def _current(published: dict[int, Published], held: set[int]) -> dict[_Scope, dict[bytes, int]]:
    """In each scope, of each digest the block that carries it now."""
    scopes: dict[_Scope, dict[bytes, int]] = {}
    for block, carried in published.items():
        carriers = scopes.setdefault((carried.group, carried.namespace), {})
        other = carriers.setdefault(carried.digest, block)
        if other != block and other not in held:
            carriers[carried.digest] = block
    return scopes


def _stretches(published: dict[int, Published], carriers: dict[bytes, int]) -> Iterator[list[int]]:
    """Blocks that follow one another in a prefix, each block of one scope in one stretch."""
    after: dict[bytes, int] = {}  # of each digest the first block behind it
    heads = []
    for block in carriers.values():
        parent = published[block].parent
        if parent not in carriers or after.setdefault(parent, block) != block:
            heads.append(block)
    for head in heads:
        stretch, following = [], after.get(published[head].digest)
        stretch.append(head)
        while following is not None:
            stretch.append(following)
            following = after.get(published[following].digest)
        yield stretch


def _add_freed(chunker: _Chunker, freed: Sequence[tuple[int, Stamp]]) -> None:
    done = 0
    while done < len(freed):
        part = freed[done : done + chunker.room()]
        chunk = chunker.chunk
        chunk.freed_blocks = pack(block for block, _ in part)
        chunk.freed_steps.extend([stamp.step for _, stamp in part])
        chunk.freed_operations.extend([stamp.operation for _, stamp in part])
        chunk.freed_positions.extend([stamp.rank for _, stamp in part])
        chunker.entries += len(part)
        done += len(part)


def _add_stretch(chunker: _Chunker, first: Published, stretch: Sequence[int], published: dict[int, Published]) -> None:
    done = 0
    while done < len(stretch):
        part = stretch[done : done + chunker.room()]
        head = published[part[0]]
        chunker.chunk.prefixes.add(
            namespace=chunker.name(first.namespace),
            group=first.group,
            first_position=head.position,
            parent_digest=head.parent,
            digests=b"".join([published[block].digest for block in part]),
            blocks=pack(part),
        )
        chunker.entries += len(part)
        chunker.heads += 1
        done += len(part)
