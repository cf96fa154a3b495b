"""Headers of a checkpoint's safetensors files, checked before any tensor is read.

    uint64 length of the header | JSON: name -> dtype, shape, [begin, end) in the data | data

This module refuses a truncated file, and a header that does not fit its data. The error names the file and the tensor.
The safetensors library would not name them, or would read a tensor from the wrong bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from quire_worker.model.checkpoint import CheckpointError, places_of_weights, weight_files

_HEADER_BYTES_MAX = 100_000_000  # safetensors' limit
_LENGTH_BYTES = 8
_DIMENSIONS_MAX = 64  # torch's limit
_NUMBER_MAX = (1 << 64) - 1
_DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """A tensor's entry: its file, dtype, shape and size.

    Attributes:
        file: the file's name in the checkpoint's folder.
        dtype: safetensors' name of the dtype, for example BF16.
        byte_count: bytes of the tensor in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    byte_count: int


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """Returns the entries of all tensors of a checkpoint, by name.

    Raises:
        CheckpointError: a file is missing, cut off or damaged, two files hold the same tensor, or a file lacks a tensor
            that the index places in it.
    """
    found: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        for name, entry in read_header(path).items():
            if name in found:
                raise CheckpointError(f"tensor {name:.200} is in two files, {found[name].file} and {path.name}")
            found[name] = entry
    for name, file in places_of_weights(folder).items():
        if name not in found or found[name].file != file:
            raise CheckpointError(f"{file} lacks tensor {name:.200}, which the index of {folder} lists there")
    return found


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the entries of all tensors of one file, by name.

    Raises:
        CheckpointError: the file is cut off, or is not a safetensors file.
    """
    with path.open("rb") as file:
        return header_of(path.name, file, path.stat().st_size)


def header_of(name: str, file: BinaryIO, size: int) -> dict[str, TensorEntry]:
    """Returns the entries of an open file of this name and size; `file` must be at position 0.

    Raises:
        CheckpointError: see `read_header`.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or not 2 <= length <= min(_HEADER_BYTES_MAX, size - _LENGTH_BYTES):
        raise CheckpointError(
            f"{name} cannot be loaded: it has {size:,} bytes but begins with the length {length:,} for its header"
        )
    header = file.read(length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{name} cannot be loaded: its header is not a JSON object") from None
    return _checked(name, entries, size - _LENGTH_BYTES - length)


def _checked(file: str, entries: dict[str, Any], data_bytes: int) -> dict[str, TensorEntry]:
    """Checks that the tensors of a header fill the data without gaps, and returns its entries."""
    found, places = {}, []
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], _shape_of(entry["shape"]), entry["data_offsets"]
            begin, end, bits = _natural(begin), _natural(end), _DTYPE_BITS[dtype]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{file} cannot be loaded: its header has no valid entry for tensor {name:.200}"
            ) from None
        if (end - begin) * 8 != math.prod(shape) * bits:
            raise CheckpointError(
                f"{file} cannot be loaded: tensor {name:.200} of {dtype} {list(shape)} does not take"
                f" {end - begin:,} bytes"
            )
        found[name] = TensorEntry(file, dtype, shape, end - begin)
        places.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(places):
        if begin != reached:
            raise CheckpointError(
                f"{file} cannot be loaded: tensor {name:.200} begins at byte {begin:,}, not {reached:,}"
            )
        if end > data_bytes:
            raise CheckpointError(
                f"{file} cannot be loaded: it is truncated: tensor {name:.200} ends at byte {end:,} of {data_bytes:,}"
            )
        reached = end
    if reached != data_bytes:
        raise CheckpointError(f"{file} cannot be loaded: {data_bytes - reached:,} bytes at its end belong to no tensor")
    return found


def _shape_of(sizes: list[object]) -> tuple[int, ...]:
    if len(sizes) > _DIMENSIONS_MAX:  # multiplying a million sizes would take minutes
        raise ValueError(len(sizes))
    return tuple(map(_natural, sizes))


def _natural(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _NUMBER_MAX:
        raise ValueError(number)
    return number
