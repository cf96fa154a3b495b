"""Packs and unpacks arrays of numbers for the wire, in bulk: little-endian on every machine.

Protobuf makes an object for every entry of a repeated field, which took a third of a large step's time.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, SupportsIndex

from quire._numbers import shown

IS_LITTLE_ENDIAN: Final = sys.byteorder == "little"
_UINT32: Final = array("I")
_UINT64: Final = array("Q")
_INT32: Final = array("i")


def pack_uint32(numbers: Iterable[int], name: str = "") -> bytes:
    """Packs each number into 4 bytes. `name` is the parameter's name for error messages.

    Raises:
        ValueError: a number does not fit.
        TypeError: an entry is not a number. With `name`, True and False are not numbers either.
    """
    return _pack("I", numbers, name)


def pack_int32(numbers: Sequence[int]) -> bytes:
    """Packs each number into 4 bytes. Numbers may be negative. The caller has checked that they fit."""
    return _pack("i", numbers)


def pack_column(numbers: Sequence[int], name: str = "") -> bytes:
    """Packs a column of a step or its answer like `pack_uint32`, but a column of zeros becomes empty."""
    return _pack("I", numbers, name) if any(numbers) else b""


def pack_uint64(numbers: Iterable[int], name: str = "") -> bytes:
    """Packs each number into 8 bytes, otherwise like `pack_uint32`."""
    return _pack("Q", numbers, name)


def pack_uint32s(columns: Iterable[array[int]]) -> bytes:
    """Packs arrays of uint32, one after the other."""
    data = b"".join(columns)
    return data if IS_LITTLE_ENDIAN else _pack("I", array("I", data))


def unpack_uint32(data: bytes) -> array[int]:
    """Returns the numbers. Raises ValueError if the length is not a multiple of 4."""
    return _unpack(_UINT32, data)


def unpack_uint64(data: bytes) -> array[int]:
    """Returns the numbers. Raises ValueError if the length is not a multiple of 8."""
    return _unpack(_UINT64, data)


def entry_uint32(data: bytes, row: int) -> int:
    """Returns one number of a column. An empty column has only zeros."""
    return int.from_bytes(data[4 * row : 4 * row + 4], "little")


def entry_int32(data: bytes, row: int) -> int:
    """Returns one number of a column of signed numbers, otherwise like `entry_uint32`."""
    return int.from_bytes(data[4 * row : 4 * row + 4], "little", signed=True)


def as_int32(column: array[int]) -> array[int]:
    """Converts a column that was read as uint32 back to the signed numbers that were packed."""
    signed = _INT32[:]
    signed.frombytes(column.tobytes())
    return signed


def _unpack(empty: array[int], data: bytes) -> array[int]:
    column = empty[:]  # Copying an empty array takes less than half the time of creating one from its type code.
    column.frombytes(data)
    if not IS_LITTLE_ENDIAN:
        column.byteswap()
    return column


def _pack(code: str, numbers: Iterable[int], name: str = "") -> bytes:
    numbers = tuple(numbers) if not isinstance(numbers, (array, list, tuple)) else numbers
    try:
        column = array(code, numbers)
    except (OverflowError, TypeError):
        _refuse(code, numbers, name)
        raise
    # Booleans are refused, because `array` would pack them as 1 and 0.
    if name and not isinstance(numbers, array) and bool in map(type, numbers):
        _refuse(code, numbers, name)
    if not IS_LITTLE_ENDIAN:
        column.byteswap()
    return column.tobytes()


def _refuse(code: str, numbers: Sequence[object], name: str) -> None:
    """Raises the error of the first number that does not fit, if there is one."""
    bits = 8 * array(code).itemsize
    what = f"{name or 'a number'} must be an integer from 0 to {2**bits - 1}, not"
    for number in numbers:
        if not isinstance(number, SupportsIndex) or (name and isinstance(number, bool)):
            raise TypeError(f"{what} {shown(number)}")
        if not 0 <= number.__index__() < 1 << bits:
            raise ValueError(f"{what} {shown(number)}")
