"""The digest of a pool's state: both sides compute it, and find out that they disagree before anybody's text does.

SHA-256 over every live sequence by rising id:

    id              uint64
    token counts    uint32 granted, uint32 committed
    namespace       uint32 length, UTF-8
    tables          of each group: uint32 length, then uint32 block ids; 0xFFFFFFFF for an entry without a block

All numbers little-endian. What is cached is not part of it: an owner does not see which of it has been evicted until
the blocks are granted anew.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

STATE_DIGEST_STEPS: Final = 64  # every so many steps the reply carries one
STATE_DIGEST_ENTRIES_MAX: Final = 65_536  # unless the tables have more entries: it must not hold up anybody's step


class SequenceRow(NamedTuple):
    """One live sequence, as both sides know it."""

    sequence_id: int
    token_count: int
    committed_token_count: int
    namespace: str
    tables: Sequence[array[int]]


def state_digest(sequences: Iterable[SequenceRow]) -> bytes:
    """32 bytes; the sequences come by rising id."""
    sha256 = hashlib.sha256()
    for sequence_id, token_count, committed, namespace, tables in sequences:
        name = namespace.encode()
        sha256.update(struct.pack("<QIII", sequence_id, token_count, committed, len(name)) + name)
        for table in tables:
            sha256.update(struct.pack("<I", len(table)))
            sha256.update(_little_endian(table))
    return sha256.digest()


def _little_endian(table: array[int]) -> bytes:
    if sys.byteorder == "big":
        table = table[:]
        table.byteswap()
    return table.tobytes()
