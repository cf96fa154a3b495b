"""Encoding of values as bytes, for messages between ranks.

A value consists of tensors on the host, numbers, texts, None, tuples, and frozen dataclasses of a few known types. The
bytes are a JSON header that describes the value, then the content of each tensor at a multiple of 8 bytes:

    uint32 length of the header | header | padding | tensor | padding | tensor ...

The header names types, dtypes and shapes. Unlike a pickle, a message cannot execute code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

_DTYPES = {str(dtype): dtype for dtype in (torch.int32, torch.int64, torch.float32, torch.bool)}
_ALIGNMENT = 8
_LENGTH_BYTES = 4


def pack(value: object) -> np.ndarray:
    """Returns a value as bytes, uint8 `[bytes]`.

    Raises:
        TypeError: the value has a part of a type that is not supported.
    """
    tensors: list[np.ndarray] = []
    header = json.dumps(_described(value, tensors), separators=(",", ":")).encode()
    sizes = [_padded(_LENGTH_BYTES + len(header)), *(_padded(tensor.nbytes) for tensor in tensors)]
    packed = np.zeros(sum(sizes), dtype=np.uint8)
    packed[:_LENGTH_BYTES] = np.frombuffer(len(header).to_bytes(_LENGTH_BYTES, "little"), dtype=np.uint8)
    packed[_LENGTH_BYTES : _LENGTH_BYTES + len(header)] = np.frombuffer(header, dtype=np.uint8)
    at = sizes[0]
    for tensor, size in zip(tensors, sizes[1:], strict=True):
        packed[at : at + tensor.nbytes] = tensor.reshape(-1).view(np.uint8)
        at += size
    return packed


def unpack(packed: np.ndarray, types: Mapping[str, type]) -> Any:
    """Returns the value that was packed. The value's tensors own their memory.

    Args:
        packed: uint8 `[bytes]`, the result of `pack`.
        types: the dataclasses that the value may have, by name.

    Raises:
        KeyError: the value has another dataclass.
    """
    length = int.from_bytes(packed[:_LENGTH_BYTES].tobytes(), "little")
    header = json.loads(packed[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    at = _padded(_LENGTH_BYTES + length)

    def value_of(described: Any) -> Any:
        nonlocal at
        if not isinstance(described, dict):
            return described
        if "items" in described:
            return tuple(value_of(item) for item in described["items"])
        if "type" in described:
            return types[described["type"]](**{name: value_of(part) for name, part in described["fields"].items()})
        dtype, shape = _DTYPES[described["dtype"]], described["shape"]
        tensor = torch.empty(shape, dtype=dtype)
        flat = tensor.numpy().reshape(-1).view(np.uint8)
        flat[:] = packed[at : at + tensor.nbytes]
        at += _padded(tensor.nbytes)
        return tensor

    return value_of(header)


def _described(value: object, tensors: list[np.ndarray]) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and str(value.dtype) in _DTYPES:
        tensors.append(np.ascontiguousarray(value.detach().cpu().numpy()))
        return {"dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, tuple | list):
        return {"items": [_described(item, tensors) for item in value]}
    if is_dataclass(value) and not isinstance(value, type):
        described = {field.name: _described(getattr(value, field.name), tensors) for field in fields(value)}
        return {"type": type(value).__name__, "fields": described}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another rank")


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
