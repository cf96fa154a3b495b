"""Arrays of numbers as they travel: little-endian, whatever the machine; made and read in bulk.

Protobuf makes an object of every entry of a repeated field, which took a third of a large step's time.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

_IS_BIG_ENDIAN = sys.byteorder == "big"


def pack_uint32(numbers: Iterable[int]) -> bytes:
    """4 bytes for each.

    Raises:
        ValueError: a number does not fit.
        TypeError: something is no number.
    """
    return _pack("I", numbers)


def pack_uint64(numbers: Iterable[int]) -> bytes:
    """8 bytes for each.

    Raises:
        ValueError: a number does not fit.
        TypeError: something is no number.
    """
    return _pack("Q", numbers)


def pack_uint32s(columns: Iterable[array[int]]) -> bytes:
    """Of arrays of uint32, one after the other."""
    data = b"".join(columns)
    return _pack("I", array("I", data)) if _IS_BIG_ENDIAN else data


def unpack_uint32(data: bytes) -> array[int]:
    """The numbers; ValueError if the length is no multiple of 4."""
    return _unpack("I", data)


def unpack_uint64(data: bytes) -> array[int]:
    """The numbers; ValueError if the length is no multiple of 8."""
    return _unpack("Q", data)


def _pack(code: str, numbers: Iterable[int]) -> bytes:
    try:
        column = array(code, numbers)
    except OverflowError as error:
        raise ValueError(f"out of range: {error}") from None
    if _IS_BIG_ENDIAN:
        column.byteswap()
    return column.tobytes()


def _unpack(code: str, data: bytes) -> array[int]:
    column = array(code, data)
    if _IS_BIG_ENDIAN:
        column.byteswap()
    return column
