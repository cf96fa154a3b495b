"""The digest of a pool's state. The owner and the allocator both compute the digest, and so detect different states
before a text is computed from wrong blocks.

The digest is a SHA-256 over every live sequence, by rising id:

    id              uint64
    token counts    uint32 granted, uint32 committed
    namespace       uint32 length, UTF-8
    tables          of each group: uint32 length, then uint32 block ids; 0xFFFFFFFF for an entry without a block

All numbers are little-endian. Cached blocks are not part of the digest: an owner does not learn of an eviction until
the block is granted again.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from quire.protocol.packing import IS_LITTLE_ENDIAN

STATE_DIGEST_STEPS: Final = 64  # The reply to every 64th step carries a digest.
# Most entries in one digest, so that a digest does not delay a step. In a larger pool, successive
# digests cover different sequences, until all of them are covered.
STATE_DIGEST_ENTRIES_MAX: Final = 16_384
SEQUENCE_ENTRIES: Final = 128  # fixed cost of a sequence, in entries
_GOLDEN: Final = 0x9E3779B9  # 2**32 divided by the golden ratio
_SEQUENCE: Final = struct.Struct("<QIII").pack
_LENGTH: Final = struct.Struct("<I").pack


# One live sequence: id, granted tokens, committed tokens, namespace, tables. The row is a tuple, because creating
# objects of a class took as long as all other work of a digest.
SequenceRow: TypeAlias = tuple[int, int, int, str, Sequence["array[int]"]]


def in_turn(sequence_ids: Sequence[int], number: int) -> Sequence[int]:
    """Returns the ids in the order of the digest after step `number`: rising from a start that moves with each digest,
    then from the lowest on.

    The start uses multiples of the golden ratio, which spread evenly however many sequences a digest covers.
    """
    if not sequence_ids:
        return ()
    fraction = number // STATE_DIGEST_STEPS * _GOLDEN % (1 << 32)
    start = fraction * len(sequence_ids) >> 32
    return [*sequence_ids[start:], *sequence_ids[:start]]


def state_digest(sequences: Iterable[SequenceRow], entries_max: int | None = None) -> bytes:
    """Returns a digest of 32 bytes over sequences by rising id, or `in_turn`. The hash stops at `entries_max` table
    entries; each sequence itself counts as `SEQUENCE_ENTRIES`."""
    data, entry_count = bytearray(), 0  # hashed at once: a call per sequence costs more than hashing its bytes
    for sequence_id, token_count, committed, namespace, tables in sequences:
        name = namespace.encode()
        data += _SEQUENCE(sequence_id, token_count, committed, len(name))
        data += name
        entry_count += SEQUENCE_ENTRIES
        for table in tables:
            data += _LENGTH(len(table))
            data += table if IS_LITTLE_ENDIAN else _swapped(table)
            entry_count += len(table)
        if entries_max is not None and entry_count >= entries_max:
            break
    return hashlib.sha256(data).digest()


def _swapped(table: array[int]) -> array[int]:
    table = table[:]
    table.byteswap()
    return table
