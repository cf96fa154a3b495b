"""A pool's block report, made of its owner's ledger, in chunks that every allocator takes.

    for chunk in report_chunks(ledger, now):    # then `ReportEnd`, see `report_end`
        ...

Published blocks go as stretches: consecutive ones of one prefix, each with its digest. Of two blocks with one digest
only the later published one is reported, unless the earlier one is held: the other has been evicted long ago.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence, Set
from typing import Final

from quire.columns import pack_uint32
from quire.hashing import DIGEST_BYTES
from quire.ledger import Ledger, LedgerSequence
from quire.pages import Pages, Scope, Stretch
from quire.v1 import allocator_pb2 as pb

ENTRIES_MAX: Final = 4096  # of one chunk: sequences, published blocks, freed blocks
TABLE_ENTRIES_MAX: Final = 16_384  # of all tables in one chunk: 64 KiB
HEADS_MAX: Final = 512  # sequences and stretches of one chunk, with what they have beside their entries
_MILLISECONDS: Final = 1000


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
    """What closes the report."""
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk.SerializeToString(deterministic=True))
    return pb.ReportEnd(
        chunk_count=len(chunks), last_step=last_step, sha256=sha256.digest(), last_sequence_id=last_sequence_id
    )


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
            message.tables.add(blocks=pack_uint32(part))
            done[group] += len(part)
            chunker.table_entries += len(part) + 1
        if all(count == len(table) for count, table in zip(done, sequence.tables, strict=True)):
            return


def _may_repeat(parts: Sequence[Stretch]) -> bool:
    """Whether two blocks of one group and namespace might carry one digest: two of them begin alike."""
    words: dict[Scope, list[int]] = {}
    for part in parts:
        first_words = memoryview(part.digests).cast("Q")[:: DIGEST_BYTES // 8]
        words.setdefault(part.scope, []).extend(first_words.tolist())
    return any(len(set(own)) != len(own) for own in words.values())


def _outdated(pages: Pages, held: Set[int]) -> set[int]:
    """Blocks whose digest another block carries now."""
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
    """Blocks that were let go of, and are not among the others, in that order."""
    released, blocks = pages.released, array("I")
    steps, operations, ranks = list[int](), list[int](), list[int]()
    for release in pages.releases():
        own = [block for block in release.blocks if released.get(block) is release and block not in others]
        blocks.extend(own)
        steps += [release.step] * len(own)
        operations += [release.operation] * len(own)
        ranks += range(release.rank, release.rank + len(own))
    done = 0
    while done < len(blocks):
        end = min(len(blocks), done + chunker.room())
        chunk = chunker.chunk
        chunk.freed_blocks = pack_uint32(blocks[done:end])
        chunk.freed_steps.extend(steps[done:end])
        chunk.freed_operations.extend(operations[done:end])
        chunk.freed_positions.extend(ranks[done:end])
        chunker.entries += end - done
        done = end


def _add_stretch(chunker: _Chunker, stretch: Stretch) -> None:
    done, count = 0, len(stretch.blocks)
    while done < count:
        end = min(count, done + chunker.room())
        chunker.chunk.prefixes.add(
            namespace=chunker.name(stretch.scope.namespace),
            group=stretch.scope.group,
            first_position=stretch.first_position + done,
            parent_digest=stretch.digest_at(done - 1) if done else stretch.parent,
            digests=bytes(stretch.digests[done * DIGEST_BYTES : end * DIGEST_BYTES]),
            blocks=pack_uint32(stretch.blocks[done:end]),
        )
        chunker.entries += end - done
        chunker.heads += 1
        done = end
